"""Optimal checkpoint intervals (Young, Daly, a search) and the simulated goodput of a long run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from wanma.planner.forecast.failure_model import (
    SECONDS_PER_DAY,
    CheckpointTiers,
    FailureRates,
    Values,
    goodput_of_tiers,
)


def young_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Return the optimal work between two checkpoints to first order, in seconds: sqrt(2 δ M).

    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    """
    return math.sqrt(2 * stall_seconds * seconds_between_failures)


def daly_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Return the optimal work between two checkpoints to higher order, in seconds.

    sqrt(2 δ M) (1 + x/3 + x²/9) - δ with x = sqrt(δ / 2M); M where δ >= 2M (Daly 2006, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", FGCS 22).
    """
    if stall_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    x = math.sqrt(stall_seconds / (2 * seconds_between_failures))
    return young_interval(stall_seconds, seconds_between_failures) * (1 + x / 3 + x**2 / 9) - stall_seconds


def optimal_intervals(
    failures: FailureRates, tiers: CheckpointTiers, devices: int, step_seconds: float
) -> tuple[float, ...]:
    """Return the intervals with the largest goodput, in seconds, for each tier, nearest first.

    Each is a whole number of steps, and a multiple of the one before.

    Raises:
        ValueError: nothing is ever restored from some tier, so that no interval is the best.
    """
    levels = tiers.with_rates(failures, devices)
    if any(rate == 0 for _, rate in levels):
        raise ValueError("a place from which no failure is restored has no best interval: leave it out")
    shortest = [max(step_seconds, copy.completion_seconds) for copy, _ in levels]
    starts = [
        max(young_interval(copy.stall_seconds, 1 / rate), low)
        for (copy, rate), low in zip(levels, shortest, strict=True)
    ]
    centres = [starts[0] / step_seconds, *(max(far / near, 1.0) for near, far in pairwise(starts))]
    candidates: list[Values] = []
    for width in (100.0, 5.0, 1.5, 1.1):
        axes = [np.rint(centre * np.geomspace(1 / width, width, 17)).clip(1) for centre in centres]
        steps = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1)
        candidates = list(np.cumprod(steps, axis=0) * step_seconds)
        is_valid = np.all([seconds >= low for seconds, low in zip(candidates, shortest, strict=True)], axis=0)
        best = int(np.argmax(np.where(is_valid, goodput_of_tiers(levels, candidates), -1.0)))
        centres = steps[:, best].tolist()
    return tuple(float(seconds[best]) for seconds in candidates)


def simulate_goodput(
    failures: FailureRates,
    tiers: CheckpointTiers,
    intervals: Sequence[float],
    devices: int,
    days: float,
    seed: int,
) -> float:
    """Simulate one run failure by failure, and return its goodput.

    Stalls are spread over the work between checkpoints.

    Args:
        failures: failure rates of the devices.
        tiers: checkpoint tiers of the run.
        intervals: as in `expected_goodput`, each a whole multiple of the one before.
        devices: number of devices of the run.
        days: duration of the run.
        seed: seed of the failures' times.

    Raises:
        ValueError: an interval is no multiple of the one before.
    """
    levels = tiers.with_rates(failures, devices)
    ticks = [round(seconds / intervals[0]) for seconds in intervals]
    exact = np.allclose(np.array(ticks) * intervals[0], intervals, rtol=1e-9)
    if not exact or any(far % near for near, far in pairwise(ticks)):
        raise ValueError(f"each interval must be a multiple of the one before: {list(intervals)}")
    stalls = sum(copy.stall_seconds / seconds for (copy, _), seconds in zip(levels, intervals, strict=True))
    pace = intervals[0] * (1 + stalls)  # clock time per tick, the work between two nearest checkpoints
    duration = days * SECONDS_PER_DAY
    rates = np.array([rate for _, rate in levels])
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(0, duration, random.poisson(rates.sum() * duration)))
    kinds = np.searchsorted(np.cumsum(rates), random.uniform(0, rates.sum(), len(times)), side="right")
    start, ready, failed_at, level = 0, 0.0, 0.0, 0
    for time, kind in zip(times.tolist(), kinds.tolist(), strict=True):
        if time >= ready:
            failed_at, level = start + (time - ready) / pace, kind
            start = int(failed_at)
        else:  # failure during a recovery
            level = max(level, kind)
        copy, _ = levels[level]
        finished = max(int(min(start, failed_at - copy.completion_seconds / pace)), 0)
        start = finished - finished % ticks[level]
        ready = time + copy.restore_seconds
    progress = start + max(duration - ready, 0.0) / pace
    lost = failures.node * devices * tiers.replica_loss_seconds
    return progress * intervals[0] / duration - lost
