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

from wanma.checkpoint.format.local_shards import local_part
from wanma.job.plan.plan import Plan
from wanma.models.structure.parallel_spec import Layout
from wanma.parallel.mesh.parallel_mesh import Grid


@dataclass(frozen=True)
class Tie:
    """Tensor under two names; a side that another rank holds is None here."""

    kept: str
    """Name under which the tensor is saved."""
    copy: str
    first: nn.Parameter | None
    second: nn.Parameter | None


@dataclass(frozen=True)
class Ties:
    """Tied weights of which this rank holds a side."""

    ties: tuple[Tie, ...]
    group: dist.ProcessGroup | None
    """Group of this rank and the one that holds the other side; None where one rank holds both."""

    @property
    def names(self) -> dict[str, str]:
        """Names of this rank's copies: name -> name under which the same tensor is saved."""
        return {tie.copy: tie.kept for tie in self.ties if tie.second is not None}

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both sides the sum of their gradients; once per step, after the last backward."""
        for tie in self.ties:
            sides = [side for side in (tie.first, tie.second) if side is not None and side.requires_grad]
            for side in sides:
                if side.grad is None:
                    side.grad = torch.zeros_like(side)
            gradients = [local_part(side.grad) for side in sides if side.grad is not None]
            if len(gradients) == 2:
                gradients[0].add_(gradients[1])
                gradients[1].copy_(gradients[0])
            elif gradients and self.group is not None:
                dist.all_reduce(gradients[0], group=self.group)

    @torch.no_grad()
    def copy_first(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of the first stage's tensors to the copies.

        Every rank calls it, with tensors of the same kind: weights, or one kind of optimizer state.

        Args:
            tensors: tensors by parameter name; those that are not tied are left alone.
        """
        for tie in self.ties:
            sides = [local_part(tensors[name]) for name in (tie.kept, tie.copy) if name in tensors]
            if len(sides) == 2:
                sides[1].copy_(sides[0])
            elif sides and self.group is not None:
                dist.broadcast(sides[0], src=dist.get_global_rank(self.group, 0), group=self.group)


def tie_stages(parts: list[nn.Module], tied: tuple[tuple[str, str], ...], plan: Plan, grid: Grid) -> Ties:
    """Return the tied weights of which `parts`, the stages of this rank, hold a side.

    Every rank calls it.
    """
    if plan.pp == 1 or not tied:
        return Ties((), None)
    group = None if plan.is_v_shaped else _ends_group(plan, grid)
    here = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    ties = tuple(Tie(kept, copy, here.get(kept), here.get(copy)) for kept, copy in tied)
    return Ties(tuple(tie for tie in ties if tie.first is not None or tie.second is not None), group)


def between_ends(layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return the ties of which one side lies before the blocks and the other after them.

    A stage that holds both sides has one tensor.
    """

    def is_last(name: str) -> bool:
        return any(name.startswith(f"{path}.") for path in layout.last)

    return tuple((kept, copy) for kept, copy in layout.tied if is_last(kept) != is_last(copy))


def _ends_group(plan: Plan, grid: Grid) -> dist.ProcessGroup | None:
    """Create the group of this rank and the one at the pipeline's other end, the first stage's rank first.

    torch wants every rank to make every group.
    """
    mine = None
    firsts = [rank for rank in range(plan.world_size) if plan.coordinates(rank)["pp"] == 0]
    for first in firsts:
        ranks = [first, first + (plan.pp - 1) * plan.stage_ranks]
        group = dist.new_group(ranks)
        if grid.rank in ranks:
            mine = group
    return mine
