"""Noise filter of a benchmark: selects the rounds in which other programs left the node alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_FOREIGN_CPUS = 0.1
"""CPUs that other programs may use, on average, in a quiet stretch of time."""
QUIET_WINDOW_SECONDS = 0.4
"""Seconds over which rounds are judged together: the kernel counts CPU time in hundredths of a second."""
MIN_QUIET_ROUNDS = 3
"""Number of quiet rounds that make a point."""


@dataclass(frozen=True)
class Round:
    """One measurement round of one case, run by all ranks together."""

    seconds: float
    """Seconds of one run."""
    own_cpu_seconds: float
    """CPU seconds that the ranks used in the round, summed."""
    total_cpu_seconds: float
    """CPU seconds that all programs used in the round; 0 where the kernel does not report them."""
    wall_seconds: float
    seconds_by_rank: tuple[float, ...] = ()
    """Seconds of one run on each rank."""


@dataclass(frozen=True)
class ClassifiedRound:
    """Time of one round and its verdict: quiet or disturbed."""

    seconds: float
    is_quiet: bool
    seconds_by_rank: tuple[float, ...] = ()


def classify_rounds(rounds: Sequence[Round]) -> list[ClassifiedRound]:
    """Return verdicts for consecutive rounds; each is as quiet as the stretch of time that contains it."""
    classified: list[ClassifiedRound] = []
    for stretch in _windows(rounds):
        foreign_seconds = sum(measured.total_cpu_seconds - measured.own_cpu_seconds for measured in stretch)
        is_quiet = foreign_seconds <= MAX_FOREIGN_CPUS * sum(measured.wall_seconds for measured in stretch)
        classified += (
            ClassifiedRound(measured.seconds, is_quiet, measured.seconds_by_rank) for measured in stretch
        )
    return classified


def has_enough_quiet_rounds(rounds: Sequence[ClassifiedRound]) -> bool:
    """Return whether enough rounds of a point were quiet."""
    return sum(measured.is_quiet for measured in rounds) >= MIN_QUIET_ROUNDS


def quiet_quartile_seconds(rounds: Sequence[ClassifiedRound]) -> float:
    """Return the lower quartile of a point's quiet rounds, or of all of them where too few were quiet.

    It lies below the median, because an unnoticed disturbance can only have made a round longer.
    """
    return _lower_quartile(measured.seconds for measured in _counted_rounds(rounds))


def quiet_quartile_seconds_by_rank(rounds: Sequence[ClassifiedRound]) -> tuple[float, ...]:
    """Return the same of each rank's times."""
    times = zip(*(measured.seconds_by_rank for measured in _counted_rounds(rounds)), strict=True)
    return tuple(map(_lower_quartile, times))


def _counted_rounds(rounds: Sequence[ClassifiedRound]) -> Sequence[ClassifiedRound]:
    """Return the quiet rounds; all where too few are quiet."""
    return (
        [measured for measured in rounds if measured.is_quiet] if has_enough_quiet_rounds(rounds) else rounds
    )


def _lower_quartile(times: Iterable[float]) -> float:
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def _windows(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Yield groups of consecutive rounds, each but the last at least `QUIET_WINDOW_SECONDS` long."""
    stretch: list[Round] = []
    for measured in rounds:
        stretch.append(measured)
        if sum(part.wall_seconds for part in stretch) >= QUIET_WINDOW_SECONDS:
            yield stretch
            stretch = []
    if stretch:
        yield stretch
