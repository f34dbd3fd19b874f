"""Attributes of user-written classes."""

from __future__ import annotations

from torch import nn

_OWN_ROOMS = ("torch", "wanma", "builtins", "abc", "typing")
ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, children and hooks."""


def is_users(one: object) -> bool:
    """Return True if a user-written class defines the object's attributes."""
    own = [kind for kind in type(one).__mro__ if kind.__module__.split(".")[0] not in _OWN_ROOMS]
    return bool(own) and hasattr(one, "__dict__")
