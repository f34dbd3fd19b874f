"""Rank layout as tables and a picture, for `wanma plan --explain`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.explain.rank_layout import (
    MeshDimension,
    RankContents,
    StageLayout,
    mesh_dimensions,
    rank_contents,
    stage_layouts,
)

MAX_SHOWN_STAGES = 16
MAX_SHOWN_DATA_RANKS = 8
"""Number of columns in the picture; stages and columns beyond the limits are left out with a note."""
MAX_PICTURE_WIDTH = 96
"""Width of the picture, in characters, up to which every rank is drawn.

Wider layouts show each box's first and last rank.
"""
STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


def render_rank_layout(
    plan: Plan,
    dimensions: DecoderConfig | None,
    rank: int | None,
    sequence_length: int,
) -> RenderableType:
    """Render the rank layout of a plan.

    Args:
        plan: the plan.
        dimensions: dimensions of a decoder; without them only ranks are shown.
        rank: rank whose part of the model is shown; default: rank 0.
        sequence_length: tokens of a sequence.
    """
    parts: list[RenderableType] = [Text(str(plan), style="bold"), Text()]
    split = mesh_dimensions(plan)
    parts.append(_mesh_table(split) if split else Text("one rank holds the complete model"))
    layouts = stage_layouts(plan, dimensions.layers) if dimensions is not None else []
    if plan.pp > 1 and layouts:
        parts += [Text(), _stage_table(layouts)]
    parts += [Text(), _picture(plan)]
    if dimensions is not None:
        contents = rank_contents(plan, dimensions, rank or 0, sequence_length)
        parts += [Text(), _rank_contents_table(contents, plan, dimensions)]
    return Group(*parts)


def _mesh_table(mesh_dimensions: list[MeshDimension]) -> Table:
    table = Table(
        "mesh dimension", "size", "splits", "group of rank 0", box=None, pad_edge=False, header_style="dim"
    )
    for axis in mesh_dimensions:
        table.add_row(axis.name, str(axis.size), axis.split_text, ranks_text(axis.ranks))
    return table


def _stage_table(stages: list[StageLayout]) -> Table:
    table = Table("stage", "holds", "on ranks", box=None, pad_edge=False, header_style="dim")
    for stage in stages[:MAX_SHOWN_STAGES]:
        table.add_row(str(stage.number), _blocks_text(stage), ranks_text(stage.ranks))
    if len(stages) > MAX_SHOWN_STAGES:
        table.add_row("…", f"and {len(stages) - MAX_SHOWN_STAGES} more", "")
    return table


def _picture(plan: Plan) -> RenderableType:
    """Render a row for each pipeline rank, a column for each data rank, a colour for each shard."""
    columns = plan.data_parallel_size
    shown = min(columns, MAX_SHOWN_DATA_RANKS)
    width = plan.cp * plan.tp
    boxed = plan.cp <= 4 and plan.pp <= 8 and shown * (4 * plan.tp + 6) <= MAX_PICTURE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for column in range(shown):
        replica, shard = divmod(column, plan.dp_shard)
        names = [f"replica {replica}"] if plan.dp_replicate > 1 else []
        names += [f"shard {shard}"] if plan.dp_shard > 1 else []
        table.add_column("\n".join(names), justify="center", no_wrap=True)
    for at in range(min(plan.pp, MAX_SHOWN_STAGES)):
        numbers = plan.stages_of_pipeline_rank(at)
        name = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        if boxed:
            name = "\n" * ((plan.cp + 1) // 2) + name  # beside the middle of the boxes
        cells = []
        for column in range(shown):
            first = (at * columns + column) * width
            style = STYLES[column % plan.dp_shard % len(STYLES)] if plan.dp_shard > 1 else STYLES[0]
            text = _box(first, plan) if boxed else _run_text(first, width)
            cells.append(Text(text, style=style))
        table.add_row(Text(name if plan.pp > 1 else "", style="dim"), *cells)
    notes = []
    if shown < columns:
        notes.append(f"{columns - shown} more columns like these")
    if plan.pp > MAX_SHOWN_STAGES:
        notes.append(f"{plan.pp - MAX_SHOWN_STAGES} more rows")
    directions = [
        text for size, text in ((plan.cp, "cp downwards"), (plan.tp, "tp to the right")) if size > 1
    ]
    if directions and boxed:
        notes.append("in a box: " + ", ".join(directions))
    return Group(table, Text("; ".join(notes), style="dim")) if notes else table


def _box(first: int, plan: Plan) -> str:
    """Draw the cp × tp ranks of one replica's stage in a box."""
    lines = [
        " ".join(str(first + row * plan.tp + column) for column in range(plan.tp)) for row in range(plan.cp)
    ]
    width = max(len(line) for line in lines)
    body = [f"│ {line.center(width)} │" for line in lines]
    return "\n".join([f"╭{'─' * (width + 2)}╮", *body, f"╰{'─' * (width + 2)}╯"])


def _run_text(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}–{first + count - 1}"


def _rank_contents_table(contents: RankContents, plan: Plan, dimensions: DecoderConfig) -> Table:
    table = Table(f"rank {contents.rank}", "holds", "of", box=None, pad_edge=False, header_style="dim")
    table.add_row(
        "layers", "; ".join(_blocks_text(stage) for stage in contents.stages), str(dimensions.layers)
    )
    table.add_row("heads", _range_text(contents.heads), str(dimensions.heads))
    table.add_row("key/value heads", _range_text(contents.kv_heads), str(dimensions.kv_heads))
    table.add_row("feed-forward columns", _range_text(contents.feed_forward), str(dimensions.feed_forward))
    table.add_row("vocabulary", _range_text(contents.vocabulary), str(dimensions.vocabulary))
    if contents.experts is not None:
        table.add_row("experts", _range_text(contents.experts), str(getattr(dimensions, "experts", "")))
    if contents.positions:
        table.add_row("positions", ", ".join(map(_range_text, contents.positions)), "each sequence")
    if contents.state_shards > 1:
        table.add_row("model states", f"1/{contents.state_shards} ({plan.shard})", "between steps")
    return table


def _blocks_text(stage: StageLayout) -> str:
    parts = ["embedding"] if stage.has_embedding else []
    if len(stage.blocks):
        noun = "layer" if len(stage.blocks) == 1 else "layers"
        parts.append(f"{noun} {_range_text(stage.blocks)}")
    if stage.has_head:
        parts.append("head")
    return ", ".join(parts)


def _range_text(indices: range) -> str:
    return str(indices.start) if len(indices) == 1 else f"{indices.start}–{indices.stop - 1}"


def ranks_text(ranks: tuple[int, ...], max_ranks: int = 6) -> str:
    """Return consecutive ranks as a range, others by their first few."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    text = ", ".join(map(str, ranks[:max_ranks]))
    return text if len(ranks) <= max_ranks else f"{text}, … {ranks[-1]}"
