"""Round-robin benchmark: all ranks measure many cases in turn, several times, until enough rounds are quiet.

Other work on a node comes and goes by seconds; a case measured in one go could fall into it as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from wanma.hardware.measurement.cpu_load import busy_cpu_seconds
from wanma.planner.calibration.noise_filter import (
    ClassifiedRound,
    Round,
    classify_rounds,
    has_enough_quiet_rounds,
    quiet_quartile_seconds,
    quiet_quartile_seconds_by_rank,
)

MIN_ROUNDS, MAX_ROUNDS = 4, 40
"""Smallest and largest number of rounds; measuring ends when every case has enough quiet ones
(`noise_filter`)."""


class MeasurableCase(Protocol):
    """Interface of one case to measure."""

    @property
    def measure(self) -> Callable[[float], float]:
        """Function from the approximate seconds of measuring to the seconds of one run."""


@dataclass(frozen=True)
class MeasuredTime:
    """Measured time of one case."""

    seconds: float
    is_disturbed: bool
    """True if other programs were busy in all but a few of its rounds."""
    seconds_by_rank: tuple[float, ...] = ()
    """Time of each rank; a case of a few ranks alone is measured by theirs."""


def measure_round_robin(
    cases: Sequence[MeasurableCase],
    seconds: float,
    group: dist.ProcessGroup,
    *,
    node_count: int = 1,
    report_progress: Callable[[int], None] = lambda _: None,
) -> list[MeasuredTime]:
    """Measure each of `cases`; all ranks of `group` call it with the same ones, and get the same.

    Args:
        seconds: approximate seconds of all rounds; up to as many again where other programs disturb them.
        node_count: number of nodes of the ranks, with as many ranks on each.
        report_progress: callback that gets the number of each round, from 1, as it begins.
    """
    case_seconds = seconds / MIN_ROUNDS / max(len(cases), 1)
    rounds_by_case: list[list[ClassifiedRound]] = [[] for _ in cases]
    began, is_over = time.monotonic(), False
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and (is_over or all(map(has_enough_quiet_rounds, rounds_by_case))):
            break
        report_progress(number + 1)
        classified = classify_rounds(
            _reduce_rounds([_round(case, case_seconds, group) for case in cases], group, node_count)
        )
        is_over = bool(sum_over_ranks([float(time.monotonic() - began > 2 * seconds)], group)[0])
        for rounds, classified_round in zip(rounds_by_case, classified, strict=True):
            rounds.append(classified_round)
    return [
        MeasuredTime(
            quiet_quartile_seconds(rounds),
            not has_enough_quiet_rounds(rounds),
            quiet_quartile_seconds_by_rank(rounds),
        )
        for rounds in rounds_by_case
    ]


def sum_over_ranks(numbers: list[float], group: dist.ProcessGroup) -> list[float]:
    """Return the numbers summed over the ranks, on the CPU, whatever device the ranks compute on."""
    summed = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(summed, group=group)
    result: list[float] = summed.tolist()
    return result


def _round(case: MeasurableCase, seconds: float, group: dist.ProcessGroup) -> list[float]:
    """Return [seconds of one run, CPU seconds of this process, of all programs, wall seconds]."""
    wall_start, own_start, busy_start = time.monotonic(), time.process_time(), busy_cpu_seconds()
    sum_over_ranks([0.0], group)  # when it is back, all ranks have come
    run_seconds = case.measure(seconds)
    after = busy_cpu_seconds()
    foreign_seconds = after - busy_start if after is not None and busy_start is not None else 0.0
    return [run_seconds, time.process_time() - own_start, foreign_seconds, time.monotonic() - wall_start]


def _reduce_rounds(rows: list[list[float]], group: dist.ProcessGroup, node_count: int) -> list[Round]:
    """Return one round of every case, averaged over all ranks.

    CPU seconds of its ranks and of all programs are those of one node, all nodes being alike.
    """
    ranks, rank = group.size(), group.rank()
    summed = sum_over_ranks([number for row in rows for number in row], group)
    own = [seconds if other == rank else 0.0 for seconds, *_ in rows for other in range(ranks)]
    by_rank = sum_over_ranks(own, group)  # (cases, ranks): each rank adds its own column
    return [
        Round(
            summed[4 * case] / ranks,
            summed[4 * case + 1] / node_count,
            summed[4 * case + 2] / ranks,
            summed[4 * case + 3] / ranks,
            tuple(by_rank[ranks * case : ranks * (case + 1)]),
        )
        for case in range(len(rows))
    ]
