"""Gradient norms of a model's layers, every few steps, in one all-reduce of a number per layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

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

    def measure(
        self,
        step: int,
        named_optimizer: NamedOptimizer,
        parallel_mesh: ParallelMesh,
        gradient_multiplier: float,
    ) -> dict[str, float]:
        """Return the norm by layer, of trained ones; empty where `step` is not due. Every rank calls it.

        Args:
            step: optimizer steps, this one included.
            named_optimizer: optimizer of this rank's parameters.
            parallel_mesh: device meshes of the plan.
            gradient_multiplier: factor from the gradients as they stand to those of the mean loss.
        """
        if self._interval_steps == 0 or step % self._interval_steps:
            return {}
        by_layer: dict[str, list[torch.Tensor]] = {}
        for name, parameter in named_optimizer.parameters.items():
            if parameter.grad is not None and name not in named_optimizer.tied_copies:
                by_layer.setdefault(layer_of(name), []).append(parameter.grad)
        squares = torch.zeros(2, len(self._layers), dtype=torch.float64, device=parallel_mesh.device)
        for layer, gradients in by_layer.items():
            squares[0, self._layers[layer]] = local_squared_norm(gradients, parallel_mesh.plan)
            squares[1, self._layers[layer]] = 1.0
        if parallel_mesh.plan.world_size > 1:
            dist.all_reduce(squares)
        squares[0] = squares[0].sqrt() * gradient_multiplier
        norms, is_trained = squares.tolist()  # one reading, for which a GPU is waited for
        return {layer: norms[index] for layer, index in self._layers.items() if is_trained[index]}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its path down to the first number, else the module that holds it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
