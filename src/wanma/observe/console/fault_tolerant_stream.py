"""A console that cannot be written to ends or stops no run: what is shown is in the run directory as well."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from typing import Any, TextIO

WAIT_SECONDS = 0.2
"""Longest, of each second, that writes wait for a slow reader."""
LAST_SECONDS = 5.0
"""Longest that the end of a run waits for the reader."""
KEPT_BYTES = 4 << 20
"""Most bytes that wait for the reader; what comes then is dropped, and counted."""
_WRITE_BYTES = 1 << 16


class LastingStream:
    """A text stream whose failures are no errors: a log on a full disk, a pipe or terminal that has gone.

    Each write is tried anew, so a log goes on once its disk has room again. A terminal or pipe that is not
    read (Ctrl-S, a pager) keeps nobody waiting: a thread writes there, and what has no room is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False
        self._slow = _SlowReader(stream) if _may_block(stream) else None

    def write(self, text: str) -> int:
        if self._slow is not None:
            self._slow.add(text)
            return len(text)
        try:
            self._stream.write(text)
        except OSError:
            self._is_broken = True
        return len(text)

    def flush(self) -> None:
        if self._slow is not None:
            return  # the thread keeps nothing back
        try:
            self._stream.flush()
        except OSError:
            self._is_broken = True
        else:
            self._is_broken = False

    def let_go(self) -> None:
        """At the end: drop what could not be written; Python would try it again as it exits, and fail."""
        if self._slow is not None:
            if self._slow.close(LAST_SECONDS):
                self._slow = None  # nothing waits: from now on as into a file
            return
        self.flush()
        if self._is_broken:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _SlowReader:
    """Bytes on their way to a descriptor that may block, and the thread that writes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        """Bytes of `_waiting`, with those that are being written."""
        self._dropped = 0
        """Lines that were dropped since the reader last kept up."""
        self._waited, self._since = 0.0, 0.0
        """Seconds that writes have waited since a time, at most a second ago."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add(self, text: str) -> None:
        data = text.encode(self._stream.encoding or "utf-8", "replace")
        with self._changed:
            if not self._has_room(len(data)):
                self._dropped += max(text.count("\n"), 1)
                return
            self._note_dropped()
            self._waiting.append(data)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Give the reader a last chance; returns whether it has read all. Nothing is written any more."""
        with self._changed:
            has_read = self._changed.wait_for(lambda: not self._bytes and not self._dropped, seconds)
            self._is_closed = True
            self._changed.notify_all()
            return has_read

    def _write_all(self) -> None:
        descriptor = self._stream.fileno()
        while (data := self._next()) is not None:
            view = memoryview(data)
            while view and not self._is_closed:
                try:
                    written = os.write(descriptor, view[:_WRITE_BYTES])
                    view = view[written:]
                    with self._changed:
                        self._bytes -= written
                        self._changed.notify_all()
                except BlockingIOError:  # somebody else has made it so
                    time.sleep(0.01)
                except OSError:
                    break  # the terminal has gone: the next write is tried anew
            with self._changed:
                self._bytes -= len(view)
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            if not self._waiting:
                self._note_dropped()
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
            if self._is_closed:
                return None
            data = b"".join(self._waiting)
            self._waiting.clear()
            return data

    def _has_room(self, size: int) -> bool:
        """Return whether the reader keeps up; one that is merely slow is waited for, a little."""
        if self._dropped:  # until half of what waits has been read
            return self._bytes <= KEPT_BYTES // 2
        if not self._bytes or self._bytes + size <= KEPT_BYTES:
            return True
        began = time.monotonic()
        if began - self._since > 1.0:
            self._since, self._waited = began, 0.0
        left = max(WAIT_SECONDS - self._waited, 0.0)
        has_room = self._changed.wait_for(lambda: self._bytes + size <= KEPT_BYTES, left)
        self._waited += time.monotonic() - began
        return has_room

    def _note_dropped(self) -> None:
        if self._dropped:
            lines = f"{self._dropped:,} {'line was' if self._dropped == 1 else 'lines were'} dropped"
            note = f"\nwarning: {lines}: the terminal or pipe was not read; the run directory has all\n"
            self._dropped = 0
            self._waiting.append(note.encode())
            self._bytes += len(note)


def _may_block(stream: TextIO) -> bool:
    """Return whether a write waits for somebody who reads: not into files, nor into memory."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        stream.flush()  # what was printed before comes first
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and stream.isatty())
