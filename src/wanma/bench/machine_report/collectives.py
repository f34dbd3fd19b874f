"""Collectives of a machine result: times by size and algorithm, as tables and charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from wanma.bench.machine.machine_result import rank_count
from wanma.bench.machine_figures.case_names import is_case_figure, parse_case
from wanma.bench.presentation.blocks import LIMIT_COLOUR, Block, series_colour
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.collectives.measurement.bandwidth import BUS_FACTORS, CollectiveTiming
from wanma.observe.units import MISSING_TEXT, bytes_text, duration_text
from wanma.report.components.line_chart import Chart, Series

DEFINITIONS = (
    "Bus bandwidth by the definitions of nccl-tests (doc/PERFORMANCE.md): size / time × 2 (n − 1) / n of an "
    "all-reduce, × (n − 1) / n of an all-gather, reduce-scatter and all-to-all, × 1 of a broadcast. "
    "Limit: a stream from one rank to another, nothing else sent."
)


def collective_timings(result: BenchmarkResult, contender: ContenderRecord) -> list[CollectiveTiming]:
    """Return the median times of a contender's collectives; the limit of all is a stream between two ranks.

    It is NaN if links were not measured.
    """
    summaries = result.summaries.get(contender.name, {})
    limit = summaries.get("link_bytes_per_second")
    return [
        CollectiveTiming(
            parts.kind,
            parts.algorithm,
            rank_count(contender),
            parts.sizes[0],
            estimate.median,
            limit.median if limit is not None else math.nan,
        )
        for name, estimate in summaries.items()
        if is_case_figure(name) and (parts := parse_case(name)) is not None and parts.kind in BUS_FACTORS
    ]


def backend_of(result: BenchmarkResult, contender: ContenderRecord) -> str:
    """Return the backend that carried the messages between ranks: 'gloo', 'nccl'; empty: unknown."""
    names = [name for name in result.summaries.get(contender.name, {}) if name.startswith("backend.")]
    return names[0].removeprefix("backend.") if names else ""


def fastest_text(timings: Sequence[CollectiveTiming]) -> str:
    """Return a line with the fastest algorithm by size; empty where only one was measured.

    Example: 'fastest: tree up to 16.0 KiB, ring from 64.0 KiB'.
    """
    if len({timing.algorithm for timing in timings}) == 1:
        return ""
    by_size = groupby(sorted(timings, key=lambda one: one.size_bytes), key=lambda one: one.size_bytes)
    fastest = [min(own, key=lambda one: one.seconds) for _, own in by_size]
    ranges = [list(own) for _, own in groupby(fastest, key=lambda one: one.algorithm)]
    if len(ranges) == 1:
        return f"fastest for every size: {_name(fastest[0].algorithm)}"
    parts = []
    for own in ranges:
        low, high = (bytes_text(one.size_bytes) for one in (own[0], own[-1]))
        span = f"from {low} to {high}" if len(own) > 1 else f"at {low}"
        if own is ranges[0]:
            span = f"up to {high}"
        elif own is ranges[-1]:
            span = f"from {low}"
        parts.append(f"{_name(own[0].algorithm)} {span}")
    return f"fastest: {', '.join(parts)}"


def _name(algorithm: str) -> str:
    return algorithm.replace("_", " ")


def timings_block(collective: str, timings: Sequence[CollectiveTiming]) -> Block:
    """Return times and bus bandwidths of one collective by size and algorithm.

    Without a measured link there is no limit.
    """
    rows: list[tuple[Any, ...]] = []
    for timing in sorted(timings, key=lambda timing: timing.size_bytes):
        is_first = not rows or rows[-1][0] != timing.size_bytes
        has_limit = math.isfinite(timing.link_bytes_per_second)
        rows.append(
            (
                timing.size_bytes,
                bytes_text(timing.size_bytes) if is_first else "",
                _name(timing.algorithm),
                f"{1e6 * timing.seconds:,.0f}",
                f"{timing.bus_bandwidth / 1e9:.3g}",
                f"{timing.link_bytes_per_second / 1e9:.3g}" if has_limit else MISSING_TEXT,
                f"{timing.link_utilization:.0%}" if has_limit else MISSING_TEXT,
            )
        )
    columns = ("size", "algorithm", "µs", "GB/s", "limit", "share")
    return Block(collective, columns, [cells for _, *cells in rows], left_count=2)


def charts(timings: Sequence[CollectiveTiming]) -> list[Chart]:
    """Return two charts, bandwidth and time, for each collective."""
    result = []
    for collective, group in groupby(timings, key=lambda timing: timing.collective):
        result += _bandwidth_and_time_charts(collective, list(group))
    return result


def _bandwidth_and_time_charts(title: str, timings: Sequence[CollectiveTiming]) -> list[Chart]:
    names = tuple(dict.fromkeys(timing.algorithm for timing in timings))
    rates: list[Series] = []
    times: list[Series] = []
    for number, name in enumerate(names):
        own = [timing for timing in timings if timing.algorithm == name]
        xs = [float(timing.size_bytes) for timing in own]
        for series, values in (
            (rates, [timing.bus_bandwidth / 1e9 for timing in own]),
            (times, [timing.seconds for timing in own]),
        ):
            series.append(Series(name, series_colour(number), xs, values, marks_all_points=True))
    limits = [timing.link_bytes_per_second / 1e9 for timing in own]
    if all(map(math.isfinite, limits)):
        rates.append(Series("limit", LIMIT_COLOUR, xs, limits))
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
