"""Signals that ask a run to stop, and what another one of them means."""

from __future__ import annotations

import math
import signal
import time

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
    signal.SIGINT: 0.25,
    signal.SIGTERM: 1.0,
    signal.SIGUSR1: math.inf,
    signal.SIGHUP: math.inf,
}
"""Time, in seconds, in which another such signal is the same one: sent to the process and to its group.

That of SIGINT is shorter than the time between two presses of Ctrl-C.
"""


class ReceivedSignals:
    """Stop signals that the supervisor has received, with the time of the first of each kind."""

    def __init__(self) -> None:
        self._first_times: dict[int, float] = {}

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
