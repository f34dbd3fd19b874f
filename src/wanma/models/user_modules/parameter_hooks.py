"""Hooks that users have registered on parameters: torch copies and sends parameters without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Hook = Callable[[Tensor], Any]


@dataclass
class ParameterHooks:
    """Hooks of one parameter, in the dictionaries that torch made, from which a handle removes its hook."""

    gradient_hooks: list[Mapping[int, Hook]] = field(default_factory=list)
    """Hooks of `Tensor.register_hook`: gradient → another one or None."""
    post_accumulate_hooks: list[Mapping[int, Hook]] = field(default_factory=list)
    """Hooks of `Tensor.register_post_accumulate_grad_hook`: parameter → None."""

    def take_from(self, parameter: nn.Parameter) -> None:
        """Take over the hooks of a parameter that backward does not reach."""
        untyped: Any = parameter
        if untyped._backward_hooks:
            self.gradient_hooks.append(untyped._backward_hooks)
            untyped._backward_hooks = None
        if untyped._post_accumulate_grad_hooks:
            self.post_accumulate_hooks.append(untyped._post_accumulate_grad_hooks)
            untyped._post_accumulate_grad_hooks = None

    def __bool__(self) -> bool:
        return any(map(len, (*self.gradient_hooks, *self.post_accumulate_hooks)))


def has_hooks(parameter: nn.Parameter) -> bool:
    untyped: Any = parameter
    return bool(untyped._backward_hooks or untyped._post_accumulate_grad_hooks)


def collect_hooks(model: nn.Module) -> dict[str, tuple[list[Hook], list[Hook]]]:
    """Return the hooks by parameter name, in a form that `register_hooks` accepts in another process."""
    hooks = {}
    for name, parameter in model.named_parameters():
        untyped: Any = parameter
        if has_hooks(parameter):
            kinds = untyped._backward_hooks, untyped._post_accumulate_grad_hooks
            gradient_hooks, post_hooks = ([*(kind or {}).values()] for kind in kinds)
            hooks[name] = gradient_hooks, post_hooks
    return hooks


def register_hooks(model: nn.Module, hooks: Mapping[str, tuple[list[Hook], list[Hook]]]) -> None:
    """Register the hooks that `collect_hooks` returned."""
    for name, (on_gradient, after_gradient) in hooks.items():
        parameter = model.get_parameter(name)
        # torch accepts no hooks on a frozen parameter, but allows freezing one with hooks.
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        for hook in on_gradient:
            parameter.register_hook(hook)
        for hook in after_gradient:
            parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(is_trained)
