"""Detection of stale parameters: tensors that a model computes with after others took their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from wanma.job.errors import JobError


class StaleParameterCheck:
    """Check of the parameters that a model had before its state took their place.

    Modules are given other tensors to compute with, under their own names. A model that has kept the first
    ones elsewhere, in a list or a closure, computes with those, and their gradients are lost.
    """

    def __init__(self, model: nn.Module) -> None:
        # A gradient from before the run is not the run's.
        self._original_parameters = [
            (name, weakref.ref(parameter), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is None
        ]

    def original_parameters(self) -> Iterator[Tensor]:
        """Yield the first parameters that still exist."""
        yield from (
            parameter
            for _, reference, _ in self._original_parameters
            if (parameter := reference()) is not None
        )

    def check(self) -> None:
        """Check the first parameters after a backward.

        Raises:
            JobError: one of them has got a gradient, or has been frozen or released.
        """
        # Most are gone with the first step.
        self._original_parameters = [
            original for original in self._original_parameters if original[1]() is not None
        ]
        for name, reference, required_grad in self._original_parameters:
            parameter = reference()
            if parameter is not None and parameter.requires_grad != required_grad:
                raise JobError(
                    f"{name}: requires_grad was set on an old reference to this parameter, which has no "
                    "effect on the model",
                    "set it through the module (module.requires_grad_(…), module.parameters()), and keep "
                    "no parameters in lists, closures or other objects",
                )
            if parameter is not None and parameter.grad is not None:
                raise JobError(
                    f"{name}: the forward pass uses an old reference to this parameter, which is no "
                    "longer trained",
                    "read parameters from their modules in every forward pass, and keep none in lists, "
                    "closures or other objects",
                )
