"""Many things measured by all ranks together, in turn and several times over, until enough rounds were quiet.

Other work on a machine comes and goes by seconds: what is measured in one go can fall into it as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from wanma.hardware.discovery.cpu_load import busy_cpu_seconds
from wanma.planner.calibration.noise_filter import Judged, Round, chosen_seconds, is_enough, judged

LEAST_ROUNDS, MOST_ROUNDS = 4, 40
"""Of each: as many as it takes until enough were quiet (`rounds`)."""


class Measurable(Protocol):
    """One thing to measure."""

    @property
    def measure(self) -> Callable[[float], float]:
        """About how long to run it -> seconds of one run."""


@dataclass(frozen=True)
class Taken:
    """What one of them took."""

    seconds: float
    is_disturbed: bool
    """Other programs were busy in all but a few of its rounds."""


def in_turn(
    cases: Sequence[Measurable],
    seconds: float,
    group: dist.ProcessGroup,
    *,
    machines: int = 1,
    told: Callable[[int], None] = lambda _: None,
) -> list[Taken]:
    """Measure each of `cases`; all ranks of `group` call it with the same ones, and get the same.

    Args:
        seconds: for all rounds, about; up to as many again where other programs disturb them.
        machines: that the ranks are on, as many on each.
        told: gets the number of each round, from 1, as it begins.
    """
    each = seconds / LEAST_ROUNDS / max(len(cases), 1)
    found: list[list[Judged]] = [[] for _ in cases]
    began, is_over = time.monotonic(), False
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and (is_over or all(map(is_enough, found))):
            break
        told(number + 1)
        taken = judged(_agreed([_round(case, each, group) for case in cases], group, machines))
        is_over = bool(added_up([float(time.monotonic() - began > 2 * seconds)], group)[0])
        for rounds, one in zip(found, taken, strict=True):
            rounds.append(one)
    return [Taken(chosen_seconds(rounds), not is_enough(rounds)) for rounds in found]


def added_up(numbers: list[float], group: dist.ProcessGroup) -> list[float]:
    """Over the ranks; on the CPU, whatever the ranks compute on."""
    summed = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(summed, group=group)
    result: list[float] = summed.tolist()
    return result


def _round(case: Measurable, seconds: float, group: dist.ProcessGroup) -> list[float]:
    """[seconds of one run, CPU seconds of this process, of all programs, wall seconds]."""
    wall, own, busy = time.monotonic(), time.process_time(), busy_cpu_seconds()
    added_up([0.0], group)  # when it is back, all ranks have come
    took = case.measure(seconds)
    after = busy_cpu_seconds()
    others = after - busy if after is not None and busy is not None else 0.0
    return [took, time.process_time() - own, others, time.monotonic() - wall]


def _agreed(rows: list[list[float]], group: dist.ProcessGroup, machines: int) -> list[Round]:
    """One round of every case, over all ranks: their mean time, and of one machine, all machines being
    alike, the CPU seconds of its ranks and of all its programs."""
    ranks = group.size()
    summed = added_up([number for row in rows for number in row], group)
    return [
        Round(summed[at] / ranks, summed[at + 1] / machines, summed[at + 2] / ranks, summed[at + 3] / ranks)
        for at in range(0, len(summed), 4)
    ]
