"""Roofs of a machine and the points that trainings reach below them (Williams, Waterman & Patterson 2009).

Roofs are measured. A point's FLOP/s are the model's FLOPs over the measured step time. Its bytes are those of
the planner's operator model: not every machine counts them. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wanma.bench.figures.metrics import rate_text
from wanma.bench.machine.machine_result import node_count, rank_count
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.observe.units import percent_text


@dataclass(frozen=True)
class Roofs:
    """Measured limits of one rank while all ranks work at once."""

    contender: str
    """Contender of the machine result that they come from."""
    ranks_per_node: int
    flops_per_second: Mapping[str, float]
    """Highest rate of matrix products by precision."""
    memory_bytes_per_second: float
    """Bytes read and written by a copy."""
    network_bytes_per_second: float | None
    """Bytes that a rank sends in a ring; None: there is no other rank."""

    def attainable(self, precision: str, intensity: float) -> float:
        """Return the roof in FLOP/s at an intensity in FLOPs per byte of memory."""
        return min(self.flops_per_second[precision], intensity * self.memory_bytes_per_second)


@dataclass(frozen=True)
class TrainingPoint:
    """Training below the roofs; amounts are those of one step on one rank."""

    name: str
    """Name of the contender and its result."""
    precision: str
    ranks_per_node: int
    threads_per_rank: int
    """Threads of a rank on CPUs; 0 on GPUs."""
    step_seconds: float
    """Measured median."""
    flops: float
    """FLOPs of the model, without recomputation."""
    memory_bytes: float
    """Bytes by the operator model."""
    network_bytes: float
    """Bytes sent, by the operator model."""

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.step_seconds

    @property
    def intensity(self) -> float:
        """FLOPs of the model per byte of memory traffic."""
        return self.flops / self.memory_bytes if self.memory_bytes else math.inf


@dataclass(frozen=True)
class LimitShares:
    """Shares of the measured limits that a training uses, each from 0 to about 1."""

    roof: float
    """FLOP/s over the roof at the training's intensity: the smaller of the next limits' two roofs."""
    compute: float
    """FLOP/s over the highest measured rate of products in its precision."""
    memory: float
    """Bytes of memory traffic over step time, over the measured memory bandwidth."""
    network: float | None
    """Bytes sent over step time, over the measured bandwidth of a ring; None without other ranks."""


def roofs_of(result: BenchmarkResult, contender: ContenderRecord) -> Roofs | None:
    """Return the roofs that a contender of a machine result measured; None: compute or memory is missing."""
    summaries = result.summaries.get(contender.name, {})
    peaks = {
        name.removeprefix("products.").removesuffix("_flops_per_second"): estimate.median
        for name, estimate in summaries.items()
        if name.startswith("products.")
    }
    memory, ring = (summaries.get(f"{name}_bytes_per_second") for name in ("memory_copy", "ring"))
    if not peaks or memory is None:
        return None
    return Roofs(
        contender.name,
        rank_count(contender) // node_count(contender),
        peaks,
        memory.median,
        None if ring is None else ring.median,
    )


def find_roofs(result: BenchmarkResult, ranks_per_node: int | None = None) -> Roofs | None:
    """Return the roofs of the contender with the nearest number of ranks, counted in doublings.

    Args:
        result: a machine result.
        ranks_per_node: ranks of a training on each node; None: the contender with the most ranks.
    """
    found = [roofs for record in result.contenders if (roofs := roofs_of(result, record)) is not None]
    if ranks_per_node is None:
        return max(found, key=lambda roofs: roofs.ranks_per_node, default=None)
    return min(found, key=lambda roofs: abs(math.log2(roofs.ranks_per_node / ranks_per_node)), default=None)


def limit_shares(roofs: Roofs, point: TrainingPoint) -> LimitShares | None:
    """Return the shares of a training; None: its precision was not measured."""
    if point.precision not in roofs.flops_per_second:
        return None
    network = None
    if roofs.network_bytes_per_second is not None:
        network = point.network_bytes / point.step_seconds / roofs.network_bytes_per_second
    return LimitShares(
        point.flops_per_second / roofs.attainable(point.precision, point.intensity),
        point.flops_per_second / roofs.flops_per_second[point.precision],
        point.memory_bytes / point.step_seconds / roofs.memory_bytes_per_second,
        network,
    )


def roof_line(roofs: Roofs) -> str:
    """Return the roofs as a line of text."""
    peaks = ", ".join(
        f"{name} {rate_text(rate, 'FLOP/s')} from {rate / roofs.memory_bytes_per_second:.3g} FLOP/B on"
        for name, rate in roofs.flops_per_second.items()
    )
    parts = [f"{roofs.contender}: {peaks}", f"memory {rate_text(roofs.memory_bytes_per_second, 'B/s')}"]
    if roofs.network_bytes_per_second is not None:
        parts.append(f"ring {rate_text(roofs.network_bytes_per_second, 'B/s')}")
    return "; ".join(parts)


def point_line(roofs: Roofs, point: TrainingPoint) -> str:
    """Return a training and its shares of the limits as a line of text."""
    rate = (
        f"{point.name}: {rate_text(point.flops_per_second, 'FLOP/s')} at {point.intensity:.3g} FLOP/B "
        f"({point.precision})"
    )
    shares = limit_shares(roofs, point)
    if shares is None:
        return f"{rate}: products in {point.precision} were not measured"
    network = "" if shares.network is None else f", of the ring {percent_text(shares.network)}"
    note = mismatch_note(roofs, point)
    return (
        f"{rate}: {percent_text(shares.roof)} of the roof; of products {percent_text(shares.compute)}, "
        f"of memory {percent_text(shares.memory)}{network}" + (f" ({note})" if note else "")
    )


def mismatch_note(roofs: Roofs, point: TrainingPoint) -> str:
    """Return the difference between a training's ranks and those of the roofs; empty if there is none."""
    if roofs.ranks_per_node == point.ranks_per_node:
        return ""
    return (
        f"{point.ranks_per_node} ranks on a node; the roofs are of {roofs.ranks_per_node}, which share cores "
        "and memory otherwise"
    )
