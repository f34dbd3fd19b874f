"""Output stream of a console whose write failures end no run; the run directory holds the same data."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from typing import Any, TextIO

MAX_WRITE_WAIT_SECONDS = 0.2
"""Maximum seconds, of each second, for which writes wait for a slow reader."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""Maximum seconds for which the end of a run waits for the reader."""
MAX_PENDING_BYTES = 4 << 20
"""Maximum bytes that wait for the reader; further lines are dropped, and counted."""
_WRITE_BYTES = 1 << 16


class FaultTolerantStream:
    """Text stream that ignores write failures: a log on a full disk, a closed pipe or terminal.

    Each write is tried anew, so a log continues once its disk has room again. A terminal or pipe that is not
    read (Ctrl-S, a pager) blocks no caller: a thread writes to it, and lines without room are dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False
        self._queue = _WriteQueue(stream) if _may_block(stream) else None

    def write(self, text: str) -> int:
        if self._queue is not None:
            self._queue.add(text)
            return len(text)
        try:
            self._stream.write(text)
        except OSError:
            self._is_broken = True
        return len(text)

    def flush(self) -> None:
        if self._queue is not None:
            return  # the thread buffers nothing
        try:
            self._stream.flush()
        except OSError:
            self._is_broken = True
        else:
            self._is_broken = False

    def discard_pending(self) -> None:
        """Drop unwritten text at the end of a run; Python would write it again at exit, and fail."""
        if self._queue is not None:
            if self._queue.close(CLOSE_TIMEOUT_SECONDS):
                self._queue = None  # nothing waits: from now on as into a file
            return
        self.flush()
        if self._is_broken:
            null_descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_descriptor, self._stream.fileno())
            os.close(null_descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _WriteQueue:
    """Queue of bytes for a descriptor that may block, and the thread that writes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        """Bytes in `_waiting`, and those that are being written."""
        self._dropped_lines = 0
        """Lines dropped since the reader last kept up."""
        self._waited_seconds, self._window_start = 0.0, 0.0
        """Seconds that writes have waited since a time, at most a second ago."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add(self, text: str) -> None:
        data = text.encode(self._stream.encoding or "utf-8", "replace")
        with self._changed:
            if not self._has_room(len(data)):
                self._dropped_lines += max(text.count("\n"), 1)
                return
            self._report_dropped()
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Stop writing after a last chance for the reader; return True if it has read everything."""
        with self._changed:
            has_read = self._changed.wait_for(
                lambda: not self._pending_bytes and not self._dropped_lines, seconds
            )
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
                        self._pending_bytes -= written
                        self._changed.notify_all()
                except BlockingIOError:  # somebody else has made it so
                    time.sleep(0.01)
                except OSError:
                    break  # the terminal has gone: the next write is tried anew
            with self._changed:
                self._pending_bytes -= len(view)
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            if not self._pending:
                self._report_dropped()
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._pending) or self._is_closed)
            if self._is_closed:
                return None
            data = b"".join(self._pending)
            self._pending.clear()
            return data

    def _has_room(self, size: int) -> bool:
        """Return True if the reader keeps up; a merely slow one gets a short wait."""
        if self._dropped_lines:  # until half of what waits has been read
            return self._pending_bytes <= MAX_PENDING_BYTES // 2
        if not self._pending_bytes or self._pending_bytes + size <= MAX_PENDING_BYTES:
            return True
        start = time.monotonic()
        if start - self._window_start > 1.0:
            self._window_start, self._waited_seconds = start, 0.0
        remaining_seconds = max(MAX_WRITE_WAIT_SECONDS - self._waited_seconds, 0.0)
        has_room = self._changed.wait_for(
            lambda: self._pending_bytes + size <= MAX_PENDING_BYTES, remaining_seconds
        )
        self._waited_seconds += time.monotonic() - start
        return has_room

    def _report_dropped(self) -> None:
        if self._dropped_lines:
            lines = (
                f"{self._dropped_lines:,} {'line was' if self._dropped_lines == 1 else 'lines were'} dropped"
            )
            note = f"\nwarning: {lines}: the terminal or pipe was not read; the run directory has all lines\n"
            self._dropped_lines = 0
            self._pending.append(note.encode())
            self._pending_bytes += len(note)


def _may_block(stream: TextIO) -> bool:
    """Return True if a write can wait for a reader: not into files, nor into memory."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        stream.flush()  # what was printed before comes first
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and stream.isatty())
