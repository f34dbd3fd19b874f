"""Hooks of parameters, called as a plain loop over the global batch calls them.

Such a loop has one backward per step, whose gradient is that of the mean loss over all samples. Here that
gradient is a sum over micro-batches and ranks, so the hooks are called once a step, with the complete sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.models.user_modules.parameter_hooks import Hook, ParameterHooks, has_hooks
from wanma.torch_internals.loaded import DTensor


class GradientHooks:
    """Gradient hooks of all parameters of a model.

    Args:
        model: module as the user built it; its parameters are about to be replaced.
        plan: plan of the run.

    Raises:
        JobError: there are hooks, and the plan splits tensors or has sites that agree on weights alone.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan = plan
        self._hooks: dict[str, ParameterHooks] = {}
        # By object: a hook is called once for a parameter that two modules name.
        adopted: dict[nn.Parameter, ParameterHooks] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in adopted:
                self._hooks[name] = adopted[parameter]
            elif has_hooks(parameter):
                self._adopt(name, parameter)
                adopted[parameter] = self._hooks[name]

    def collect(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adopt the hooks that have been registered on the state's parameters since the last call.

        Raises:
            JobError: the plan splits tensors or has sites that agree on weights alone.
        """
        for name, parameter in parameters.items():
            if has_hooks(parameter):
                self._adopt(name, parameter)

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    @torch.no_grad()
    def call(
        self, parameters: Mapping[str, nn.Parameter], gradient_multiplier: float, device: torch.device
    ) -> None:
        """Call each hook with its gradient, and adopt what it makes of it. All ranks of a stage call it.

        Args:
            parameters: parameters of this rank by name.
            gradient_multiplier: factor from the gradients as they stand to those of the mean loss.
            device: device on which hooks get the gradients.

        Raises:
            WanmaError: a hook changes the parameter itself, or the shape of the gradient.
        """
        for name, parameter in reversed(list(parameters.items())):
            hooks = self._hooks.get(name)
            if not hooks or parameter.grad is None:
                continue
            gradient = _full_tensor(parameter.grad, device) * gradient_multiplier
            for hook in _all(hooks.gradient_hooks):
                with torch.enable_grad():
                    replacement = hook(gradient)
                gradient = gradient if replacement is None else replacement
            if any(hooks.post_accumulate_hooks):
                remaining = _run_after_gradient_hooks(name, _full_tensor(parameter, device), gradient, hooks)
                if remaining is None:
                    parameter.grad = None
                    continue
                gradient = remaining
            _store_gradient(name, gradient / gradient_multiplier, parameter.grad)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        plan = self._plan
        if max(plan.tp, plan.ep) > 1 or plan.synchronization is not None:
            raise JobError(
                f"{name} has a gradient hook, but no rank holds the full gradient before the update",
                "remove the hook, or set parallel.tp = 1 and parallel.ep = 1 and unset "
                "parallel.synchronization",
            )
        self._hooks.setdefault(name, ParameterHooks()).take_from(parameter)


def _all(kinds: Iterable[Mapping[int, Hook]]) -> list[Hook]:
    return [hook for kind in kinds for hook in kind.values()]


def _run_after_gradient_hooks(
    name: str, value: Tensor, gradient: Tensor, hooks: ParameterHooks
) -> Tensor | None:
    """Return the gradient that hooks on a parameter leave it with."""
    stand_in = nn.Parameter(value.clone())
    stand_in.grad = gradient
    for hook in _all(hooks.post_accumulate_hooks):
        hook(stand_in)
    if not torch.equal(stand_in, value):
        raise WanmaError(
            f"a gradient hook on {name} changes the parameter itself, but the change does not reach "
            "the trained state",
            "change only the gradient in the hook: train.optimizer updates the weights",
        )
    return stand_in.grad


def _full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Gather a tensor of which this rank has a part on `device`, also from where it is offloaded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device)
    local = tensor.to_local().to(device)
    placed = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return placed.full_tensor()


def _store_gradient(name: str, full_gradient: Tensor, gradient: Tensor) -> None:
    if full_gradient.shape != gradient.shape:
        raise WanmaError(
            f"a gradient hook on {name} returned shape {tuple(full_gradient.shape)} for a gradient of shape "
            f"{tuple(gradient.shape)}",
            "return a gradient of the parameter's shape",
        )
    if isinstance(gradient, DTensor):
        from torch.distributed.tensor import distribute_tensor

        full_gradient = local_tensor(
            distribute_tensor(full_gradient, gradient.device_mesh, gradient.placements, src_data_rank=None)
        )
    local_tensor(gradient).copy_(full_gradient)
