"""Terminal tables of a collective benchmark, one for each collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wanma.bench.collectives.results import Sweep
from wanma.collectives.measurement.bandwidth import Timing
from wanma.observe.units import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def sweeps_text(sweeps: Iterable[Sweep]) -> RenderableType:
    """Return the tables of all sweeps."""
    from rich.console import Group

    return Group(*(part for sweep in sweeps for part in _sweep(sweep)))


def _sweep(sweep: Sweep) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(f"{sweep.title}: {sweep.machine}", style="bold")
    yield Text(f"limit: {sweep.limit}", style="dim")
    for (collective, dtype), group in groupby(sweep.timings, key=lambda one: (one.collective, one.dtype)):
        yield Text(f"\n{collective}, {dtype}", style="bold")
        yield _table(list(group))
    if sweep.disturbed:
        yield Text(
            f"\nOther programs were busy during {sweep.disturbed} of the measurements: repeat it when the "
            "machine is at rest."
        )
    yield Text()


def _table(timings: Sequence[Timing]) -> RenderableType:
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
    for size in sorted({one.size_bytes for one in timings}):
        rows = [one for one in timings if one.size_bytes == size]
        best = min(rows, key=lambda one: one.seconds)
        for one in rows:
            forecast = "" if one.forecast_seconds is None else f"{1e6 * one.forecast_seconds:,.0f}"
            table.add_row(
                bytes_text(size) if one is rows[0] else "",
                one.algorithm.replace("_", " "),
                f"{1e6 * one.seconds:,.0f}",
                forecast,
                f"{one.bus_bandwidth / 1e9:.3g}",
                f"{one.limit_bytes_per_second / 1e9:.3g}",
                f"{one.share_of_limit:.0%}",
                style="bold" if one is best and len(rows) > 1 else "",
            )
    return table
