"""Roofs of a machine and the points that trainings reach below them (Williams, Waterman & Patterson 2009).

Roofs are measured. A point's FLOP/s are the model's FLOPs over the measured step time. Its bytes are those of
the planner's operator model: not every machine counts them. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wanma.bench.figures.metrics import rate_text
from wanma.bench.machine.machine_result import node_count, rank_count
from wanma.bench.presentation.blocks import LIMIT_COLOUR, series_colour
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.observe.units import percent_text
from wanma.report.components.axis import AxisScale
from wanma.report.components.line_chart import Chart, Series


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
        ranks_per_node: ranks of a training on each node; None: the contender with the most ranks.
    """
    found = [roofs for record in result.contenders if (roofs := roofs_of(result, record)) is not None]
    if ranks_per_node is None:
        return max(found, key=lambda roofs: roofs.ranks_per_node, default=None)
    return min(found, key=lambda roofs: abs(math.log2(roofs.ranks_per_node / ranks_per_node)), default=None)


def limit_shares(roofs: Roofs, point: TrainingPoint) -> dict[str, float]:
    """Return the shares of the measured limits that a training uses; empty: its precision was not measured.

    The roof is that at the training's intensity, the smaller of those of products and memory.
    """
    if point.precision not in roofs.flops_per_second:
        return {}
    shares = {
        "the roof": point.flops_per_second / roofs.attainable(point.precision, point.intensity),
        "products": point.flops_per_second / roofs.flops_per_second[point.precision],
        "memory": point.memory_bytes / point.step_seconds / roofs.memory_bytes_per_second,
    }
    if roofs.network_bytes_per_second is not None:
        shares["the ring"] = point.network_bytes / point.step_seconds / roofs.network_bytes_per_second
    return shares


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
    if not shares:
        return f"{rate}: products in {point.precision} were not measured"
    text = ", ".join(f"{percent_text(share)} of {name}" for name, share in shares.items())
    if roofs.ranks_per_node == point.ranks_per_node:
        return f"{rate}: {text}"
    return (
        f"{rate}: {text} ({point.ranks_per_node} ranks on a node; the roofs are of {roofs.ranks_per_node}, "
        "which share cores and memory otherwise)"
    )


def roofline_chart(roofs: Roofs, points: Sequence[TrainingPoint]) -> Chart:
    """Return the chart of FLOP/s over FLOPs per byte of memory: slope and highest roof, and the trainings."""
    bandwidth, highest = roofs.memory_bytes_per_second, max(roofs.flops_per_second.values())
    shown = [point for point in points if math.isfinite(point.intensity) and point.intensity > 0]
    low = 0.1 * min(roofs.flops_per_second.values()) / bandwidth
    low = min([low, *(0.7 * point.intensity for point in shown)])
    high = max([10 * highest / bandwidth, *(1.4 * point.intensity for point in shown)])
    xs, ys = [low, highest / bandwidth, high], [low * bandwidth, highest, highest]
    roof = Series(f"memory {rate_text(bandwidth, 'B/s')}", LIMIT_COLOUR, xs, ys, draws_points=False)
    trainings = [
        Series(
            f"{point.name} ({point.precision})",
            series_colour(number),
            [point.intensity],
            [point.flops_per_second],
            draws_line=False,
        )
        for number, point in enumerate(shown)
    ]
    return Chart(
        "Roofline",
        [roof, *trainings],
        "FLOP/s, by FLOP per byte of memory",
        lambda rate: rate_text(rate, "FLOP/s"),
        lambda rate: rate_text(rate, ""),
        wide=True,
        y_is_log=True,
        horizontal_lines=[
            (f"{name} {rate_text(rate, 'FLOP/s')}", rate) for name, rate in roofs.flops_per_second.items()
        ],
        x_ticks=AxisScale(low, high, 0.0, 1.0, logarithmic=True).ticks(),
        x_is_log=True,
        tooltip_text=lambda point: f"{point.center:.3g} FLOP per byte",
    )
