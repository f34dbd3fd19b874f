"""Autograd: versions and hooks of tensors, nodes of a backward, identity of storages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DTENSOR_VIEW_NODES = frozenset({"_ToTorchTensorBackward", "_FromTorchTensorBackward"})
"""Names of the autograd nodes between a DTensor and its local tensor, which are views."""


def version_counter(tensor: Tensor) -> int:
    """Return the number of changes in place that a tensor has seen."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd holds a tensor for a view of another."""
    return tensor._is_view()


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, unique among those in use."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


Hooks = Mapping[int, Callable[[Tensor], Any]]
"""Hooks of a tensor by the number of their handles."""


def gradient_hooks(tensor: Tensor) -> Hooks | None:
    """Return the hooks of `Tensor.register_hook`; None if there were never any."""
    untyped: Any = tensor
    hooks: Hooks | None = untyped._backward_hooks
    return hooks


def post_accumulate_hooks(tensor: Tensor) -> Hooks | None:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook`; None if there were never any."""
    untyped: Any = tensor
    hooks: Hooks | None = untyped._post_accumulate_grad_hooks
    return hooks


def remove_gradient_hooks(tensor: Tensor) -> None:
    untyped: Any = tensor
    untyped._backward_hooks = None


def remove_post_accumulate_hooks(tensor: Tensor) -> None:
    untyped: Any = tensor
    untyped._post_accumulate_grad_hooks = None


def is_backward_running() -> bool:
    """Return whether this thread is within a backward, such as in a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def current_node() -> Any:
    """Return the node of the backward that runs in this thread; None outside of one."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """Return the number of a node, counted in the order of the forward."""
    number: int = node._sequence_nr()
    return number


def next_node_number() -> int:
    """Return the number of the next node that a forward makes in this thread."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not exported
    return number


def nll_loss_arguments(node: Any) -> tuple[int, Tensor]:
    """Return (ignore_index, targets) that the node of a negative log likelihood has saved."""
    index: int = node._saved_ignore_index
    return (index - (1 << 64) if index >> 63 else index), node._saved_target  # torch gives it unsigned
