"""`wanma bench collectives` in the terminal: a table for each collective, a line for each size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wanma.bench.results import Sweep
from wanma.collectives.bandwidth import Timing
from wanma.observe.units import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def sweeps_text(sweeps: Iterable[Sweep]) -> RenderableType:
    """All tables."""
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
    """Each algorithm's time and bus bandwidth, the fastest of each size marked, and after the time of what
    training runs what forecasts took it to be."""
    from rich.table import Table
    from rich.text import Text

    names = tuple(dict.fromkeys(one.algorithm for one in timings))
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("size", justify="right")
    foreseen = {one.algorithm for one in timings if one.forecast_seconds is not None}
    for name in names:
        words = name.replace("_", " ")  # the parts of a long name go below each other
        table.add_column(f"{words} µs", justify="right", overflow="fold")
        if name in foreseen:
            table.add_column("forecast", justify="right", style="dim")
        table.add_column("GB/s", justify="right")
    table.add_column("limit GB/s", justify="right")
    table.add_column("of it", justify="right")
    for size in sorted({one.size_bytes for one in timings}):
        row = {one.algorithm: one for one in timings if one.size_bytes == size}
        best = min(row.values(), key=lambda one: one.seconds)
        cells: list[Text] = []
        for name in names:
            style = "bold" if row[name] is best and len(names) > 1 else ""
            cells.append(Text(f"{1e6 * row[name].seconds:,.0f}", style=style))
            if name in foreseen:
                cells.append(Text(f"{1e6 * (row[name].forecast_seconds or 0.0):,.0f}"))
            cells.append(Text(f"{row[name].bus_bandwidth / 1e9:.3g}", style=style))
        table.add_row(
            bytes_text(size),
            *cells,
            f"{best.limit_bytes_per_second / 1e9:.3g}",
            f"{best.share_of_limit:.0%}",
        )
    return table
