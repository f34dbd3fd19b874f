"""Roofs of a machine and the points that trainings reach below them (Williams, Waterman & Patterson 2009).

Roofs are measured. A point's FLOP/s are the model's FLOPs over the measured step time. Its bytes are those of
the planner's operator model: not every machine counts them. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from wanma.bench.figures.metrics import rate_text
from wanma.bench.machine.machine_result import node_count, rank_count
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.observe.units import percent_text
from wanma.report.components.axis import AxisScale, log_range, tick_text

WIDTH, HEIGHT = 1120, 420
TOP, BOTTOM, LEFT, RIGHT = 14, 46, 92, 20
COLOUR_COUNT = 6


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


def roofline_svg(roofs: Roofs, points: Sequence[TrainingPoint]) -> str:
    """Render roofs and points with logarithmic axes."""
    ridges = [rate / roofs.memory_bytes_per_second for rate in roofs.flops_per_second.values()]
    shown = [point for point in points if math.isfinite(point.intensity) and point.intensity > 0]
    x_low, x_high = log_range(
        [*(0.1 * ridge for ridge in ridges), *(10 * ridge for ridge in ridges)]
        + [factor * point.intensity for point in shown for factor in (0.7, 1.4)]
    )
    x_scale = AxisScale(x_low, x_high, LEFT, WIDTH - RIGHT, logarithmic=True)
    highest = max(roofs.flops_per_second.values())
    lowest = min([x_low * roofs.memory_bytes_per_second, *(point.flops_per_second for point in shown)])
    y_scale = AxisScale(*log_range([lowest, 1.3 * highest]), HEIGHT - BOTTOM, TOP, logarithmic=True)
    body = [
        *_axes(x_scale, y_scale),
        *_roof_paths(roofs, x_scale, y_scale),
        *(_point(number, point, x_scale, y_scale) for number, point in enumerate(shown)),
    ]
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Roofline">{"".join(body)}</svg>'
    return f'<div class="scrolled">{drawing}</div>'


def _axes(x_scale: AxisScale, y_scale: AxisScale) -> Iterator[str]:
    for tick in y_scale.ticks():
        y = y_scale(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        text = escape(rate_text(tick, "FLOP/s"))
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for tick in x_scale.ticks():
        x = x_scale(tick)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick_text(tick)}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">FLOP per byte of memory</text>'


def _roof_paths(roofs: Roofs, x_scale: AxisScale, y_scale: AxisScale) -> Iterator[str]:
    """Yield the slope up to the highest roof, and each horizontal roof from its ridge on."""
    bandwidth = roofs.memory_bytes_per_second
    top = max(roofs.flops_per_second.values()) / bandwidth
    start, end = (x_scale.low, x_scale.low * bandwidth), (top, top * bandwidth)
    slope = [f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in (start, end)]
    yield f'<polyline class="line c7" points="{" ".join(slope)}"/>'
    middle = math.sqrt(x_scale.low * top)
    x, y = x_scale(middle), y_scale(middle * bandwidth)
    angle = math.degrees(math.atan2(y_scale(end[1]) - y_scale(start[1]), x_scale(end[0]) - x_scale(start[0])))
    label = escape(f"memory {rate_text(bandwidth, 'B/s')}")
    turn = f'transform="rotate({angle:.1f} {x:.1f} {y:.1f})"'
    yield f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle" {turn}>{label}</text>'
    for rate, name in sorted((rate, name) for name, rate in roofs.flops_per_second.items()):
        ridge, y = x_scale(rate / bandwidth), y_scale(rate)
        yield f'<polyline class="line c7" points="{ridge:.1f},{y:.1f} {WIDTH - RIGHT},{y:.1f}"/>'
        text = escape(f"{name} {rate_text(rate, 'FLOP/s')}")
        yield f'<text x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">{text}</text>'


def _point(number: int, point: TrainingPoint, x_scale: AxisScale, y_scale: AxisScale) -> str:
    x, y = x_scale(point.intensity), y_scale(point.flops_per_second)
    side, anchor = (9, "start") if x < (LEFT + WIDTH) / 2 else (-9, "end")
    text = escape(f"{point.name}: {rate_text(point.flops_per_second, 'FLOP/s')}, {point.precision}")
    return (
        f'<circle class="dot c{number % COLOUR_COUNT + 1}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{x + side:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{text}</text>'
    )
