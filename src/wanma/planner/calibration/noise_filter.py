"""Which rounds of a measurement count: those in which other programs left the machine alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

QUIET_CPUS = 0.1
"""CPUs that other programs may use, on average, in a quiet stretch of time."""
STRETCH_SECONDS = 0.4
"""Over so long rounds are judged together: the kernel counts CPU time in hundredths of a second."""
ENOUGH = 3
"""Quiet rounds that make a point."""


@dataclass(frozen=True)
class Round:
    """One point, run for a while by all ranks together."""

    seconds: float
    """Of one run."""
    own_cpu_seconds: float
    """That the ranks used meanwhile, together."""
    busy_cpu_seconds: float
    """That all programs used meanwhile; 0 where the kernel does not say."""
    wall_seconds: float


@dataclass(frozen=True)
class Judged:
    """A round's time, and whether it counts."""

    seconds: float
    is_quiet: bool


def judged(rounds: Sequence[Round]) -> list[Judged]:
    """Rounds that followed each other: each is as quiet as the stretch of time that it lies in."""
    found: list[Judged] = []
    for stretch in _stretches(rounds):
        others = sum(one.busy_cpu_seconds - one.own_cpu_seconds for one in stretch)
        is_quiet = others <= QUIET_CPUS * sum(one.wall_seconds for one in stretch)
        found += (Judged(one.seconds, is_quiet) for one in stretch)
    return found


def is_enough(rounds: Sequence[Judged]) -> bool:
    """Whether enough rounds of a point were quiet."""
    return sum(one.is_quiet for one in rounds) >= ENOUGH


def chosen_seconds(rounds: Sequence[Judged]) -> float:
    """Lower quartile of a point's quiet rounds, or of all of them where too few were quiet.

    Lower than the median: what disturbed a round and was not noticed can only have made it longer.
    """
    counted = [one for one in rounds if one.is_quiet] if is_enough(rounds) else rounds
    times = sorted(one.seconds for one in counted)
    return times[(len(times) - 1) // 4]


def _stretches(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Each but the last is at least `STRETCH_SECONDS` long."""
    stretch: list[Round] = []
    for one in rounds:
        stretch.append(one)
        if sum(part.wall_seconds for part in stretch) >= STRETCH_SECONDS:
            yield stretch
            stretch = []
    if stretch:
        yield stretch
