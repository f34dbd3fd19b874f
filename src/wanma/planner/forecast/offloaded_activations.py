"""Bytes of the activations that a plan offloads, put into the cost of its blocks."""

from __future__ import annotations

from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.planner.cost.model_cost import ModelCost
from wanma.planner.memory.memory_table import MemoryTable


def with_activation_bytes(
    model_cost: ModelCost, table: MemoryTable, workload: Workload, logits_copies: float
) -> ModelCost:
    """Return `model_cost` with the bytes of their activations, for plans that offload something.

    Layers of models without repeated blocks get none, since nothing of them would be offloaded.

    Args:
        table: memory table of the same model and plan.
        logits_copies: copies of a micro-batch's logits, as in `FrameworkTraits.logits_copies`.
    """
    repeated = [layer for layer in workload.layers if layer.is_block or layer.count > 1]
    kinds = [kind for layer, kind in zip(repeated, table.kinds, strict=False) if layer.is_block]
    blocks = tuple(
        group._replace(
            cost=replace(
                group.cost,
                activation_bytes=kind.activations.saved,
                recomputed_activation_bytes=kind.activations.inputs,
            )
        )
        for group, kind in zip(model_cost.blocks, kinds, strict=True)
    )
    *earlier, last = model_cost.post_block
    head_bytes = logits_copies * table.logits_bytes + table.head_saved_bytes
    last = last._replace(cost=replace(last.cost, activation_bytes=head_bytes))
    return model_cost._replace(blocks=blocks, post_block=(*earlier, last))
