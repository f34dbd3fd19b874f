"""Breakdown of a step's time by kind, as a bar and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.job.forecast.data_feed import DataFeed
from wanma.job.forecast.forecast import Forecast, StepTime, Workload
from wanma.observe.units import count_text, duration_text, number_text, percent_text
from wanma.planner.presentation.formatting import (
    TIME_KINDS,
    goodput_text,
    run_cost_text,
    step_seconds_text,
    throughput,
    throughput_text,
    throughput_unit,
    time_shares,
)

BAR_WIDTH = 24


def step_table(forecast: Forecast, workload: Workload | None) -> RenderableType:
    """Render a forecast with a step: one line of key figures, then the kinds of time."""
    step = forecast.step
    assert step is not None, "only for forecasts of time"
    facts = [
        step_seconds_text(step),
        f"{throughput_text(throughput(forecast, workload))} {throughput_unit(workload)}",
        f"MFU {percent_text(forecast.model_flops_utilisation)}",
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for kind, seconds, share in time_shares(step):
        bar = Text(kind.glyph * max(round(BAR_WIDTH * share), 1), style=kind.style)
        table.add_row(kind.name, duration_text(seconds), percent_text(share), bar)
    parts: list[RenderableType] = [Text(", ".join(facts)), table]
    if run := run_cost_text(forecast):
        parts.append(Text(f"complete run: {run}"))
    if useful := goodput_text(forecast):
        parts.append(Text(useful))
    return Group(*parts)


def data_feed_table(feed: DataFeed) -> RenderableType:
    """Render the samples that the data supply beside those consumed, then the parts of loading."""
    facts = (
        f"{number_text(feed.samples_per_second)} samples/s supplied, "
        f"{number_text(feed.consumed_samples_per_second)} consumed: "
        f"{feed.fed_devices:.2g} of {count_text(feed.devices, 'device')} fed"
    )
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for limit in feed.limits:
        table.add_row(limit.cause, f"{number_text(limit.samples_per_second)} samples/s")
    parts: list[RenderableType] = [Text(facts), table]
    if 0 < feed.store_share < 1:
        parts.append(
            Text(f"the store is read for {feed.store_share:.0%} of the run; then the node cache has all")
        )
    return Group(*parts)


def time_bar(step: StepTime) -> Text:
    """Draw the kinds of a step's time side by side; kinds below half a column are invisible."""
    bar = Text(no_wrap=True)
    end, drawn_columns = 0.0, 0
    for kind, _, share in time_shares(step):
        end += share
        columns = round(BAR_WIDTH * end) - drawn_columns
        bar.append(kind.glyph * columns, style=kind.style)
        drawn_columns += columns
    return bar


def time_legend(steps: Iterable[StepTime]) -> Text:
    """Return a legend of the glyphs in the bars of `steps`."""
    shown = {kind.field for step in steps for kind, _, share in time_shares(step) if share >= 0.5 / BAR_WIDTH}
    legend = Text()
    for kind in TIME_KINDS:
        if kind.field in shown:
            legend.append(kind.glyph, style=kind.style)
            legend.append(f" {kind.name}   ", style="dim")
    return legend
