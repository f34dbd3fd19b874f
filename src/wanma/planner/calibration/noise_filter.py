"""Noise filter of a benchmark: selects the rounds in which other programs left the node alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

QUIET_CPUS = 0.1
"""CPUs that other programs may use, on average, in a quiet stretch of time."""
STRETCH_SECONDS = 0.4
"""Seconds over which rounds are judged together: the kernel counts CPU time in hundredths of a second."""
ENOUGH = 3
"""Number of quiet rounds that make a point."""


@dataclass(frozen=True)
class Round:
    """One measurement round of one case, run by all ranks together."""

    seconds: float
    """Seconds of one run."""
    own_cpu_seconds: float
    """CPU seconds that the ranks used in the round, summed."""
    busy_cpu_seconds: float
    """CPU seconds that all programs used in the round; 0 where the kernel does not report them."""
    wall_seconds: float


@dataclass(frozen=True)
class Judged:
    """Time of one round and its verdict: quiet or disturbed."""

    seconds: float
    is_quiet: bool


def judged(rounds: Sequence[Round]) -> list[Judged]:
    """Return verdicts for consecutive rounds; each is as quiet as the stretch of time that contains it."""
    found: list[Judged] = []
    for stretch in _stretches(rounds):
        others = sum(one.busy_cpu_seconds - one.own_cpu_seconds for one in stretch)
        is_quiet = others <= QUIET_CPUS * sum(one.wall_seconds for one in stretch)
        found += (Judged(one.seconds, is_quiet) for one in stretch)
    return found


def is_enough(rounds: Sequence[Judged]) -> bool:
    """Return whether enough rounds of a point were quiet."""
    return sum(one.is_quiet for one in rounds) >= ENOUGH


def chosen_seconds(rounds: Sequence[Judged]) -> float:
    """Return the lower quartile of a point's quiet rounds, or of all of them where too few were quiet.

    It lies below the median, because an unnoticed disturbance can only have made a round longer.
    """
    counted = [one for one in rounds if one.is_quiet] if is_enough(rounds) else rounds
    times = sorted(one.seconds for one in counted)
    return times[(len(times) - 1) // 4]


def _stretches(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Yield groups of consecutive rounds, each but the last at least `STRETCH_SECONDS` long."""
    stretch: list[Round] = []
    for one in rounds:
        stretch.append(one)
        if sum(part.wall_seconds for part in stretch) >= STRETCH_SECONDS:
            yield stretch
            stretch = []
    if stretch:
        yield stretch
