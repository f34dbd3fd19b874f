"""Hooks that users have registered on parameters: torch copies and sends parameters without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from wanma.torch_internals.autograd import (
    gradient_hooks,
    post_accumulate_hooks,
    remove_gradient_hooks,
    remove_post_accumulate_hooks,
)

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
        if hooks := gradient_hooks(parameter):
            self.gradient_hooks.append(hooks)
            remove_gradient_hooks(parameter)
        if hooks := post_accumulate_hooks(parameter):
            self.post_accumulate_hooks.append(hooks)
            remove_post_accumulate_hooks(parameter)

    def __bool__(self) -> bool:
        return any(map(len, (*self.gradient_hooks, *self.post_accumulate_hooks)))


def has_hooks(parameter: nn.Parameter) -> bool:
    return bool(gradient_hooks(parameter) or post_accumulate_hooks(parameter))


def collect_hooks(model: nn.Module) -> dict[str, tuple[list[Hook], list[Hook]]]:
    """Return the hooks by parameter name, in a form that `register_hooks` accepts in another process."""
    hooks = {}
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            on_gradient = [*(gradient_hooks(parameter) or {}).values()]
            after_gradient = [*(post_accumulate_hooks(parameter) or {}).values()]
            hooks[name] = on_gradient, after_gradient
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
