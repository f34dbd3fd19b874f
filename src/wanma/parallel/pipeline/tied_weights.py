"""Tied weights that a pipeline puts on two stages: two copies, equal at the start and kept equal.

The first stage's copy is the tensor: it is saved, counted in the gradient norm, and named in rules. The other
stage's begins as its copy, gets the same gradient, the sum of both, and so the same updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.plan.plan import Plan
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.mesh.parallel_mesh import ParallelMesh


@dataclass(frozen=True)
class TiedWeight:
    """Tensor under two names; a side that another rank holds is None here."""

    saved_name: str
    """Name under which the tensor is saved."""
    copy_name: str
    parameter: nn.Parameter | None
    copy_parameter: nn.Parameter | None


@dataclass(frozen=True)
class TiedWeights:
    """Tied weights of which this rank holds a side."""

    pairs: tuple[TiedWeight, ...]
    group: dist.ProcessGroup | None
    """Group of this rank and the one that holds the other side; None where one rank holds both."""

    @property
    def saved_names(self) -> dict[str, str]:
        """Names of this rank's copies: name -> name under which the same tensor is saved."""
        return {tie.copy_name: tie.saved_name for tie in self.pairs if tie.copy_parameter is not None}

    @torch.no_grad()
    def all_reduce_gradients(self) -> None:
        """Give both sides the sum of their gradients; once per step, after the last backward."""
        for tie in self.pairs:
            sides = [
                side
                for side in (tie.parameter, tie.copy_parameter)
                if side is not None and side.requires_grad
            ]
            for side in sides:
                if side.grad is None:
                    side.grad = torch.zeros_like(side)
            gradients = [local_tensor(side.grad) for side in sides if side.grad is not None]
            if len(gradients) == 2:
                gradients[0].add_(gradients[1])
                gradients[1].copy_(gradients[0])
            elif gradients and self.group is not None:
                dist.all_reduce(gradients[0], group=self.group)

    @torch.no_grad()
    def broadcast_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of the first stage's tensors to the copies.

        Every rank calls it, with tensors of the same kind: weights, or one kind of optimizer state.

        Args:
            tensors: tensors by parameter name; those that are not tied are left alone.
        """
        for tie in self.pairs:
            sides = [
                local_tensor(tensors[name]) for name in (tie.saved_name, tie.copy_name) if name in tensors
            ]
            if len(sides) == 2:
                sides[1].copy_(sides[0])
            elif sides and self.group is not None:
                dist.broadcast(sides[0], src=dist.get_global_rank(self.group, 0), group=self.group)


def find_tied_weights(
    model_parts: list[nn.Module],
    tied_names: tuple[tuple[str, str], ...],
    plan: Plan,
    parallel_mesh: ParallelMesh,
) -> TiedWeights:
    """Return the tied weights of which `model_parts`, the stages of this rank, hold a side.

    Every rank calls it.
    """
    if plan.pp == 1 or not tied_names:
        return TiedWeights((), None)
    group = None if plan.is_v_shaped else _first_last_stage_group(plan, parallel_mesh)
    parameters = {name: parameter for part in model_parts for name, parameter in part.named_parameters()}
    ties = tuple(
        TiedWeight(source, copy, parameters.get(source), parameters.get(copy)) for source, copy in tied_names
    )
    return TiedWeights(
        tuple(tie for tie in ties if tie.parameter is not None or tie.copy_parameter is not None), group
    )


def tied_names_between_ends(parallel_spec: ParallelSpec) -> tuple[tuple[str, str], ...]:
    """Return the ties of which one side lies before the blocks and the other after them.

    A stage that holds both sides has one tensor.
    """

    def is_last(name: str) -> bool:
        return any(name.startswith(f"{path}.") for path in parallel_spec.last_stage_modules)

    return tuple(
        (source, copy) for source, copy in parallel_spec.tied_parameters if is_last(source) != is_last(copy)
    )


def _first_last_stage_group(plan: Plan, parallel_mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """Create the group of this rank and the one at the pipeline's other end, the first stage's rank first.

    torch wants every rank to make every group.
    """
    own_group = None
    first_ranks = [rank for rank in range(plan.world_size) if plan.coordinates(rank)["pp"] == 0]
    for first in first_ranks:
        ranks = [first, first + (plan.pp - 1) * plan.ranks_per_pipeline_rank]
        group = dist.new_group(ranks)
        if parallel_mesh.rank in ranks:
            own_group = group
    return own_group
