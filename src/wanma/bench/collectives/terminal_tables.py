"""Terminal tables of a collective benchmark, one for each collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wanma.bench.collectives.results import CollectiveResults
from wanma.collectives.measurement.bandwidth import CollectiveTiming, fastest_ranges
from wanma.observe.units import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def results_tables(results: Iterable[CollectiveResults]) -> RenderableType:
    """Return the tables of all sweeps."""
    from rich.console import Group

    return Group(*(part for sweep in results for part in _result_tables(sweep)))


def _result_tables(results: CollectiveResults) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(f"{results.title}: {results.machine}", style="bold")
    yield Text(f"limit: {results.limit}", style="dim")
    for (collective, dtype), group in groupby(
        results.timings, key=lambda timing: (timing.collective, timing.dtype)
    ):
        timings = list(group)
        yield Text(f"\n{collective}, {dtype}", style="bold")
        yield _timings_table(timings)
        if text := fastest_text(timings):
            yield Text(text, style="dim")
    if results.disturbed:
        yield Text(
            f"\n{results.disturbed} of the measurements ran while other processes used the CPU; "
            "repeat on an idle node."
        )
    yield Text()


def fastest_text(timings: Sequence[CollectiveTiming]) -> str:
    """Return a line with the fastest algorithm by size; empty where only one was measured.

    Example: 'fastest: tree up to 16.0 KiB, ring from 64.0 KiB'.
    """
    if len({timing.algorithm for timing in timings}) == 1:
        return ""
    ranges = fastest_ranges(timings)
    if len(ranges) == 1:
        return f"fastest for every size: {_name(ranges[0].algorithm)}"
    first, *middle, last = ranges
    parts = [f"{_name(first.algorithm)} up to {bytes_text(first.last_bytes)}"]
    for part in middle:
        span = f"{bytes_text(part.first_bytes)} to {bytes_text(part.last_bytes)}"
        is_single = part.first_bytes == part.last_bytes
        parts.append(
            f"{_name(part.algorithm)} {'at ' + bytes_text(part.first_bytes) if is_single else 'from ' + span}"
        )
    parts.append(f"{_name(last.algorithm)} from {bytes_text(last.first_bytes)}")
    return f"fastest: {', '.join(parts)}"


def _name(algorithm: str) -> str:
    return algorithm.replace("_", " ")


def _timings_table(timings: Sequence[CollectiveTiming]) -> RenderableType:
    """Return times and bus bandwidths by size and algorithm, the fastest of each size in bold.

    Rows of collectives that training runs show the forecast time beside the measured one. The table fits 80
    columns.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    for name in ("µs", "forecast", "GB/s", "limit", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for size in sorted({timing.size_bytes for timing in timings}):
        rows = [timing for timing in timings if timing.size_bytes == size]
        best = min(rows, key=lambda timing: timing.seconds)
        for timing in rows:
            forecast = "" if timing.forecast_seconds is None else f"{1e6 * timing.forecast_seconds:,.0f}"
            table.add_row(
                bytes_text(size) if timing is rows[0] else "",
                _name(timing.algorithm),
                f"{1e6 * timing.seconds:,.0f}",
                forecast,
                f"{timing.bus_bandwidth / 1e9:.3g}",
                f"{timing.link_bytes_per_second / 1e9:.3g}",
                f"{timing.link_utilization:.0%}",
                style="bold" if timing is best and len(rows) > 1 else "",
            )
    return table
