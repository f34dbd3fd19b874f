"""Terminal tables of a collective benchmark, one for each collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wanma.bench.collectives.results import CollectiveResults
from wanma.collectives.measurement.bandwidth import CollectiveTiming
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
        yield Text(f"\n{collective}, {dtype}", style="bold")
        yield _timings_table(list(group))
    if results.disturbed:
        yield Text(
            f"\n{results.disturbed} of the measurements ran while other processes used the CPU; "
            "repeat on an idle node."
        )
    yield Text()


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
                timing.algorithm.replace("_", " "),
                f"{1e6 * timing.seconds:,.0f}",
                forecast,
                f"{timing.bus_bandwidth / 1e9:.3g}",
                f"{timing.link_bytes_per_second / 1e9:.3g}",
                f"{timing.link_utilization:.0%}",
                style="bold" if timing is best and len(rows) > 1 else "",
            )
    return table
