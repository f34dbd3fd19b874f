"""Attributes of user-written classes."""

from __future__ import annotations

from torch import nn

_FRAMEWORK_PACKAGES = ("torch", "wanma", "builtins", "abc", "typing")
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, children and hooks."""


def is_user_object(value: object) -> bool:
    """Return True if a user-written class defines the object's attributes."""
    user_classes = [
        kind for kind in type(value).__mro__ if kind.__module__.split(".")[0] not in _FRAMEWORK_PACKAGES
    ]
    return bool(user_classes) and hasattr(value, "__dict__")
