"""Breakdown of a step: a table of its parts, and stacked bars of each contender and its forecast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wanma.bench.figures.breakdown import BREAKDOWN_NOTE, part_names, step_breakdowns, time_texts
from wanma.bench.presentation.blocks import Block
from wanma.bench.results.result import BenchmarkResult
from wanma.report.components.html_elements import bar, bar_caption, legend_entry
from wanma.report.step_parts import OTHER, PART_NAMES

PART_COLOURS = dict(zip(PART_NAMES, (1, 1, 2, 8, 4, 3, 9, 7, 5, 6, 10, 11, 12), strict=True))
"""Number of a colour in page.css by part; compute is either apart or in forward and backward."""
MAX_SIDE_BY_SIDE = 3
"""Contenders side by side in a table."""
OWN_COLOURS = (2, 8, 4, 3, 9)
"""Colours of the parts that a program has named itself, in turn."""


def breakdown_blocks(result: BenchmarkResult) -> Iterator[Block]:
    """Yield tables of as many contenders as fit side by side, a row for each part; the first has the bars."""
    breakdowns = step_breakdowns(result)
    names, text = part_names(breakdowns), time_texts(breakdowns)
    for first in range(0, len(breakdowns), MAX_SIDE_BY_SIDE):
        shown = breakdowns[first : first + MAX_SIDE_BY_SIDE]
        values = {
            name: [(one.parts.get(key), one.forecast.get(key)) for one in shown]
            for key, name in names.items()
        }
        values["step"] = [(one.seconds, one.forecast_seconds) for one in shown]
        yield Block(
            "Breakdown of a step",
            ("part", *(one.contender for one in shown)),
            [
                (
                    name,
                    *(text(own) + (f" ({text(other)})" if other is not None else "") for own, other in cells),
                )
                for name, cells in values.items()
            ],
            [BREAKDOWN_NOTE],
            html="" if first else _bars(result),
        )


def _bars(result: BenchmarkResult) -> str:
    """Return the legend, and a stacked bar of each contender and of its forecast."""
    breakdowns = step_breakdowns(result)
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
    return f'<p class="legend">{legend}</p>{"".join(bars)}'


def _stacked_bar(parts: Mapping[str, float], colours: Mapping[str, int], longest: float) -> str:
    ordered = [key for key in colours if parts.get(key, 0.0) > 0]
    ordered.sort(key=lambda key: key == OTHER)
    return bar((f"c{colours[key]}", parts[key] / longest) for key in ordered)
