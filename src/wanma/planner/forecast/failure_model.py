"""Failure rates, checkpoint tiers, and the expected goodput of a run in closed form.

    expected_goodput(LLAMA3_FAILURE_RATES, tiers, every, devices=16384)

The training state is kept up to three times: in the memory of its own node, which outlives a process; in that
of a partner node, which outlives a node; and on disk, which outlives all else. Pure functions, without torch.

Assumed: failures are independent and memoryless, so that their rate is linear in devices (on few devices the
field sees more: 7.9 h between failures on 1,024 GPUs against 29 h by this rule, Kokolis et al. 2025); a
checkpoint that is found is complete; a node keeps its part of its partner's state; a failure in a recovery
restarts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SECONDS_PER_DAY = 86_400.0

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FailureRates:
    """Failure rates of a device's share of a run, in 1/s per device, by the memory that is lost with it."""

    process: float
    """Rate of failures of a process; the node's memory outlives it."""
    node: float
    """Rate of failures of a node with its memory."""
    correlated: float
    """Rate of failures that only the checkpoint on disk outlives.

    A node and its partner fail at once, or in-memory checkpoints are damaged.
    """

    @classmethod
    def from_counts(
        cls, process: float, node: float, correlated: float, *, devices: int, days: float
    ) -> FailureRates:
        """Return the rates from counts of failures on `devices` devices in `days` days."""
        exposure = devices * days * SECONDS_PER_DAY
        return cls(process / exposure, node / exposure, correlated / exposure)

    def scaled_to(self, days_between: float, devices: int) -> FailureRates:
        """Return rates in the same proportions, with one failure in `days_between` days on `devices`."""
        factor = 1 / (days_between * SECONDS_PER_DAY * devices * self.per_device_second)
        return FailureRates(self.process * factor, self.node * factor, self.correlated * factor)

    @property
    def per_device_second(self) -> float:
        return self.process + self.node + self.correlated

    def mean_seconds_between(self, devices: int) -> float:
        """Return the mean time between failures of a run on `devices`, in seconds; infinite without any."""
        rate = devices * self.per_device_second
        return 1 / rate if rate else math.inf


LLAMA3_FAILURE_RATES = FailureRates.from_counts(54 + 7 + 2, 315, 35 + 6, devices=16_384, days=54)
"""Failure rates of 419 unexpected interruptions of Llama 3's training.

Source: Llama Team 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 5. Process: software 54, NCCL
watchdog 7, dependency 2. Node: GPU 148, HBM3 72, SRAM 19, processor 17, thermal 6, host maintenance 32, NIC
7, SSD 3, power supply 3, chassis, I/O board, CPU and memory 2 each. Correlated: switch or cable 35, as if
each took a node with its partner; silent corruption 6, which in-memory checkpoints may hold. The paper does
not sort them so; a faulty GPU often leaves the host's memory, and a cable more.
"""


@dataclass(frozen=True)
class CheckpointTier:
    """Checkpoint tier: one storage of the training state from which a failure is restored."""

    stall_seconds: float
    """Seconds for which training waits while a checkpoint is made."""
    restore_seconds: float
    """Seconds from a failure until training continues: detection, new processes, reading the checkpoint."""
    completion_seconds: float = 0.0
    """Seconds after the stall until the checkpoint is complete; the next one begins no earlier."""


@dataclass(frozen=True)
class CheckpointTiers:
    """Checkpoint tiers of a run; a failure is restored from the nearest tier that outlives it."""

    disk: CheckpointTier
    partner: CheckpointTier | None = None
    memory: CheckpointTier | None = None
    """Tier in the memory of the own node."""
    replica_loss_seconds: float = 0.0
    """Work of the whole run that is lost for each node that leaves, in seconds.

    It is the share of the node's replica in the run times the seconds until another node takes its place;
    zero where a spare node stands by.
    """

    def with_rates(self, failures: FailureRates, devices: int) -> list[tuple[CheckpointTier, float]]:
        """Return the tiers, nearest first, each with the rate of failures restored from it, in 1/s."""
        rates = (failures.process, failures.node, failures.correlated)
        levels, rate_below = [], 0.0
        for copy, rate in zip((self.memory, self.partner, self.disk), rates, strict=True):
            rate_below += rate * devices
            if copy is not None:
                levels.append((copy, rate_below))
                rate_below = 0.0
        return levels


def expected_goodput(
    failures: FailureRates, tiers: CheckpointTiers, intervals: Sequence[float], devices: int
) -> float:
    """Return the goodput: share of a long run's time that is work which is not lost, 0 .. 1.

    With one tier and no lag it is Daly's complete model: τ / (M exp(R/M) (exp((τ+δ)/M) - 1)) (2006).

    Args:
        failures: failure rates of the devices.
        tiers: checkpoint tiers of the run.
        intervals: seconds of work between checkpoints of each tier, nearest first, none shorter than the one
            before.
        devices: number of devices of the run.
    """
    levels = tiers.with_rates(failures, devices)
    interval_arrays = [
        np.asarray(seconds, dtype=np.float64) for _, seconds in zip(levels, intervals, strict=True)
    ]
    return (
        float(goodput_of_tiers(levels, interval_arrays))
        - failures.node * devices * tiers.replica_loss_seconds
    )


def goodput_of_tiers(levels: Sequence[tuple[CheckpointTier, float]], intervals: Sequence[Values]) -> Values:
    """Return the goodput without the work that shrinking costs, elementwise over `intervals`.

    A block of a tier is the work between two of its checkpoints: blocks of the tier below, done again from
    its beginning after each failure that this tier restores, and given up at one that only a higher tier
    does. Exact but for the stalls of higher tiers, spread over the blocks of the lowest, and for the lag,
    which costs a failure as much work again.
    """
    rates = [rate for _, rate in levels]
    total = sum(rates)
    stalls = sum(copy.stall_seconds / seconds for (copy, _), seconds in zip(levels, intervals, strict=True))
    if total == 0:
        return np.asarray(1 / (1 + stalls))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        success = np.exp(-total * intervals[0] * (1 + stalls))  # probability that a block completes
        seconds = (1 - success) / total  # expected time until completion or failure
        ends = [(1 - success) * rate / total for rate in rates]  # probability of a failure, by restoring tier
        for level, (copy, _) in enumerate(levels):
            if level:
                blocks = intervals[level] / intervals[level - 1]
                attempted = np.where(success < 1, (1 - success**blocks) / (1 - success), blocks)
                success = success**blocks
                seconds = seconds * attempted
                ends = [end * attempted for end in ends]
            undisturbed = np.exp(-total * copy.restore_seconds)
            completed = (
                1 - (1 - undisturbed) * sum(rates[: level + 1]) / total
            )  # share of restores not restarted
            restoring = (1 - undisturbed) / total / completed
            lost = [(1 - undisturbed) * rate / total / completed for rate in rates]
            attempts = 1 / (1 - ends[level] * undisturbed / completed)
            seconds = (seconds + ends[level] * restoring) * attempts
            higher = [(end + ends[level] * worse) * attempts for end, worse in zip(ends, lost, strict=True)]
            ends = [end if at > level else np.zeros_like(end) for at, end in enumerate(higher)]
            success = success * attempts
        lags = sum(rate * copy.completion_seconds for copy, rate in levels)
        share = intervals[-1] / seconds * max(1 - lags, 0.0)
    return np.nan_to_num(share, nan=0.0)
