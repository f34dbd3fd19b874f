"""Traversal of the tensors of a model's output: tuples, dicts, dataclasses and objects with attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wanma.torch_internals.dispatch import tree_map


def map_tensors(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return the structure with `function` applied to every tensor; objects with attributes are copied."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(value, (type, nn.Module)) or callable(value):
            return value
        changed = {name: map_tensors(function, attribute) for name, attribute in attributes.items()}
        if all(changed[name] is attribute for name, attribute in attributes.items()):
            return value
        copied = copy.copy(value)
        copied.__dict__.update(changed)
        return copied

    return tree_map(leaf, output)


def output_tensors(output: Any) -> list[Tensor]:
    """Return all tensors of an output, in its order."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, output)
    return tensors
