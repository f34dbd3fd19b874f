"""Layer costs of a model, in its order: layers before its blocks, groups of equal blocks, layers after.

A layer's cost depends on the few settings of a plan in `model_cost_key`; stages are composed of layers by
others. A search therefore computes layer costs once for many plans. Pure functions, without torch.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.offload import uses_offload
from wanma.planner.cost.step import StageLayers
from wanma.planner.embedding_placement import shared_table_ranks
from wanma.planner.pipeline.schedules import block_counts_of_stages


class BlockGroup(NamedTuple):
    """Group of equal consecutive blocks."""

    cost: LayerCost
    """Cost of one block."""
    block_count: int
    """Number of these blocks in the whole model."""
    parameters: float
    """Parameters of one block, before `tp`, on one rank of `ep`."""


class EndLayer(NamedTuple):
    """Layer outside the repeated blocks, such as an embedding or a head."""

    cost: LayerCost
    parameters: float


class ModelCost(NamedTuple):
    """Layer costs of a model, in its order."""

    pre_block: tuple[EndLayer, ...]
    blocks: tuple[BlockGroup, ...]
    post_block: tuple[EndLayer, ...]


def model_cost_key(plan: Plan) -> tuple[object, ...]:
    """Return the key of plans with equal layer costs, for one model, hardware model and framework."""
    split = (plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.cp_method, plan.pp > 1)
    return (
        *split,
        plan.micro_batch,
        plan.recompute,
        plan.compile,
        plan.precision,
        plan.fp8,
        uses_offload(plan),
        shared_table_ranks(plan),
    )


def build_stages(model_cost: ModelCost, plan: Plan) -> list[StageLayers]:
    """Return the plan's stages in the order of the model; equal ones are one object."""
    stages: dict[object, StageLayers] = {}
    result = []
    block_counts = [group.block_count for group in model_cost.blocks]
    for number, counts in enumerate(block_counts_of_stages(block_counts, plan)):
        key = (counts, number == 0, number == plan.stage_count - 1)
        if key not in stages:
            stages[key] = _stage(model_cost, plan, *key)
        result.append(stages[key])
    return result


def _stage(
    model_cost: ModelCost, plan: Plan, counts: tuple[int, ...], is_first: bool, is_last: bool
) -> StageLayers:
    """Return the stage that holds `counts` blocks of each group."""
    kinds = [(kind, count) for kind, count in zip(model_cost.blocks, counts, strict=True) if count]
    ends = (*(model_cost.pre_block if is_first else ()), *(model_cost.post_block if is_last else ()))
    total = sum(counts)
    return StageLayers(
        tuple((kind.cost, count, kind.parameters) for kind, count in kinds),
        len(plan.recomputed_blocks(total)) / total if total else 0.0,
        tuple((end.cost, end.parameters) for end in ends),
        sum(count * kind.parameters for kind, count in kinds) + sum(end.parameters for end in ends),
    )
