"""What failures take of a long run, and how often its state should be copied.

    every = best_intervals(LLAMA3, recovery, devices=16384, step_seconds=6.0)
    useful_share(LLAMA3, recovery, every, devices=16384)     # expected, in closed form
    simulate(LLAMA3, recovery, every, devices=16384, days=54, seed=0)

A state is kept up to three times: in the memory of its own node, which a process's death leaves; in that of a
partner node, which a node's death leaves; and on disk, which all else leaves. Pure functions, without torch.

Assumed: failures are independent and memoryless, so that they come linearly with devices (on few devices the
field sees more: 7.9 h between failures on 1,024 GPUs against 29 h by this rule, Kokolis et al. 2025); a copy
that is found is whole; a node keeps what its partner holds of it; a failure in a recovery begins it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

DAY = 86_400.0

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Failures:
    """How often a device's share of a run fails, by what is lost with it; per device and second."""

    process: float
    """The node's memory outlives it."""
    node: float
    """A node and its memory."""
    correlated: float
    """A node and its partner at once, or what damages copies in memory: only the disk is left."""

    @classmethod
    def observed(
        cls, process: float, node: float, correlated: float, *, devices: int, days: float
    ) -> Failures:
        """From counts of failures on so many devices for so many days."""
        exposure = devices * days * DAY
        return cls(process / exposure, node / exposure, correlated / exposure)

    def as_often_as(self, days_between: float, devices: int) -> Failures:
        """The same causes in the same proportions, once in `days_between` on `devices`."""
        factor = 1 / (days_between * DAY * devices * self.per_device_second)
        return Failures(self.process * factor, self.node * factor, self.correlated * factor)

    @property
    def per_device_second(self) -> float:
        return self.process + self.node + self.correlated

    def seconds_between(self, devices: int) -> float:
        """The mean over a run on `devices`; endless where nothing fails."""
        rate = devices * self.per_device_second
        return 1 / rate if rate else math.inf


LLAMA3 = Failures.observed(54 + 7 + 2, 315, 35 + 6, devices=16_384, days=54)
"""419 unexpected interruptions (Llama Team 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 5).
Process: software 54, NCCL watchdog 7, dependency 2. Node: GPU 148, HBM3 72, SRAM 19, processor 17, thermal
6, host maintenance 32, NIC 7, SSD 3, power supply 3, chassis, I/O board, CPU and memory 2 each. Correlated:
switch or cable 35, as if each took a node with its partner; silent corruption 6, which copies in memory may
hold. The paper does not sort them so; a faulty GPU often leaves the host's memory, and a cable more."""


@dataclass(frozen=True)
class Copy:
    """One place in which the state is kept."""

    stall_seconds: float
    """For which training waits while a copy is made."""
    restore_seconds: float
    """From a failure until training goes on: noticing it, new processes, reading the copy."""
    lag_seconds: float = 0.0
    """After the stall, until the copy is whole; the next is begun no earlier."""


@dataclass(frozen=True)
class Recovery:
    """The places; a failure is restored from the nearest that outlives it."""

    disk: Copy
    partner: Copy | None = None
    memory: Copy | None = None
    """Of the own node."""
    shrink_seconds: float = 0.0
    """Of the whole run's work, lost for each node that leaves: its replica's share of the run times the
    seconds until another takes its place; zero where a spare stands by."""

    def levels(self, failures: Failures, devices: int) -> list[tuple[Copy, float]]:
        """The places there are, nearest first, with the rate per second of failures restored from each."""
        rates = (failures.process, failures.node, failures.correlated)
        levels, waiting = [], 0.0
        for copy, rate in zip((self.memory, self.partner, self.disk), rates, strict=True):
            waiting += rate * devices
            if copy is not None:
                levels.append((copy, waiting))
                waiting = 0.0
        return levels


def young_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Work between two copies that costs least, to the first order: sqrt(2 δ M) (Young 1974, "A first order
    approximation to the optimum checkpoint interval", CACM 17(9))."""
    return math.sqrt(2 * stall_seconds * seconds_between_failures)


def daly_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """The same to a higher order, sqrt(2 δ M) (1 + x/3 + x²/9) - δ with x = sqrt(δ / 2M); M where δ >= 2M
    (Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22)."""
    if stall_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    x = math.sqrt(stall_seconds / (2 * seconds_between_failures))
    return young_interval(stall_seconds, seconds_between_failures) * (1 + x / 3 + x**2 / 9) - stall_seconds


def useful_share(failures: Failures, recovery: Recovery, intervals: Sequence[float], devices: int) -> float:
    """Of a long run's time, that of work which is not lost.

    With one place and no lag it is Daly's complete model: τ / (M exp(R/M) (exp((τ+δ)/M) - 1)) (2006).

    Args:
        intervals: seconds of work between copies of each place there is, nearest first, none shorter than
            the one before.
    """
    levels = recovery.levels(failures, devices)
    every = [np.asarray(seconds, dtype=np.float64) for _, seconds in zip(levels, intervals, strict=True)]
    return float(_share(levels, every)) - failures.node * devices * recovery.shrink_seconds


def best_intervals(
    failures: Failures, recovery: Recovery, devices: int, step_seconds: float
) -> tuple[float, ...]:
    """The intervals with the largest useful share, in whole steps, each a multiple of the one before.

    Raises:
        ValueError: from some place nothing is ever restored, so that no interval is the best.
    """
    levels = recovery.levels(failures, devices)
    if any(rate == 0 for _, rate in levels):
        raise ValueError("a place from which no failure is restored has no best interval: leave it out")
    shortest = [max(step_seconds, copy.lag_seconds) for copy, _ in levels]
    starts = [
        max(young_interval(copy.stall_seconds, 1 / rate), low)
        for (copy, rate), low in zip(levels, shortest, strict=True)
    ]
    centres = [starts[0] / step_seconds, *(max(far / near, 1.0) for near, far in pairwise(starts))]
    every: list[Values] = []
    for width in (100.0, 5.0, 1.5, 1.1):
        axes = [np.rint(centre * np.geomspace(1 / width, width, 17)).clip(1) for centre in centres]
        steps = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1)
        every = list(np.cumprod(steps, axis=0) * step_seconds)
        whole = np.all([seconds >= low for seconds, low in zip(every, shortest, strict=True)], axis=0)
        best = int(np.argmax(np.where(whole, _share(levels, every), -1.0)))
        centres = steps[:, best].tolist()
    return tuple(float(seconds[best]) for seconds in every)


def _share(levels: Sequence[tuple[Copy, float]], every: Sequence[Values]) -> Values:
    """As `useful_share`, without what shrinking costs.

    A block of a level is the work between two of its copies: blocks of the level below, done again from its
    beginning after each failure that this level restores, and given up at one that only a higher level does.
    Exact but for the stalls of higher levels, spread over the blocks of the lowest, and for the lag, which
    costs a failure as much work again.
    """
    rates = [rate for _, rate in levels]
    total = sum(rates)
    stalls = sum(copy.stall_seconds / seconds for (copy, _), seconds in zip(levels, every, strict=True))
    if total == 0:
        return np.asarray(1 / (1 + stalls))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        success = np.exp(-total * every[0] * (1 + stalls))  # of a block, once or until it is given up
        seconds = (1 - success) / total  # until then
        ends = [(1 - success) * rate / total for rate in rates]  # by the level that restores
        for level, (copy, _) in enumerate(levels):
            if level:
                blocks = every[level] / every[level - 1]
                begun = np.where(success < 1, (1 - success**blocks) / (1 - success), blocks)
                success, seconds, ends = success**blocks, seconds * begun, [end * begun for end in ends]
            undisturbed = np.exp(-total * copy.restore_seconds)
            kept = 1 - (1 - undisturbed) * sum(rates[: level + 1]) / total  # of restores, not begun again
            restoring = (1 - undisturbed) / total / kept
            lost = [(1 - undisturbed) * rate / total / kept for rate in rates]
            again = 1 / (1 - ends[level] * undisturbed / kept)
            seconds = (seconds + ends[level] * restoring) * again
            higher = [(end + ends[level] * worse) * again for end, worse in zip(ends, lost, strict=True)]
            ends = [end if at > level else np.zeros_like(end) for at, end in enumerate(higher)]
            success = success * again
        lags = sum(rate * copy.lag_seconds for copy, rate in levels)
        share = every[-1] / seconds * max(1 - lags, 0.0)
    return np.nan_to_num(share, nan=0.0)


def simulate(
    failures: Failures, recovery: Recovery, intervals: Sequence[float], devices: int, days: float, seed: int
) -> float:
    """The useful share of one run, failure by failure; stalls are spread over the work between copies.

    Args:
        intervals: as in `useful_share`, each a whole multiple of the one before.

    Raises:
        ValueError: they are not.
    """
    levels = recovery.levels(failures, devices)
    ticks = [round(seconds / intervals[0]) for seconds in intervals]
    exact = np.allclose(np.array(ticks) * intervals[0], intervals, rtol=1e-9)
    if not exact or any(far % near for near, far in pairwise(ticks)):
        raise ValueError(f"each interval must be a multiple of the one before: {list(intervals)}")
    stalls = sum(copy.stall_seconds / seconds for (copy, _), seconds in zip(levels, intervals, strict=True))
    pace = intervals[0] * (1 + stalls)  # of the clock, for a tick: the work between two of the nearest copies
    duration = days * DAY
    rates = np.array([rate for _, rate in levels])
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(0, duration, random.poisson(rates.sum() * duration)))
    kinds = np.searchsorted(np.cumsum(rates), random.uniform(0, rates.sum(), len(times)), side="right")
    start, ready, reached, level = 0, 0.0, 0.0, 0
    for time, kind in zip(times.tolist(), kinds.tolist(), strict=True):
        if time >= ready:
            reached, level = start + (time - ready) / pace, kind
            start = int(reached)
        else:  # while it recovers
            level = max(level, kind)
        copy, _ = levels[level]
        whole = max(int(min(start, reached - copy.lag_seconds / pace)), 0)
        start = whole - whole % ticks[level]
        ready = time + copy.restore_seconds
    left = start + max(duration - ready, 0.0) / pace
    lost = failures.node * devices * recovery.shrink_seconds
    return left * intervals[0] / duration - lost
