"""Statistics of a step's samples over all ranks that change the model once: batch norm and expert load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.models.layers.batch_norm import noting_modules
from wanma.models.layers.router import Routing
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel


def commit_statistics(model: Parallel, grid: Grid, applied: bool) -> dict[str, Tensor]:
    """Sum the statistics that all ranks noted since the last step, and update the modules that noted them.

    All statistics of a model travel in one all-reduce over the world, in which each module has its place,
    whichever pipeline stage holds it. Counts are integers below 2^53 and stay exact.

    Args:
        model: this rank's part of the model.
        grid: device meshes of the plan.
        applied: true if the step changes the weights. The statistics of one that does not are discarded: its
            activations may have been infinite.

    Returns:
        metrics of the experts for the step's record, if the model has any: `expert_load_imbalance`, the
            most tokens of one expert over the mean, in the layer where that is worst; and `balance_loss`, the
            sum over tokens.
    """
    if not model.noting:
        return {}
    here = {name: module for part in model.parts for name, module in noting_modules(part).items()}
    taken = {name: module.take() for name, module in here.items()}
    if not applied:
        return {}
    zeros = torch.zeros((), dtype=torch.float64, device=grid.device)
    packed = torch.cat(
        [
            torch.cat([part.flatten().to(zeros) for part in taken[name]])
            if name in here
            else zeros.expand(module.statistics_elements)
            for name, module in model.noting.items()
        ]
    )
    if grid.at("tp") > 0 and not grid.plan.sequence_parallel:
        packed.zero_()  # the first tensor rank saw the same tokens
    if grid.plan.world_size > 1:
        dist.all_reduce(packed)
    sums = dict(
        zip(model.noting, packed.split([m.statistics_elements for m in model.noting.values()]), strict=True)
    )
    for name, module in here.items():
        parts = sums[name].split([part.numel() for part in taken[name]])
        module.commit(*(total.view_as(part) for total, part in zip(parts, taken[name], strict=True)))
    return _of_experts([sums[name] for name, module in model.noting.items() if isinstance(module, Routing)])


def _of_experts(totals: list[Tensor]) -> dict[str, Tensor]:
    if not totals:
        return {}
    worst = [total[:-1].max() * (len(total) - 1) / total[:-1].sum().clamp(min=1) for total in totals]
    return {
        "expert_load_imbalance": torch.stack(worst).max(),
        "balance_loss": torch.stack([total[-1] for total in totals]).sum(),
    }
