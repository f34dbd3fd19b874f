"""Statistics of a step's samples over all ranks that change the model once: batch norm and expert load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.models.layers.router import TopKRouter
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel


def update_model_statistics(
    parallel_model: ParallelModel, parallel_mesh: ParallelMesh, applied: bool
) -> dict[str, Tensor]:
    """Sum the statistics that all ranks noted since the last step, and update the modules that noted them.

    All statistics of a model travel in one all-reduce over the world, in which each module has its place,
    whichever pipeline stage holds it. Counts are integers below 2^53 and stay exact.

    Args:
        parallel_model: this rank's part of the model.
        parallel_mesh: device meshes of the plan.
        applied: true if the step changes the weights. The statistics of one that does not are discarded: its
            activations may have been infinite.

    Returns:
        metrics of the experts for the step's record, if the model has any: `expert_load_imbalance`, the
            most tokens of one expert over the mean, in the layer where that is worst; and `balance_loss`, the
            sum over tokens.
    """
    if not parallel_model.statistics_modules:
        return {}
    local_modules = {
        name: module
        for part in parallel_model.model_parts
        for name, module in find_step_statistics_modules(part).items()
    }
    local_sums = {name: module.pop_sums() for name, module in local_modules.items()}
    if not applied:
        return {}
    zeros = torch.zeros((), dtype=torch.float64, device=parallel_mesh.device)
    packed = torch.cat(
        [
            torch.cat([part.flatten().to(zeros) for part in local_sums[name]])
            if name in local_modules
            else zeros.expand(module.statistics_numel)
            for name, module in parallel_model.statistics_modules.items()
        ]
    )
    if parallel_mesh.coordinate("tp") > 0 and not parallel_mesh.plan.sequence_parallel:
        packed.zero_()  # the first tensor rank saw the same tokens
    if parallel_mesh.plan.world_size > 1:
        dist.all_reduce(packed)
    sums = dict(
        zip(
            parallel_model.statistics_modules,
            packed.split([m.statistics_numel for m in parallel_model.statistics_modules.values()]),
            strict=True,
        )
    )
    for name, module in local_modules.items():
        parts = sums[name].split([part.numel() for part in local_sums[name]])
        module.apply_sums(*(total.view_as(part) for total, part in zip(parts, local_sums[name], strict=True)))
    return _expert_metrics(
        [
            sums[name]
            for name, module in parallel_model.statistics_modules.items()
            if isinstance(module, TopKRouter)
        ]
    )


def _expert_metrics(totals: list[Tensor]) -> dict[str, Tensor]:
    if not totals:
        return {}
    worst = [total[:-1].max() * (len(total) - 1) / total[:-1].sum().clamp(min=1) for total in totals]
    return {
        "expert_load_imbalance": torch.stack(worst).max(),
        "balance_loss": torch.stack([total[-1] for total in totals]).sum(),
    }
