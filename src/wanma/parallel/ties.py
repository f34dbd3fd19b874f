"""Tied parameters that a pipeline puts on two stages: two copies, kept equal by summing their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from wanma.checkpoint.shards import local_part
from wanma.job.plan import Plan
from wanma.parallel.mesh import Grid


@dataclass(frozen=True)
class Ties:
    """What this rank holds of tied tensors that lie on two stages."""

    copies: dict[str, str]
    """Name here -> name under which the first stage holds, saves and counts the same tensor."""
    pairs: tuple[tuple[nn.Parameter, ...], ...]
    """One entry per tie of which a side is here: that side; both sides where one rank holds both stages."""
    group: dist.ProcessGroup | None
    """This rank and the one that holds the other side; None where nobody else does."""

    def sum_gradients(self) -> None:
        """Give both sides the sum of their gradients; once per step, after the last backward."""
        for sides in self.pairs:
            gradients = [local_part(side.grad) for side in sides if side.grad is not None]
            if len(gradients) == 2:
                gradients[0].add_(gradients[1])
                gradients[1].copy_(gradients[0])
            if self.group is not None:
                dist.all_reduce(gradients[0], group=self.group)


def tie_stages(parts: list[nn.Module], tied: tuple[tuple[str, str], ...], plan: Plan, grid: Grid) -> Ties:
    """Find the tied parameters that `parts`, the stages of this rank, hold a side of.

    Every rank calls it.
    """
    if plan.pp == 1 or not tied:
        return Ties({}, (), None)
    group = _ends_group(plan, grid)
    here = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    pairs, copies = [], {}
    for kept, other in tied:
        if other in here:
            copies[other] = kept
        if sides := tuple(here[name] for name in (kept, other) if name in here):
            pairs.append(sides)
    return Ties(copies, tuple(pairs), group)


def _ends_group(plan: Plan, grid: Grid) -> dist.ProcessGroup | None:
    """This rank and the one at the pipeline's other end; torch wants every rank to make every group."""
    first, last = 0, plan.pp - 1
    mine = None
    if plan.is_v_shaped:
        return None  # the first rank holds the last stage
    per_stage = plan.world_size // plan.pp
    for offset in range(per_stage):
        ranks = [first * per_stage + offset, last * per_stage + offset]
        group = dist.new_group(ranks)
        if grid.rank in ranks:
            mine = group
    return mine
