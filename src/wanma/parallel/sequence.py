"""Which part of every sequence a rank holds, under context parallelism and under sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wanma.data.batch import Batch
from wanma.job.plan import Plan
from wanma.job.sections import ContextKind
from wanma.parallel.mesh import Grid


def context_positions(length: int, kind: ContextKind, ranks: int, rank: int) -> Tensor:
    """Positions of a sequence that one context rank holds, in the order in which it holds them.

    A ring cuts the sequence into twice as many pieces as ranks and gives each rank one from the front and
    its mirror from the back: under a causal mask all then have the same work (Brandon et al. 2023, "Striped
    Attention", and Llama 3, section 3.3.2). All-to-all cuts evenly, for it computes whole sequences.

    Returns:
        (length / ranks,) int64 on CPU.
    """
    positions = torch.arange(length)
    if kind == "all_to_all":
        return positions.chunk(ranks)[rank]
    pieces = positions.chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def residual_positions(length: int, plan: Plan, rank: int) -> Tensor | None:
    """Positions that `rank` holds between the split matrices, where the residual stream and dropout are.

    Returns:
        int64 on CPU; None for the whole sequence.
    """
    if plan.cp == 1 and not plan.sequence:
        return None
    at = plan.coordinates(rank)
    positions = context_positions(length, plan.context, plan.cp, at["cp"])
    return positions.chunk(plan.tp)[at["tp"]] if plan.sequence else positions


def split_sequence(batch: Batch, grid: Grid) -> Batch:
    """The part of a batch of sequences that this rank's model is given.

    Under sequence parallelism that is all of it, for the embedding cuts it; but the model is told the
    positions, which stages that are handed a part of the hidden states could not know.
    """
    plan = grid.plan
    if plan.cp == 1 and not plan.sequence:
        return batch
    length = batch.inputs[0].shape[1]
    mine = context_positions(length, plan.context, plan.cp, grid.at("cp")).to(batch.samples.device)

    def part(tensor: Tensor) -> Tensor:
        is_sequence = tensor.ndim > 1 and tensor.shape[1] == length
        return tensor[:, mine] if is_sequence and plan.cp > 1 else tensor

    keywords = {name: part(tensor) for name, tensor in batch.keywords.items()}
    keywords.setdefault("positions", mine.expand(batch.rows, -1))
    return replace(
        batch,
        inputs=tuple(part(tensor) for tensor in batch.inputs),
        targets=part(batch.targets),
        keywords=keywords,
    )
