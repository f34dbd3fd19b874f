"""Picture of a roofline as SVG, with the shares of each training as bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from wanma.bench.figures.metrics import rate_text
from wanma.bench.machine_report.roofline import LimitShares, Roofs, TrainingPoint, limit_shares, mismatch_note
from wanma.observe.units import percent_text
from wanma.report.components.axis import AxisScale, log_range, tick_text
from wanma.report.components.html_elements import bar, bar_caption, card

WIDTH, HEIGHT = 1120, 420
TOP, BOTTOM, LEFT, RIGHT = 14, 46, 92, 20
COLOUR_COUNT = 6
DEFINITION = (
    "Horizontal: FLOPs of the model per byte of memory traffic, by the planner's operator model, which "
    "counts each operand and result of an operator once. Vertical: FLOP/s of one rank. Roofs are measured: "
    "matrix products by precision, and the memory bandwidth of a copy, the slope. A training below the "
    "slope is bound by memory, below a horizontal roof by products; the distance is lost to communication, "
    "waiting, small operators and the host."
)
SHARES_DEFINITION = (
    "Products: FLOP/s over the highest measured rate in the training's precision. Memory: bytes of the "
    "operator model over the step time, over the memory bandwidth. Ring: bytes sent by the operator model "
    "over the step time, over the bandwidth of a ring of messages."
)


def roofline_section(roofs: Roofs, points: Sequence[TrainingPoint]) -> str:
    """Render the picture and the shares as HTML."""
    title = f"Roofline of one rank, {roofs.contender}"
    drawing = f'<div class="scrolled">{roofline_svg(roofs, points)}</div>'
    note = f'<p class="note">{escape(DEFINITION)}</p>'
    picture = f'<div class="picture"><h2>{escape(title)}</h2>{drawing}{note}</div>'
    cards = [
        card(f"{point.name}: shares of the limits", "".join(_share_bars(number, shares, roofs, point)))
        for number, point in enumerate(points)
        if (shares := limit_shares(roofs, point)) is not None
    ]
    if not cards:
        return picture
    note = f'<p class="note">{escape(SHARES_DEFINITION)}</p>'
    return f'{picture}{note}<section class="pair">{"".join(cards)}</section>'


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
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Roofline">{"".join(body)}</svg>'


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


def _share_bars(number: int, shares: LimitShares, roofs: Roofs, point: TrainingPoint) -> Iterator[str]:
    colour = f"c{number % COLOUR_COUNT + 1}"
    named = [("products", shares.compute), ("memory", shares.memory)]
    if shares.network is not None:
        named.append(("ring", shares.network))
    roof = f"{percent_text(shares.roof)} of the roof at {point.intensity:.3g} FLOP per byte."
    yield f'<p class="note">{roof}</p>'
    for name, share in named:
        yield bar([(colour, min(share, 1.0))])
        yield bar_caption(name, percent_text(share))
    if note := mismatch_note(roofs, point):
        yield f'<p class="note">{escape(note)}</p>'
