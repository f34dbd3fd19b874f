"""Metrics of a step whose terms are on the device: they travel and are read with the step's own sums.

A reading of their own would let the host of a GPU wait once more in each step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel
from wanma.training.optimizer.named_optimizer import NamedOptimizer
from wanma.training.step.layer_gradient_norms import LayerGradientNorms
from wanma.training.step.model_statistics import ModelStatistics
from wanma.training.step.parameter_update import StepTotals


class DeviceMetrics:
    """Metrics of one rank: gradient norms by layer, remainder of compression, load of experts.

    Args:
        parallel_model: this rank's part of the model, whose modules are updated by their statistics.
        parallel_mesh: device meshes of the plan.
        interval_steps: optimizer steps from one record of the norms by layer to the next; 0: none.

    Raises:
        JobError: norms by layer cannot be recorded under this plan.
    """

    def __init__(
        self, parallel_model: ParallelModel, parallel_mesh: ParallelMesh, interval_steps: int
    ) -> None:
        self._compression, self._mesh = parallel_model.compression, parallel_mesh
        self._layers = LayerGradientNorms(parallel_model.parameter_names, parallel_mesh.plan, interval_steps)
        self._statistics = ModelStatistics(parallel_model, parallel_mesh)
        self._layer_terms = 0

    def local_terms(self, step: int, named_optimizer: NamedOptimizer) -> Tensor:
        """Return the float64 numbers that this rank adds to the sums of a step; as many on every rank.

        Args:
            step: optimizer steps, this one included.
            named_optimizer: optimizer of this rank's parameters, with their gradients.
        """
        terms = [self._layers.local_terms(step, named_optimizer, self._mesh)]
        self._layer_terms = len(terms[0])
        if self._compression is not None:
            error = torch.zeros(1, dtype=torch.float64, device=self._mesh.device)
            terms.append(error if self._mesh.rank else error + self._compression.error_norm())
        return torch.cat([*terms, self._statistics.pop_local()])

    def take_sums(self, sums: Tensor) -> Tensor:
        """Keep the sums of `local_terms` over all ranks; return the numbers that the host reads."""
        own, of_statistics = sums.split([len(sums) - self._statistics.numel, self._statistics.numel])
        return torch.cat([own, self._statistics.take_sums(of_statistics)])

    def end_step(self, totals: StepTotals, *, is_applied: bool) -> dict[str, Any]:
        """Update the model by the statistics of a step that changes the weights; return its metrics."""
        numbers, count = totals.device_numbers, self._layer_terms
        norms = self._layers.norms(numbers[:count], totals.gradient_multiplier)
        metrics: dict[str, Any] = {"layer_grad_norms": norms} if norms else {}
        if self._compression is not None:
            metrics["compression_error_norm"] = numbers[count] if is_applied else 0.0
            count += 1
        if is_applied:
            self._statistics.update_modules()
        if is_applied and len(numbers) > count:
            metrics["expert_load_imbalance"], balance_loss = numbers[count:]
            metrics["balance_loss"] = balance_loss / (totals.target_count or math.nan)
        return metrics
