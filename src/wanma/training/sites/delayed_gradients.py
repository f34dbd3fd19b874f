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

from wanma.checkpoint.format.local_shards import local_part
from wanma.collectives.all_reduce.site_all_reduce import Sum
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.mesh.site_tensors import over_sites
from wanma.parallel.pipeline.tied_weights import Ties
from wanma.training.optimizer.named_optimizer import local_gradient, placed_as

LATE = "late."
"""Prefix of names in a checkpoint: 'late.STEP.NAME' is the summed gradient of STEP."""


@dataclass(frozen=True)
class Summed:
    """Normalisation of a gradient summed over all sites."""

    targets: float | None
    """Targets of the summed losses; None: those of the current step. 0: no gradient has come yet."""
    factor: float
    """Ratio of the gradient to that of the summed losses."""


@dataclass
class _Gradients:
    """Gradients of one step that are being summed over the sites."""

    step: int
    factor: float
    flat: Tensor
    """Gradients of this rank's parts, (elements of all parameters,)."""
    there: Tensor
    """Number of sites with a gradient, by parameter, (parameters,)."""
    targets: float | None = None
    """Targets of all sites, once known."""
    sums: list[Sum] = field(default_factory=list)

    def arrive(self) -> None:
        for one in self.sums:
            one.wait()
        self.sums = []


class LateGradients:
    """Delayed gradients of one rank.

    Args:
        staleness: steps by which gradients are applied late.
        grid: device meshes of the plan.
        parameters: trained parameters of this rank.
        ties: tied weights of this rank.
    """

    def __init__(
        self, staleness: int, grid: Grid, parameters: Mapping[str, nn.Parameter], ties: Ties
    ) -> None:
        self._staleness, self._grid, self._ties = staleness, grid, ties
        self._group = grid.axes["site"].get_group()
        self._parameters = dict(parameters)
        self._queue: list[_Gradients] = []

    @torch.no_grad()
    def send(self, step: int, factor: float) -> None:
        """Begin to sum the gradients of `step`, which this site has summed, over the sites.

        Args:
            step: step of the gradients.
            factor: ratio of the gradients to those of the summed losses.
        """
        gradients = _Gradients(step, factor, self._flat(), self._none())
        for index, (name, view) in enumerate(self._views(gradients).items()):
            parameter = self._parameters[name]
            if (gradient := local_gradient(parameter)) is not None:
                view.copy_(gradient)
                gradients.there[index] = 1.0
            parameter.grad = None
        gradients.sums = [Sum(gradients.flat, self._group), Sum(gradients.there, self._group)]
        self._queue.append(gradients)

    def know(self, step: int, targets: float) -> None:
        """Note the number of targets over which all sites have summed the losses of `step`."""
        for gradients in self._queue:
            if gradients.step == step:
                gradients.targets = targets

    @torch.no_grad()
    def take(self, *, all_of_them: bool = False) -> Summed | None:
        """Give the parameters the oldest gradients that are due, as sums over all sites.

        Args:
            all_of_them: true if all pending ones are due.

        Returns:
            their normalisation; None where none is due, and parameters have no gradient.
        """
        if len(self._queue) <= (0 if all_of_them else self._staleness):
            return None
        gradients = self._queue.pop(0)
        for name, view in self._arrived(gradients).items():
            self._parameters[name].grad = placed_as(view, like=self._parameters[name])
        if self._ties.ties:
            own = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
            self._ties.copy_first(own)
        return Summed(gradients.targets, gradients.factor)

    # ---------------------------------------------------------------- what is kept

    def tensors(self) -> dict[str, Tensor]:
        """Return the pending gradients by name in a checkpoint; wait until they are there."""
        return {
            f"{LATE}{gradients.step}.{name}": over_sites(view, self._parameters[name], self._grid)
            for gradients in self._queue
            for name, view in self._arrived(gradients).items()
        }

    def values(self) -> list[list[Any]]:
        """Return step, factor and targets of each pending gradient."""
        return [[one.step, one.factor, one.targets] for one in self._queue]

    def expect(self, saved: Collection[str]) -> None:
        """Make room for the gradients that a state with tensors of these names holds."""
        copies, self._queue = self._ties.names, []
        for step in sorted({int(name.split(".")[1]) for name in saved if name.startswith(LATE)}):
            gradients = _Gradients(step, 1.0, self._flat(), self._none())
            for index, name in enumerate(self._parameters):
                if f"{LATE}{step}.{copies.get(name, name)}" in saved:
                    gradients.there[index] = 1.0
            self._queue.append(gradients)

    def restore(self, values: Iterable[Any]) -> None:
        """Restore what `values` returned, for the gradients that are expected."""
        by_step = {step: (factor, targets) for step, factor, targets in values}
        for gradients in self._queue:
            gradients.factor, gradients.targets = by_step[gradients.step]

    # ---------------------------------------------------------------- inside

    def _arrived(self, gradients: _Gradients) -> dict[str, Tensor]:
        """Wait for gradients; return those that any site has, in the shapes of this rank's parts."""
        gradients.arrive()
        numbers = gradients.there.tolist()
        views = self._views(gradients).items()
        return {name: view for (name, view), number in zip(views, numbers, strict=True) if number}

    def _views(self, gradients: _Gradients) -> dict[str, Tensor]:
        locals_ = {name: local_part(parameter) for name, parameter in self._parameters.items()}
        parts = gradients.flat.split([local.numel() for local in locals_.values()])
        return {name: part.view_as(local) for (name, local), part in zip(locals_.items(), parts, strict=True)}

    def _flat(self) -> Tensor:
        locals_ = [local_part(parameter) for parameter in self._parameters.values()]
        wide = any(local.dtype == torch.float64 for local in locals_)
        dtype = torch.float64 if wide else torch.float32
        return torch.zeros(sum(local.numel() for local in locals_), dtype=dtype, device=self._grid.device)

    def _none(self) -> Tensor:
        return torch.zeros(len(self._parameters), device=self._grid.device)
