"""Signals that ask a run to stop, and what another one of them means."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wanma.elastic.transport.event_loop import EventLoop

SIGINT_EXIT_CODE = 130
"""Exit code of a run that Ctrl-C has stopped."""
STOP_SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
}
"""Signals that ask the run to stop; SIGKILL follows a SIGTERM, and SIGTERM, some day, a SIGUSR1."""
SIGNAL_REPEAT_SECONDS: dict[int, float] = {
    signal.SIGINT: 1.0,
    signal.SIGTERM: 1.0,
    signal.SIGUSR1: math.inf,
    signal.SIGHUP: math.inf,
}
"""Time, in seconds, in which another such signal is the same one: sent to the process and to its group.

Programs that started this one, such as `make` and `uv run`, pass the terminal's SIGINT on a moment later.
"""


class StopRequest(KeyboardInterrupt):
    """Stop signal before the start of the ranks: as at Ctrl-C the command ends, and there is nothing to save.

    Attributes:
        exit_code: exit code of the command; that of the signal's default action unless the job names another.
    """

    hint = "nothing is lost: the same command starts again"

    def __init__(self, number: int) -> None:
        self.message = f"stopped before the start of the ranks: {STOP_SIGNALS[signal.Signals(number)]}"
        super().__init__(f"{self.message}\n  {self.hint}")
        self.exit_code = 128 + number


@contextmanager
def stop_exit_code(exit_code: int) -> Iterator[None]:
    """Give a `StopRequest` inside the context this exit code."""
    try:
        yield
    except StopRequest as request:
        request.exit_code = exit_code
        raise


class StartHandler:
    """Handler of SIGUSR1, which Slurm sends before a time limit, from the first lines of a command on.

    It raises `StopRequest` until the supervisor handles signals, and ignores those after that has ended.
    """

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.is_over:
            raise StopRequest(number)

    @classmethod
    def install(cls) -> None:
        """Install the handler, unless the process that started this one has set another disposition."""
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, cls())


class ReceivedSignals:
    """Stop signals that the supervisor has received, with the time of the first of each kind."""

    def __init__(self) -> None:
        self._first_times: dict[int, float] = {}

    def listen(self, loop: EventLoop, callback: Callable[[int], None]) -> None:
        """Let the loop call `callback` with each stop signal; from here on none raises `StopRequest`."""
        start_handler = signal.getsignal(signal.SIGUSR1)
        loop.handle_signals(STOP_SIGNALS, callback)
        if isinstance(start_handler, StartHandler):
            start_handler.is_over = True

    def __bool__(self) -> bool:
        return bool(self._first_times)

    def is_repeat(self, number: int) -> bool:
        """Return whether the signal is one that has been received, sent once more by the same request."""
        age = time.monotonic() - self._first_times.get(number, -math.inf)
        return age < SIGNAL_REPEAT_SECONDS[number]

    def add(self, number: int) -> bool:
        """Record a signal; return whether it is a second request: of its kind, or Ctrl-C after SIGTERM."""
        is_second = number in self._first_times or (
            number == signal.SIGINT and signal.SIGTERM in self._first_times
        )
        self._first_times.setdefault(number, time.monotonic())
        return is_second
