"""Modules: dictionaries of a module's parameters, buffers, children and hooks; base classes of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase

__all__ = ["BatchNormBase", "ConvolutionBase", "InstanceNormBase", "NormBase"]

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
"""Attributes of a module that are dictionaries of what it has registered."""

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)
"""Dictionaries of the hooks on all modules, in the module `torch.nn.modules.module`."""

Hook = Callable[..., Any]


def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters, in which they may be replaced."""
    return module._parameters


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of a module's own buffers, in which they may be replaced."""
    return module._buffers


def registered_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's children: one that has two names stands there twice."""
    return module._modules


def set_registered_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Give a module another dictionary of parameters; tensors may stand in for them."""
    module._parameters = parameters


def set_registered_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    module._buffers = buffers


def set_registered_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    module._modules = children


def forward_hooks(module: nn.Module) -> tuple[dict[int, Hook], dict[int, Hook]]:
    """Return the hooks before a module's forward and those after it, which may be replaced."""
    return module._forward_pre_hooks, module._forward_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its forward or backward."""
    return any((*forward_hooks(module), module._backward_pre_hooks, module._backward_hooks))
