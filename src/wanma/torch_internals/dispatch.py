"""Dispatch: modes that see every operator, the keys below them, schemas of operators, trees of arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map", "tree_map_only"]

PRIVATE_USE_KEYS: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
"""Dispatch keys of a device that has no tensor: an operator then runs the kernel of all devices."""


def active_dispatch_modes() -> list[Any]:
    """Return the dispatch modes in force, the innermost last."""
    return _get_current_dispatch_mode_stack()


def pop_dispatch_mode() -> None:
    """Leave the innermost dispatch mode without its `__exit__`; `push_dispatch_mode` enters it again."""
    _pop_mode()


def push_dispatch_mode(mode: TorchDispatchMode) -> None:
    _push_mode(mode)


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which operators run their kernels without autograd."""
    return torch._C._AutoDispatchBelowAutograd()


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator as a dispatch mode gets it: its name, and arguments."""
    return operator._schema
