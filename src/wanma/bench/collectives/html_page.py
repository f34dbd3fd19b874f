"""HTML page of a collective benchmark, usable offline: bus bandwidth and time by size and algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from wanma.bench.collectives.results import Sweep
from wanma.collectives.measurement.bandwidth import Timing
from wanma.observe.units import bytes_text, duration_text
from wanma.report.components.html_elements import card, document
from wanma.report.components.line_chart import Chart, Line, figure

LIMIT_COLOUR = 7
COLOURS = 6
DEFINITIONS = (
    "Bus bandwidth by the definitions of nccl-tests (doc/PERFORMANCE.md): size / time × 2 (n − 1) / n of an "
    "all-reduce, × (n − 1) / n of an all-gather, reduce-scatter and all-to-all, × 1 of a broadcast."
)


def sweeps_page(sweeps: Iterable[Sweep]) -> str:
    """Return the complete page as HTML."""
    parts = [f"<header><h1>Collectives</h1><p>{DEFINITIONS}</p></header>"]
    for sweep in sweeps:
        told = f"{sweep.machine}, {sweep.date}. Limit: {sweep.limit}."
        parts.append(card(sweep.title, f'<p class="note">{escape(told)}</p>'))
        parts.append(f'<section class="charts">{"".join(map(figure, charts(sweep)))}</section>')
    return document("Collectives", parts)


def charts(sweep: Sweep) -> list[Chart]:
    """Return two charts, bandwidth and time, for each collective and precision."""
    drawn = []
    for (collective, dtype), group in groupby(sweep.timings, key=lambda one: (one.collective, one.dtype)):
        drawn += _pair(f"{collective}, {dtype}", list(group))
    return drawn


def _pair(title: str, timings: Sequence[Timing]) -> list[Chart]:
    names = tuple(dict.fromkeys(one.algorithm for one in timings))
    rates, times = [], []
    for number, name in enumerate(names):
        own = [one for one in timings if one.algorithm == name]
        xs = [float(one.size_bytes) for one in own]
        colour = number % COLOURS + 1
        rates.append(Line(name, colour, xs, [one.bus_bandwidth / 1e9 for one in own], dots=True))
        times.append(Line(name, colour, xs, [one.seconds for one in own], dots=True))
    own = [one for one in timings if one.algorithm == names[0]]
    xs = [float(one.size_bytes) for one in own]
    rates.append(Line("limit", LIMIT_COLOUR, xs, [one.limit_bytes_per_second / 1e9 for one in own]))
    return [
        Chart(
            f"{title}: {what}",
            lines,
            unit,
            text,
            log_choice=True,
            across_ticks=xs,
            across_text=bytes_text,
            across_is_log=len(xs) > 1,
            point_text=lambda bucket: bytes_text(bucket.middle),
        )
        for what, lines, unit, text in (
            ("bus bandwidth", rates, "GB/s", lambda rate: f"{rate:.3g} GB/s"),
            ("time", times, "s", duration_text),
        )
    ]
