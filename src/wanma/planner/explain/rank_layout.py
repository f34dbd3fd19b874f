"""Rank layout of a plan: layers, heads, columns, tokens, positions and experts of each rank.

Pure arithmetic, so that a layout of a hundred thousand ranks is explained as fast as one of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.models.config.dimensions import DecoderConfig

MESH_DIMENSION_TEXTS = {
    "pp": "layers, into stages",
    "dp_replicate": "samples; each rank holds a complete model part",
    "dp_shard": "samples and model states",
    "cp": "every sequence",
    "tp": "every matrix",
    "ep": "the experts of every layer",
}


@dataclass(frozen=True)
class MeshDimension:
    """Mesh dimension of a plan with more than one rank."""

    name: str
    size: int
    split_text: str
    ranks: tuple[int, ...]
    """Ranks of the group that rank 0 belongs to."""


@dataclass(frozen=True)
class StageLayout:
    """Pipeline stage with its blocks and ranks."""

    number: int
    blocks: range
    has_embedding: bool
    has_head: bool
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankContents:
    """Part of a decoder that one rank holds; ranges index the whole model's dimensions."""

    rank: int
    coordinates: dict[str, int]
    stages: tuple[StageLayout, ...]
    heads: range
    kv_heads: range
    feed_forward: range
    vocabulary: range
    experts: range | None
    """Experts of the rank; None without experts."""
    positions: tuple[range, ...]
    """Positions of every sequence in the residual stream; empty when the length is unknown."""
    state_shards: int
    """Number of ranks that shard the rank's model states between steps."""


def mesh_dimensions(plan: Plan) -> list[MeshDimension]:
    """List the mesh dimensions that split something, outermost first."""
    result = []
    for name in (*MESH_DIMS, "ep"):
        size = getattr(plan, name)
        if size > 1:
            result.append(
                MeshDimension(name, size, MESH_DIMENSION_TEXTS[name], ranks_of_group(plan, name, 0))
            )
    return result


def ranks_of_group(plan: Plan, mesh_dimension: str, rank: int) -> tuple[int, ...]:
    """Return the ranks that share with `rank` the tensors that `mesh_dimension` splits."""
    if mesh_dimension == "ep":
        data, tensor = divmod(rank % plan.ranks_per_pipeline_rank, plan.tp)
        first = data - data % plan.ep
        start = rank - rank % plan.ranks_per_pipeline_rank
        return tuple(start + (first + index) * plan.tp + tensor for index in range(plan.ep))
    replicas = plan.dp_replicate // plan.sites
    stride = 1
    for name in reversed(MESH_DIMS):
        if name == mesh_dimension:
            break
        stride *= replicas if name == "dp_replicate" else getattr(plan, name)
    at = plan.coordinates(rank)[mesh_dimension]
    if mesh_dimension == "dp_replicate":  # over all sites; the ranks of a site are consecutive
        first = rank % plan.ranks_per_site - at % replicas * stride
        starts = range(first, plan.world_size, plan.ranks_per_site)
        return tuple(start + index * stride for start in starts for index in range(replicas))
    return tuple(rank + (index - at) * stride for index in range(getattr(plan, mesh_dimension)))


def stage_layouts(plan: Plan, layers: int) -> list[StageLayout]:
    """List all pipeline stages in the model's order."""
    cuts = (0, *plan.stage_cuts, layers)
    owners = {number: at for at in range(plan.pp) for number in plan.stages_of_pipeline_rank(at)}
    return [
        StageLayout(
            number,
            range(cuts[number], cuts[number + 1]),
            number == 0,
            number == plan.stage_count - 1,
            tuple(plan.cross_site_stage_group(owners[number] * plan.ranks_per_pipeline_rank)),
        )
        for number in range(plan.stage_count)
    ]


def rank_contents(
    plan: Plan, dimensions: DecoderConfig, rank: int, sequence_length: int | None = None
) -> RankContents:
    """Return the part of a decoder that `rank` holds.

    Raises:
        ValueError: there is no such rank.
    """
    at = plan.coordinates(rank)
    own_stages = plan.stages_of_pipeline_rank(at["pp"])
    heads = _part(dimensions.heads, plan.tp, at["tp"])
    group = dimensions.heads // dimensions.kv_heads
    experts = getattr(dimensions, "experts", None)
    return RankContents(
        rank=rank,
        coordinates=at,
        stages=tuple(stage for stage in stage_layouts(plan, dimensions.layers) if stage.number in own_stages),
        heads=heads,
        kv_heads=range(heads.start // group, (heads.stop - 1) // group + 1),
        feed_forward=_part(dimensions.feed_forward, plan.tp, at["tp"]),
        vocabulary=_part(dimensions.vocabulary or 0, plan.tp, at["tp"]),
        experts=_part(experts, plan.ep, ranks_of_group(plan, "ep", rank).index(rank)) if experts else None,
        positions=_positions(plan, at, sequence_length) if sequence_length else (),
        state_shards=plan.shard_group_size,
    )


def _part(length: int, parts: int, at: int) -> range:
    size = length // parts
    return range(at * size, (at + 1) * size)


def _positions(plan: Plan, at: dict[str, int], length: int) -> tuple[range, ...]:
    """Return the positions of a rank, as `parallel.sequence_parallel` does, but without torch."""
    if plan.cp_method == "ring" and plan.cp > 1:
        piece = length // (2 * plan.cp)
        mirrored = 2 * plan.cp - 1 - at["cp"]
        pieces = [range(at["cp"] * piece, (at["cp"] + 1) * piece)]
        pieces.append(range(mirrored * piece, (mirrored + 1) * piece))
    else:
        pieces = [_part(length, plan.cp, at["cp"])]
    if not plan.sequence_parallel:
        return tuple(pieces)
    flat = [position for run in pieces for position in run]
    part = _part(len(flat), plan.tp, at["tp"])
    own_positions = flat[part.start : part.stop]
    return _runs(own_positions)


def _runs(positions: list[int]) -> tuple[range, ...]:
    """Return the ascending runs of consecutive positions."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return tuple(runs)
