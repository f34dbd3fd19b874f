"""Charts of a collective benchmark: bus bandwidth and time by size and algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from wanma.bench.collectives.results import CollectiveResults
from wanma.collectives.measurement.bandwidth import CollectiveTiming
from wanma.observe.units import bytes_text, duration_text
from wanma.report.components.line_chart import Chart, Series

LIMIT_COLOR = 7
COLOR_COUNT = 6
DEFINITIONS = (
    "Bus bandwidth by the definitions of nccl-tests (doc/PERFORMANCE.md): size / time × 2 (n − 1) / n of an "
    "all-reduce, × (n − 1) / n of an all-gather, reduce-scatter and all-to-all, × 1 of a broadcast."
)


def charts(results: CollectiveResults) -> list[Chart]:
    """Return two charts, bandwidth and time, for each collective and precision."""
    result = []
    for (collective, dtype), group in groupby(
        results.timings, key=lambda timing: (timing.collective, timing.dtype)
    ):
        result += _bandwidth_and_time_charts(f"{collective}, {dtype}", list(group))
    return result


def _bandwidth_and_time_charts(title: str, timings: Sequence[CollectiveTiming]) -> list[Chart]:
    names = tuple(dict.fromkeys(timing.algorithm for timing in timings))
    rates, times = [], []
    for number, name in enumerate(names):
        own_timings = [timing for timing in timings if timing.algorithm == name]
        xs = [float(timing.size_bytes) for timing in own_timings]
        colour = number % COLOR_COUNT + 1
        rates.append(
            Series(
                name,
                colour,
                xs,
                [timing.bus_bandwidth / 1e9 for timing in own_timings],
                marks_all_points=True,
            )
        )
        times.append(
            Series(name, colour, xs, [timing.seconds for timing in own_timings], marks_all_points=True)
        )
    own_timings = [timing for timing in timings if timing.algorithm == names[0]]
    xs = [float(timing.size_bytes) for timing in own_timings]
    rates.append(
        Series("limit", LIMIT_COLOR, xs, [timing.link_bytes_per_second / 1e9 for timing in own_timings])
    )
    return [
        Chart(
            f"{title}: {quantity}",
            lines,
            unit,
            text,
            offers_log_scale=True,
            x_ticks=xs,
            x_text=bytes_text,
            x_is_log=len(xs) > 1,
            tooltip_text=lambda bucket: bytes_text(bucket.center),
        )
        for quantity, lines, unit, text in (
            ("bus bandwidth", rates, "GB/s", lambda rate: f"{rate:.3g} GB/s"),
            ("time", times, "s", duration_text),
        )
    ]
