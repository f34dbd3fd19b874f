"""Chart of the parts of a step: a stacked bar for each contender, one for its forecast, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from wanma.bench.figures.breakdown import (
    BREAKDOWN_NOTE,
    StepBreakdown,
    part_names,
    step_breakdowns,
    time_texts,
)
from wanma.bench.results.result import BenchmarkResult
from wanma.observe.units import MISSING_TEXT, percent_text
from wanma.report.components.html_elements import (
    bar,
    bar_caption,
    card,
    legend_entry,
    table_header,
    table_row,
)
from wanma.report.step_parts import OTHER, PART_NAMES

PART_COLOURS = dict(zip(PART_NAMES, (1, 1, 2, 8, 4, 3, 9, 7, 5, 6, 10, 11, 12), strict=True))
"""Number of a colour in page.css by part; compute is either apart or in forward and backward."""
MAX_SIDE_BY_SIDE = 3
"""Contenders side by side in a table."""
OWN_COLOURS = (2, 8, 4, 3, 9)
"""Colours of the parts that a program has named itself, in turn."""


def breakdown_card(result: BenchmarkResult) -> str:
    """Render the steps of all contenders by their parts; empty where no program reports them."""
    breakdowns = step_breakdowns(result)
    if not breakdowns:
        return ""
    names, text = part_names(breakdowns), time_texts(breakdowns)
    own = [key for key in names if key not in PART_NAMES]
    colours = PART_COLOURS | {key: OWN_COLOURS[row % len(OWN_COLOURS)] for row, key in enumerate(own)}
    longest = max(max(one.seconds, one.forecast_seconds or 0.0) for one in breakdowns)
    bars = []
    for one in breakdowns:
        bars += [_stacked_bar(one.parts, colours, longest), bar_caption(one.contender, text(one.seconds))]
        if one.forecast_seconds is not None:
            bars.append(_stacked_bar(one.forecast, colours, longest))
            bars.append(bar_caption(f"{one.contender}, forecast", text(one.forecast_seconds)))
    legend = "".join(legend_entry(name, colours[key]) for key, name in names.items())
    body = f'<p class="note">{escape(BREAKDOWN_NOTE)}</p><p class="legend">{legend}</p>{"".join(bars)}'
    tables = "".join(
        _table(breakdowns[first : first + MAX_SIDE_BY_SIDE], names, colours, text)
        for first in range(0, len(breakdowns), MAX_SIDE_BY_SIDE)
    )
    return card("Breakdown of a step", f'{body}<div class="parts">{tables}</div>')


def _stacked_bar(parts: Mapping[str, float], colours: Mapping[str, int], longest: float) -> str:
    ordered = [key for key in colours if parts.get(key, 0.0) > 0]
    ordered.sort(key=lambda key: key == OTHER)
    return bar((f"c{colours[key]}", parts[key] / longest) for key in ordered)


def _table(
    breakdowns: Sequence[StepBreakdown],
    names: Mapping[str, str],
    colours: Mapping[str, int],
    text: Callable[[float | None], str],
) -> str:
    heads = ["part"]
    for one in breakdowns:
        heads += [one.contender, "share", "forecast"]
    rows = []
    for key, name in names.items():
        cells: list[str] = []
        for one in breakdowns:
            measured = one.parts.get(key)
            share = MISSING_TEXT if measured is None else percent_text(measured / one.seconds)
            cells += [text(measured), share, text(one.forecast.get(key))]
        rows.append(table_row(legend_entry(name, colours[key]), *cells))
    total = [cell for one in breakdowns for cell in (text(one.seconds), "", text(one.forecast_seconds))]
    rows.append(table_row("step", *total))
    return f"<table>{table_header(heads, heads[1:])}{''.join(rows)}</table>"
