"""Order of the turns of programs that live at once: one after the other, each for the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_STOP_SECONDS = 10.0
"""Longest stop of a program. wanma's heartbeats time out after 20 s, collectives of others after minutes."""


class TurnTaker(Protocol):
    """Program that runs in its turns, and is stopped in those of others."""

    @property
    def is_over(self) -> bool:
        """True if it has ended, or has been ended."""
        ...

    @property
    def has_step(self) -> bool:
        """True if its first step has ended."""
        ...

    @property
    def stopped_since(self) -> float | None:
        """Monotonic time since which it is stopped; None: it runs, or has not been started."""
        ...

    def take_turn(self, seconds: float, *, ends_with_first_step: bool) -> None:
        """Run for so many seconds, or until it ends or its first step has ended; then stop."""
        ...


def take_turns(
    programs: Sequence[TurnTaker],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run programs to their ends, one at a time.

    Start-ups may differ in duration: a program whose first step has ended waits for those of the others, so
    that all make their steps at once, but for `MAX_STOP_SECONDS` at most. The last one runs on without stops.

    Args:
        clock: source of seconds that never jump.
    """
    waits = True
    while living := [one for one in programs if not one.is_over]:
        for program in living:
            others = [one for one in living if one is not program and not one.is_over]
            if not others:
                program.take_turn(math.inf, ends_with_first_step=False)
                continue
            if waits and program.has_step and not all(one.has_step for one in others):
                since = program.stopped_since
                if since is None or clock() - since + seconds < MAX_STOP_SECONDS:
                    continue
                waits = False
            program.take_turn(seconds, ends_with_first_step=waits and not program.has_step)
