"""Statistics of a step's samples over all ranks that change the model once: batch norm and expert load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wanma.models.layers.batch_norm import StepStatistics, find_step_statistics_modules
from wanma.models.layers.router import TopKRouter
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel


class ModelStatistics:
    """Statistics of one rank's modules, which travel in the step's all-reduce.

    Each module has its place in the sums, whichever pipeline stage holds it. Counts are integers below 2^53
    and stay exact.

    Args:
        parallel_model: this rank's part of the model.
        parallel_mesh: device meshes of the plan.

    Attributes:
        numel: number of elements of all modules of the model.
    """

    def __init__(self, parallel_model: ParallelModel, parallel_mesh: ParallelMesh) -> None:
        self._parts, self._modules = parallel_model.model_parts, parallel_model.statistics_modules
        self._mesh = parallel_mesh
        self.numel = sum(module.statistics_numel for module in self._modules.values())
        self._local: dict[str, tuple[StepStatistics, Sequence[Tensor]]] = {}
        """Modules of this rank with their own statistics of the step."""
        self._sums: dict[str, Tensor] = {}

    def pop_local(self) -> Tensor:
        """Return (numel,) float64: the statistics that this rank has noted since the last call."""
        zeros = torch.zeros(1, dtype=torch.float64, device=self._mesh.device)
        if not self.numel:
            return zeros[:0]
        self._local = {
            name: (module, module.pop_sums())
            for part in self._parts
            for name, module in find_step_statistics_modules(part).items()
        }
        packed = torch.cat(
            [
                torch.cat([part.flatten().to(zeros) for part in self._local[name][1]])
                if name in self._local
                else zeros.expand(module.statistics_numel)
                for name, module in self._modules.items()
            ]
        )
        if self._mesh.coordinate("tp") > 0 and not self._mesh.plan.sequence_parallel:
            packed.zero_()  # the first tensor rank saw the same tokens
        return packed

    def take_sums(self, packed: Tensor) -> Tensor:
        """Keep the sums of `pop_local` over all ranks; return the numbers of the experts, if there are any.

        Returns:
            (2,): the most tokens of one expert over the mean, in the layer where that is worst, and the sum
                of the balance loss over tokens; (0,) without experts.
        """
        if not self.numel:
            return packed
        sizes = [module.statistics_numel for module in self._modules.values()]
        self._sums = dict(zip(self._modules, packed.split(sizes), strict=True))
        routers = [name for name, module in self._modules.items() if isinstance(module, TopKRouter)]
        totals = [self._sums[name] for name in routers]
        if not totals:
            return packed[:0]
        worst = [total[:-1].max() * (len(total) - 1) / total[:-1].sum().clamp(min=1) for total in totals]
        return torch.stack([torch.stack(worst).max(), torch.stack([total[-1] for total in totals]).sum()])

    def update_modules(self) -> None:
        """Update this rank's modules by the sums, in a step that changes the weights.

        The statistics of other steps are dropped: their activations may have been infinite.
        """
        for name, (module, own) in self._local.items():
            parts = self._sums[name].split([part.numel() for part in own])
            module.apply_sums(*(total.view_as(part) for total, part in zip(parts, own, strict=True)))
