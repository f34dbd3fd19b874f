"""Delayed gradients: summed over the sites beside the next steps, and applied a fixed number of steps late.

Weights are alike on all sites: all apply the same sums in the same order. With s steps of staleness, after
step t they apply the gradient of step t − s, at the weights of that step (Ho et al. 2013, with every delay at
its bound); the first s steps apply nothing, and the last step of a job applies, one after the other, all
pending ones. With s = 0 it is data parallelism, and so it serves the steps that all sites take together
before they part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.all_reduce.site_all_reduce import SiteAllReduce
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.mesh.site_tensors import replicate_local_over_sites
from wanma.parallel.pipeline.tied_weights import TiedWeights
from wanma.training.optimizer.named_optimizer import local_gradient, wrap_local

DELAYED_PREFIX = "late."
"""Prefix of names in a checkpoint: 'late.STEP.NAME' is the summed gradient of STEP."""


@dataclass(frozen=True)
class GradientNormalization:
    """Normalization of a gradient summed over all sites."""

    target_count: float | None
    """Targets of the summed losses; None: those of the current step. 0: no gradient has come yet."""
    effective_loss_multiplier: float
    """Ratio of the gradient to that of the summed losses."""


@dataclass
class _PendingGradient:
    """Gradients of one step that are being summed over the sites."""

    step: int
    effective_loss_multiplier: float
    flat: Tensor
    """Gradients of this rank's parts, (elements of all parameters,)."""
    site_counts: Tensor
    """Number of sites with a gradient, by parameter, (parameters,)."""
    target_count: float | None = None
    """Targets of all sites, once known."""
    all_reduces: list[SiteAllReduce] = field(default_factory=list)

    def wait(self) -> None:
        for all_reduce in self.all_reduces:
            all_reduce.wait()
        self.all_reduces = []


class DelayedGradients:
    """Delayed gradients of one rank.

    Args:
        staleness: steps by which gradients are applied late.
        parallel_mesh: device meshes of the plan.
        parameters: trained parameters of this rank.
        tied_weights: tied weights of this rank.
    """

    def __init__(
        self,
        staleness: int,
        parallel_mesh: ParallelMesh,
        parameters: Mapping[str, nn.Parameter],
        tied_weights: TiedWeights,
    ) -> None:
        self._staleness, self._parallel_mesh, self._tied_weights = staleness, parallel_mesh, tied_weights
        self._site_group = parallel_mesh.plan_mesh["site"].get_group()
        self._parameters = dict(parameters)
        self._pending: list[_PendingGradient] = []

    @torch.no_grad()
    def start_all_reduce(self, step: int, effective_loss_multiplier: float) -> None:
        """Begin to sum the gradients of `step`, which this site has summed, over the sites.

        Args:
            step: step of the gradients.
            effective_loss_multiplier: ratio of the gradients to those of the summed losses.
        """
        gradients = _PendingGradient(step, effective_loss_multiplier, self._flat_zeros(), self._none())
        for index, (name, view) in enumerate(self._views(gradients).items()):
            parameter = self._parameters[name]
            if (gradient := local_gradient(parameter)) is not None:
                view.copy_(gradient)
                gradients.site_counts[index] = 1.0
            parameter.grad = None
        gradients.all_reduces = [
            SiteAllReduce(gradients.flat, self._site_group),
            SiteAllReduce(gradients.site_counts, self._site_group),
        ]
        self._pending.append(gradients)

    def set_target_count(self, step: int, target_count: float) -> None:
        """Note the number of targets over which all sites have summed the losses of `step`."""
        for gradients in self._pending:
            if gradients.step == step:
                gradients.target_count = target_count

    @torch.no_grad()
    def pop_due(self, *, flush: bool = False) -> GradientNormalization | None:
        """Give the parameters the oldest gradients that are due, as sums over all sites.

        Args:
            flush: true if all pending ones are due.

        Returns:
            their normalization; None where none is due, and parameters have no gradient.
        """
        if len(self._pending) <= (0 if flush else self._staleness):
            return None
        gradients = self._pending.pop(0)
        for name, view in self._wait_for(gradients).items():
            self._parameters[name].grad = wrap_local(view, like=self._parameters[name])
        if self._tied_weights.pairs:
            local_gradients = {
                name: parameter.grad
                for name, parameter in self._parameters.items()
                if parameter.grad is not None
            }
            self._tied_weights.broadcast_values(local_gradients)
        return GradientNormalization(gradients.target_count, gradients.effective_loss_multiplier)

    # ---------------------------------------------------------------- what is kept

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the pending gradients by name in a checkpoint; wait until they are there."""
        return {
            f"{DELAYED_PREFIX}{gradients.step}.{name}": replicate_local_over_sites(
                view, self._parameters[name], self._parallel_mesh
            )
            for gradients in self._pending
            for name, view in self._wait_for(gradients).items()
        }

    def state_values(self) -> list[list[Any]]:
        """Return step, factor and targets of each pending gradient."""
        return [
            [pending.step, pending.effective_loss_multiplier, pending.target_count]
            for pending in self._pending
        ]

    def allocate_for(self, saved_names: Collection[str]) -> None:
        """Make room for the gradients that a state with tensors of these names holds."""
        copies, self._pending = self._tied_weights.saved_names, []
        for step in sorted(
            {int(name.split(".")[1]) for name in saved_names if name.startswith(DELAYED_PREFIX)}
        ):
            gradients = _PendingGradient(step, 1.0, self._flat_zeros(), self._none())
            for index, name in enumerate(self._parameters):
                if f"{DELAYED_PREFIX}{step}.{copies.get(name, name)}" in saved_names:
                    gradients.site_counts[index] = 1.0
            self._pending.append(gradients)

    def restore_values(self, values: Iterable[Any]) -> None:
        """Restore what `state_values` returned, for the gradients that are expected."""
        by_step = {step: (factor, targets) for step, factor, targets in values}
        for gradients in self._pending:
            gradients.effective_loss_multiplier, gradients.target_count = by_step[gradients.step]

    # ---------------------------------------------------------------- inside

    def _wait_for(self, gradients: _PendingGradient) -> dict[str, Tensor]:
        """Wait for gradients; return those that any site has, in the shapes of this rank's parts."""
        gradients.wait()
        numbers = gradients.site_counts.tolist()
        views = self._views(gradients).items()
        return {name: view for (name, view), number in zip(views, numbers, strict=True) if number}

    def _views(self, gradients: _PendingGradient) -> dict[str, Tensor]:
        locals_ = {name: local_tensor(parameter) for name, parameter in self._parameters.items()}
        parts = gradients.flat.split([local.numel() for local in locals_.values()])
        return {name: part.view_as(local) for (name, local), part in zip(locals_.items(), parts, strict=True)}

    def _flat_zeros(self) -> Tensor:
        locals_ = [local_tensor(parameter) for parameter in self._parameters.values()]
        has_float64 = any(local.dtype == torch.float64 for local in locals_)
        dtype = torch.float64 if has_float64 else torch.float32
        return torch.zeros(
            sum(local.numel() for local in locals_), dtype=dtype, device=self._parallel_mesh.device
        )

    def _none(self) -> Tensor:
        return torch.zeros(len(self._parameters), device=self._parallel_mesh.device)
