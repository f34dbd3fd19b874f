"""Attributes of user-written classes."""

from __future__ import annotations

from torch import nn

_FRAMEWORK_PACKAGES = ("torch", "wanma", "builtins", "abc", "typing")
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, children and hooks."""


def is_user_object(value: object) -> bool:
    """Return True if a user-written class defines the object's attributes."""
    own = [kind for kind in type(value).__mro__ if kind.__module__.split(".")[0] not in _FRAMEWORK_PACKAGES]
    return bool(own) and hasattr(value, "__dict__")
