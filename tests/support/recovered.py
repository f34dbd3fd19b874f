"""A run that meets faults, and what is to be true of it afterwards: nothing was lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.command import Desk, Ran, Training, assert_bitwise_equal
from support.injection import Fault, Strike, injected, struck

STEPS = 12
WHOLE_STEPS = 108
"""Steps of the run that nothing happens to; any multiple of `STEPS` up to it can be compared."""
COMMON = (
    "text.toml",
    f"train.steps={STEPS}",
    "train.schedule=constant",  # shorter runs are the beginning of longer ones
    "checkpoint.in_memory_every_steps=1",
)
QUIET = (
    "await exchange",
    "flip snapshot",
    "flip checkpoint",
    "tear checkpoint",
    "fill disk",
    "free disk",
    "deny",
    "allow",
)
"""Faults that nobody notices yet: the time of a recovery begins with another."""


@dataclass(frozen=True)
class Met:
    """A run that met faults."""

    ran: Ran
    training: Training
    faults: Sequence[Fault]
    strikes: Sequence[Strike]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return [event for event in self.training.events if event["kind"] == "recovery"]

    @property
    def longest_seconds(self) -> float | None:
        """From a fault to the end of the first step after its recovery, at most; None: nobody recovered.

        By the clock of the fault, so that what it took to notice it counts.
        """
        strikes = [
            strike.unix
            for fault, strike in zip(self.faults, self.strikes, strict=True)
            if fault.what not in QUIET
        ]
        longest = []
        for recovery in self.recoveries:
            its = [unix for unix in strikes if unix < recovery["time"]]
            # Where the next fault was quicker than the word of this recovery, the supervisor's clock counts.
            longest.append(recovery["time"] - min(its) if its else recovery["seconds"])
            strikes = [unix for unix in strikes if unix not in its]
        return max(longest, default=None)


def meet(
    desk: Desk, name: str, *faults: Fault, overrides: Sequence[str] = (), before: tuple[str, ...] = ()
) -> Met:
    """Train and meet faults; all of them strike, and no process is left.

    Args:
        name: of the run; its folder is `run_name` of it.
        before: words before the command.
    """
    name = run_name(name)
    marks = desk.folder / f"marks-{name}"
    running = desk.start(
        "train", *COMMON, *overrides, "--run-dir", name, before=before, **injected(marks, *faults)
    )
    running.until(lambda: desk.training(name).steps_begun() >= 1)
    running.look()
    ran = running.end()
    assert running.left() == []
    missed = [fault for number, fault in enumerate(faults) if not (marks / str(number)).exists()]
    assert not missed, f"faults that never struck: {missed}\n{ran.text}"
    strikes = struck(marks)
    return Met(ran, desk.training(name), faults, strikes)


def run_name(text: str) -> str:
    """A folder's name of it."""
    return re.sub(r"\W+", "-", text)


def check_whole(ran: Ran, training: Training, whole: Training, steps: int = STEPS) -> None:
    """Check that it ended well, with every step once and the bits of the run that nothing happened to."""
    ran.check()
    assert [step["step"] for step in training.metrics] == list(range(1, steps + 1)), "each once, in order"
    assert training.losses == whole.losses[:steps]
    assert_bitwise_equal(training.state(), whole.state(steps))
