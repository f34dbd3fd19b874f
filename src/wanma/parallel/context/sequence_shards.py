"""Sequence positions that a rank holds under context parallelism and under sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wanma.data.batch import Batch
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import ContextParallelMethod
from wanma.parallel.mesh.parallel_mesh import ParallelMesh


def context_rank_positions(length: int, cp_method: ContextParallelMethod, ranks: int, rank: int) -> Tensor:
    """Return the positions of a sequence that one context rank holds, in the order in which it holds them.

    A ring cuts the sequence into twice as many pieces as ranks and gives each rank one from the front and
    its mirror from the back: under a causal mask all then have the same work (Brandon et al. 2023, "Striped
    Attention", and Llama 3, section 3.3.2). All-to-all cuts evenly, for it computes whole sequences.

    Returns:
        (length / ranks,) int64 on CPU.
    """
    positions = torch.arange(length)
    if cp_method == "all_to_all":
        return positions.chunk(ranks)[rank]
    pieces = positions.chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def residual_positions(batch: Batch, plan: Plan, rank: int) -> Tensor | None:
    """Return the positions that `rank` holds between the split matrices (residual stream and dropout).

    Returns:
        int64 on CPU; None for the whole sequence.

    Raises:
        WanmaError: as `shard_sequence`.
    """
    if plan.cp == 1 and not plan.sequence_parallel:
        return None
    coordinates = plan.coordinates(rank)
    positions = context_rank_positions(
        _checked_sequence_length(batch, plan), plan.cp_method, plan.cp, coordinates["cp"]
    )
    return positions.chunk(plan.tp)[coordinates["tp"]] if plan.sequence_parallel else positions


def shard_sequence(batch: Batch, parallel_mesh: ParallelMesh) -> Batch:
    """Return the part of a batch of sequences that this rank's model is given.

    Under sequence parallelism that is all of it, for the embedding cuts it. But the model is told the
    positions, which stages that are handed a part of the hidden states could not know.

    Raises:
        WanmaError: the batch has no sequence, or one that the plan cannot cut.
    """
    plan = parallel_mesh.plan
    if plan.cp == 1 and not plan.sequence_parallel:
        return batch
    length = _checked_sequence_length(batch, plan)
    positions = context_rank_positions(length, plan.cp_method, plan.cp, parallel_mesh.coordinate("cp")).to(
        batch.samples.device
    )

    def part(tensor: Tensor) -> Tensor:
        return tensor[:, positions] if plan.cp > 1 and _is_sequence(tensor, length) else tensor

    keywords = {name: part(tensor) for name, tensor in batch.keywords.items()}
    keywords.setdefault("positions", positions.expand(batch.rows, -1))
    return replace(
        batch,
        inputs=tuple(part(tensor) for tensor in batch.inputs),
        targets=part(batch.targets),
        keywords=keywords,
    )


def _checked_sequence_length(batch: Batch, plan: Plan) -> int:
    """Return the sequence length of a batch, after a check that the plan can cut it."""
    key = f"parallel.cp = {plan.cp}" if plan.cp > 1 else "parallel.sequence_parallel = true"
    data = batch.inputs[0] if batch.inputs else batch.targets  # a dataset may give all inputs by name
    if data.ndim < 2 or (plan.cp > 1 and not _is_sequence(batch.targets, data.shape[1])):
        raise WanmaError(
            f"{key} splits sequences, but a sample has inputs of shape {tuple(data.shape[1:])} and "
            f"targets of shape {tuple(batch.targets.shape[1:])}",
            "make the sequence the first dim of inputs and targets, or use the ranks as dp_replicate or "
            "dp_shard",
        )
    length, unit = data.shape[1], plan.sequence_length_multiple
    if length % unit:
        raise WanmaError(
            f"{key}: samples of {length} positions cannot be split evenly",
            f"use a sequence length that is a multiple of {unit}, or fewer ranks",
        )
    model_inputs = {**{f"input {n}": tensor for n, tensor in enumerate(batch.inputs)}, **batch.keywords}
    for name, tensor in model_inputs.items():
        if plan.cp > 1 and length in tensor.shape[2:]:
            raise WanmaError(
                f"{key}: {name} has the shape {tuple(tensor.shape[1:])} per sample and seems to relate "
                f"each of the {length} positions to all others, but each rank holds a part of the "
                "positions",
                "replace the mask by document ids (rows, sequence), or set parallel.cp = 1",
            )
    return length


def _is_sequence(tensor: Tensor, length: int) -> bool:
    return tensor.ndim > 1 and tensor.shape[1] == length
