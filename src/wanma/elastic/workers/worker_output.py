"""Output of ranks on its way from their logs to the terminal.

The ranks write into files, so none ever waits for a reader. The supervisor reads the files, a few times a
second, and passes on whole lines. A progress bar that redraws itself is shown now and then.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wanma.elastic.protocol.local_messages import WorkerSpec
from wanma.elastic.transport.event_loop import EventLoop, Timer
from wanma.job.run.run_directory import read_tail
from wanma.job.run.worker import Event

OUTPUT_EVENT = "output"
"""Kind of the event that carries a line of a rank: `rank` and `text`."""
POLL_SECONDS = 0.1
PARTIAL_LINE_SECONDS = 10.0
"""Time, in seconds, after which a line without an end, such as a progress bar, is shown as it is."""
CHUNK_BYTES = 1 << 20
LAST_OUTPUT_LINES = 20
"""Lines of a failed program's log that its failure shows."""
MAX_LINE_BYTES = 1 << 16
"""Most bytes of a line; a longer one is split."""
_START_LINE = re.compile(r"--- \d{4}-\d\d-\d\d [\d:]+ rank \d+ of .* ---$")
_WANMA_LINE = re.compile(
    r"step \d+/\d+  loss .*  peak memory \d+ bytes$|collectives of \d+ ranks use shared memory$"
)
"""Lines that wanma itself adds to a rank's log: the console has them in its own words."""


def start_line(spec: WorkerSpec, start_method: str) -> str:
    """Return the line with which a rank's log begins anew.

    Args:
        spec: configuration of the worker.
        start_method: 'forked' or 'spawned'.
    """
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"--- {now} rank {spec.rank} of {spec.world_size} on node {spec.node_rank} ({socket.gethostname()}), "
        f"generation {spec.generation}, process {os.getpid()}, {start_method} ---"
    )


def exception_line(rank: int) -> str:
    """Return the line before the traceback of a rank's end: the log keeps it, and a failure shows it once."""
    return f"--- rank {rank} ends by an exception ---"


def read_last_output(log: Path, lines: int = LAST_OUTPUT_LINES) -> str:
    """Return the last lines that a rank has printed since its newest start; empty if its log has none."""
    try:
        text = read_tail(log, MAX_LINE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    last: list[str] = []
    for line in text.splitlines():
        last = [] if _START_LINE.match(line) else [*last[-lines + 1 :], line]
    return "\n".join(last)


class OutputReader:
    """Reader of the output of one generation's ranks on this node.

    Args:
        logs: log file by rank.
        loop: event loop.
        on_event: gets an event of kind `OUTPUT_EVENT` for each line.
    """

    def __init__(
        self, logs: Sequence[tuple[int, Path]], loop: EventLoop, on_event: Callable[[Event], object]
    ) -> None:
        self._readers = [_LogReader(rank, path) for rank, path in logs]
        self._loop, self._on_event = loop, on_event
        self._timer: Timer | None = None
        self._read()

    def flush(self) -> None:
        """Pass on all whole lines that there are now; a rank may go on to write more."""
        for tail in self._readers:
            for _ in range(tail.count_chunks()):
                tail.read()
                self._send_lines(tail, tail.lines())

    def close(self) -> None:
        """Pass on the rest and close the logs; a second call does nothing."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self.flush()
        for tail in self._readers:
            self._send_lines(tail, tail.partial_line())
            tail.close()

    def _read(self) -> None:
        for tail in self._readers:
            tail.read()
            self._send_lines(tail, tail.lines())
            if tail.is_partial_line_due(time.monotonic()):
                self._send_lines(tail, tail.partial_line())
        self._timer = self._loop.call_later(POLL_SECONDS, self._read)

    def _send_lines(self, reader: _LogReader, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_event({"kind": OUTPUT_EVENT, "rank": reader.rank, "text": line})


class _LogReader:
    """Reader of one log, from its present end."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.lseek(self._file, 0, os.SEEK_END)
        self._pending = b""
        self._pending_since = time.monotonic()
        """Time at which the pending line began, or was shown last."""
        self._shown_text = b""
        self._is_after_exception = False
        """True if the traceback of the rank's end follows."""

    def count_chunks(self) -> int:
        """Return the number of calls of `read` that cover the present content."""
        unread_bytes = os.fstat(self._file).st_size - os.lseek(self._file, 0, os.SEEK_CUR)
        return -(-unread_bytes // CHUNK_BYTES)

    def read(self) -> None:
        """Read new content, at most one chunk."""
        data = os.read(self._file, CHUNK_BYTES)
        if data and not self._pending:
            self._pending_since = time.monotonic()
        self._pending += data

    def lines(self) -> list[str]:
        """Return the whole lines that were read, without wanma's own marks."""
        *complete, self._pending = self._pending.split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            complete.append(self._pending)
            self._pending = b""
        if complete:
            self._pending_since, self._shown_text = time.monotonic(), b""
        return [text for line in complete if (text := self._text(line)) is not None]

    def partial_line(self) -> list[str]:
        """Return the unfinished line, unless it was shown before."""
        self._pending_since = time.monotonic()
        if self._pending == self._shown_text:
            return []
        self._shown_text = self._pending
        text = self._text(self._pending)
        return [text] if text else []

    def is_partial_line_due(self, now: float) -> bool:
        return bool(self._pending) and now - self._pending_since > PARTIAL_LINE_SECONDS

    def close(self) -> None:
        os.close(self._file)

    def _text(self, line: bytes) -> str | None:
        """Return the text that a terminal would show of a line; None: nothing of it is the script's."""
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if _START_LINE.match(text):
            self._is_after_exception = False
            return None
        if self._is_after_exception or _WANMA_LINE.match(text):
            return None
        before, mark, _ = text.partition(exception_line(self.rank))
        self._is_after_exception = bool(mark)
        return before if before or not mark else None
