"""Gradient norms of a model's layers, every few steps, by two numbers per layer in the step's all-reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.parallel.gradients.gradient_norm import local_squared_norm
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.training.optimizer.named_optimizer import NamedOptimizer


class LayerGradientNorms:
    """Norms by layer of the mean loss's gradient before clipping.

    Args:
        names: names of the full model's parameters.
        plan: plan of the run.
        interval_steps: optimizer steps from one measurement to the next; 0: none.

    Raises:
        JobError: sites do not take the same gradients.
    """

    def __init__(self, names: Iterable[str], plan: Plan, interval_steps: int) -> None:
        if interval_steps > 0 and plan.sites > 1:
            raise JobError(
                f"observe.gradient_norms_every_steps = {interval_steps} is not supported with sites: each "
                f"of the {plan.sites} sites has its own gradients",
                "unset it, or unset parallel.synchronize",
            )
        self._interval_steps = interval_steps
        self._layers = {layer: index for index, layer in enumerate(dict.fromkeys(map(layer_of, names)))}

    def local_terms(self, step: int, named_optimizer: NamedOptimizer, parallel_mesh: ParallelMesh) -> Tensor:
        """Return what this rank adds to the step's sums.

        Args:
            step: optimizer steps, this one included.
            named_optimizer: optimizer of this rank's parameters.
            parallel_mesh: device meshes of the plan.

        Returns:
            (2 * layers,) float64: of each layer this rank's share of the squared norm, then whether it trains
                a part of it; (0,) where `step` is not due.
        """
        if self._interval_steps == 0 or step % self._interval_steps:
            return torch.zeros(0, dtype=torch.float64, device=parallel_mesh.device)
        by_layer: dict[str, list[Tensor]] = {}
        for name, parameter in named_optimizer.parameters.items():
            if parameter.grad is not None and name not in named_optimizer.tied_copies:
                by_layer.setdefault(layer_of(name), []).append(parameter.grad)
        terms = torch.zeros(2, len(self._layers), dtype=torch.float64, device=parallel_mesh.device)
        for layer, gradients in by_layer.items():
            terms[0, self._layers[layer]] = local_squared_norm(gradients, parallel_mesh.plan)
            terms[1, self._layers[layer]] = 1.0
        return terms.flatten()

    def norms(self, sums: Sequence[float], gradient_multiplier: float) -> dict[str, float]:
        """Return the norm by layer, of trained ones; empty where none is due.

        Args:
            sums: sums of `local_terms` over all ranks.
            gradient_multiplier: factor from the gradients as they stand to those of the mean loss.
        """
        half = len(sums) // 2
        by_layer = zip(self._layers, sums[:half], sums[half:], strict=False)
        return {layer: math.sqrt(square) * gradient_multiplier for layer, square, count in by_layer if count}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its path down to the first number, else the module that holds it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
