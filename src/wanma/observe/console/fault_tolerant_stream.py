"""Output stream of a console whose write failures end no run; the run directory holds the same data."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from typing import Any, TextIO

WAIT_SECONDS = 0.2
"""Maximum seconds, of each second, for which writes wait for a slow reader."""
LAST_SECONDS = 5.0
"""Maximum seconds for which the end of a run waits for the reader."""
KEPT_BYTES = 4 << 20
"""Maximum bytes that wait for the reader; further lines are dropped, and counted."""
_WRITE_BYTES = 1 << 16


class LastingStream:
    """Text stream that ignores write failures: a log on a full disk, a closed pipe or terminal.

    Each write is tried anew, so a log continues once its disk has room again. A terminal or pipe that is not
    read (Ctrl-S, a pager) blocks no caller: a thread writes to it, and lines without room are dropped.
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
            return  # the thread buffers nothing
        try:
            self._stream.flush()
        except OSError:
            self._is_broken = True
        else:
            self._is_broken = False

    def let_go(self) -> None:
        """Drop unwritten text at the end of a run; Python would write it again at exit, and fail."""
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
    """Queue of bytes for a descriptor that may block, and the thread that writes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        """Bytes in `_waiting`, and those that are being written."""
        self._dropped = 0
        """Lines dropped since the reader last kept up."""
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
        """Stop writing after a last chance for the reader; return True if it has read everything."""
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
        """Return True if the reader keeps up; a merely slow one gets a short wait."""
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
    """Return True if a write can wait for a reader: not into files, nor into memory."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        stream.flush()  # what was printed before comes first
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and stream.isatty())
