"""Bytes of the activations that a plan offloads, put into the cost of its blocks."""

from __future__ import annotations

from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.planner.cost.model_cost import Pieces
from wanma.planner.memory.memory_table import MemoryTable


def with_kept(pieces: Pieces, table: MemoryTable, workload: Workload, logits_copies: float) -> Pieces:
    """Return `pieces` with the bytes of their activations, for plans that offload something.

    Layers of models without repeated blocks get none, since nothing of them would be offloaded.

    Args:
        table: memory table of the same model and plan.
        logits_copies: copies of a micro-batch's logits, as in `Software.logits_copies`.
    """
    repeated = [layer for layer in workload.layers if layer.is_block or layer.count > 1]
    kinds = [kind for layer, kind in zip(repeated, table.kinds, strict=False) if layer.is_block]
    blocks = tuple(
        one._replace(part=replace(one.part, kept_bytes=kind.bytes.kept, kept_again_bytes=kind.bytes.inputs))
        for one, kind in zip(pieces.blocks, kinds, strict=True)
    )
    *others, last = pieces.after
    made = logits_copies * table.logits + table.head
    last = last._replace(part=replace(last.part, kept_bytes=made))
    return pieces._replace(blocks=blocks, after=(*others, last))
