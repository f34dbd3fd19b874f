"""Devices, time and price of a script for `wanma launch --dry-run`: bounds, without a forecast."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.job.cluster import NodeGroup
from wanma.observe.units import count_text, number_text
from wanma.planner.forecast.run_cost import FULL_LOAD, price_run
from wanma.planner.presentation.formatting import cost_text


def render_script_cost(
    groups: Sequence[NodeGroup], ranks_per_node: int, gpus_per_node: int, time_limit_seconds: float | None
) -> RenderableType:
    """Render what a script asks for, its price per hour, and the most that it can cost.

    Args:
        groups: nodes of the run, by kind.
        ranks_per_node: processes on each node.
        gpus_per_node: GPUs of each node that the ranks use; 0: they use its cores.
        time_limit_seconds: longest time of one job; None: there is no limit.
    """
    counts = [(group, group.count) for group in groups]
    nodes = sum(group.count for group in groups)
    ranks = f"{count_text(ranks_per_node, 'rank')} on {'each' if nodes > 1 else 'it'}"
    gpus = f", with {count_text(gpus_per_node, 'GPU')}" if gpus_per_node else ""
    hour = price_run(3600.0, counts, FULL_LOAD)
    if hour.price is None:
        price = "unknown: price_per_hour of the cluster file (cluster.file) gives it"
    else:
        price = f"{number_text(hour.price)} per hour"
    if time_limit_seconds is None:
        most = "without bound, as there is no time limit"
    else:
        most = f"{cost_text(price_run(time_limit_seconds, counts, FULL_LOAD))}, at the time limit of one job"
    table = Table.grid(padding=(0, 2))
    for row in (
        ("devices", f"{' and '.join(map(str, groups))}; {ranks}{gpus}"),
        ("price", price),
        ("at most", most),
    ):
        table.add_row(*row)
    note = "· no forecast: the steps of a script are unknown before it runs"
    return Group(Text("\nDevices, time and price", style="bold"), table, Text(note, style="dim"))
