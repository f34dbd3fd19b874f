"""Output stream of a console whose write failures end no run; the run directory holds the same data."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from wanma.observe.units import count_text

CLOSE_TIMEOUT_SECONDS = 5.0
"""Maximum seconds for which the end of a run waits for the reader."""
MAX_PENDING_BYTES = 4 << 20
"""Maximum bytes that wait for the reader; further lines are dropped, and counted."""


class FaultTolerantStream:
    """Text stream that ignores write failures: a log on a full disk, a closed pipe or terminal.

    Each write is tried anew, so a log continues once its disk has room again. A terminal or pipe that is not
    read (Ctrl-S, a pager) blocks no caller: a thread writes, and lines without room are dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        """Bytes in `_pending`, and those that are being written."""
        self._dropped_lines = 0
        """Lines dropped since the reader last kept up."""
        self._is_closed = False
        self._descriptor: int | None = None
        """Descriptor to which the thread writes; None: the stream is in memory, or the run has ended."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()
            arguments = (self._descriptor,)
            threading.Thread(target=self._write_all, args=arguments, name="console", daemon=True).start()
            stream.flush()  # what was printed before comes first

    def write(self, text: str) -> int:
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._stream.write(text)
                self._stream.flush()
            return len(text)
        data = text.encode(self._stream.encoding or "utf-8", "replace")
        with self._changed:
            # After a gap, half of what waits must have been read before more is taken.
            limit = MAX_PENDING_BYTES // 2 if self._dropped_lines else MAX_PENDING_BYTES
            if self._pending_bytes and self._pending_bytes + len(data) > limit:
                self._dropped_lines += max(text.count("\n"), 1)
                return len(text)
            self._report_dropped()
            self._add(data)
        return len(text)

    def flush(self) -> None:
        """Flush nothing: each write goes out at once."""

    def discard_pending(self) -> None:
        """Drop unwritten text at the end of a run, after a last chance for the reader."""
        with self._changed:
            has_read = self._changed.wait_for(
                lambda: not self._pending_bytes and not self._dropped_lines, CLOSE_TIMEOUT_SECONDS
            )
            self._is_closed = True
            self._changed.notify_all()
        if not has_read:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            self._stream.flush()
        except OSError:  # of what was printed before; Python would write it again at exit, and fail
            if descriptor is not None:
                with Path(os.devnull).open("wb") as null:
                    os.dup2(null.fileno(), descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_all(self, descriptor: int) -> None:
        """Write what waits; body of the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if not self._pending:
                    return
                data = b"".join(self._pending)
                self._pending.clear()
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(descriptor, view) :]
                except BlockingIOError:  # somebody else has made it so
                    time.sleep(0.01)
                except OSError:
                    break  # the terminal has gone, or the disk is full: the next write is tried anew
            with self._changed:
                self._pending_bytes -= len(data)
                if not self._pending:
                    self._report_dropped()
                self._changed.notify_all()

    def _add(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._changed.notify_all()

    def _report_dropped(self) -> None:
        if self._dropped_lines:
            lines = count_text(self._dropped_lines, "line")
            self._dropped_lines = 0
            self._add(
                f"\nwarning: {lines} dropped: the terminal or pipe was not read; the run directory has all "
                "lines\n".encode()
            )
