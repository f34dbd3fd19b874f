"""Batch statistics of a step's sample groups, wherever they were computed, update the model once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from wanma.job.plan import Plan
from wanma.models.statistics import pending_statistics
from wanma.parallel.parallelize import Parallel


def commit_statistics(model: Parallel, plan: Plan, applied: bool) -> None:
    """Add up what all ranks noted since the last step and move every running statistic by it.

    All of a model's travel in one all-reduce. It goes over the whole world, which models that can be cut
    into pipeline stages (they have no such statistics) would not survive; ranks that hold the same
    samples count them several times, which leaves the average over groups alone.

    Args:
        applied: whether the step changes the weights. The statistics of one that does not are forgotten:
            its activations may have been infinite.
    """
    modules = pending_statistics(model.modules())
    taken = [module.take() for module in modules]
    if not modules or not applied:
        return
    packed = torch.cat([part.flatten().double() for parts in taken for part in parts])
    if plan.data_ranks > 1:
        dist.all_reduce(packed)
    sums = iter(packed.split([part.numel() for parts in taken for part in parts]))
    for module in modules:
        module.commit(next(sums), next(sums), next(sums).squeeze())
