"""Check of attributes that a block's forward changes: recompute in backward must not change them again.

A counter, a list that grows or a moving average that a module keeps as a plain attribute would be changed
twice a step. An attribute that each run overwrites, such as the latest attention, is the same after both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import JobError
from wanma.models.user_modules.user_attributes import MODULE_ATTRIBUTES, is_user_object
from wanma.torch_internals.fake_tensors import is_fake

_CHECKED_RUNS = 4
"""Number of first runs of a block that are checked."""
_DEPTH, _ITEMS = 3, 100
_TOLERANCE = 1e-5
"""Relative difference that rounding may make between the two runs."""


class RecomputedAttributeCheck:
    """Check of one block's attributes in its first runs."""

    def __init__(self, block: nn.Module) -> None:
        self._name = type(block).__name__
        self._modules = [(path, module) for path, module in block.named_modules() if is_user_object(module)]
        self._runs = 0

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` with a comparison of attributes after its first run and its run in backward."""
        self._runs += 1
        if self._runs > _CHECKED_RUNS or not self._modules:
            return forward
        number = self._runs
        left: dict[str, Any] = {}

        def run(*arguments: Any, **keywords: Any) -> Any:
            is_again = bool(left)
            try:
                return forward(*arguments, **keywords)
            finally:  # a second run ends where backward has all that it needs
                if not is_again:
                    left.update(self._values())
                elif number == self._runs:  # no other micro-batch in between, as in a pipeline
                    self._compare(left)

        return run

    def _values(self) -> dict[str, Any]:
        return {
            f"{path}.{name}".lstrip("."): _value(value, _DEPTH)
            for path, module in self._modules
            for name, value in vars(module).items()
            if name not in MODULE_ATTRIBUTES
        }

    def _compare(self, recorded: dict[str, Any]) -> None:
        recomputed = self._values()
        for name in dict.fromkeys((*recorded, *recomputed)):
            if name not in recomputed or name not in recorded or not _same(recorded[name], recomputed[name]):
                raise JobError(
                    f"{self._name} changes its attribute {name} in its forward pass, so recompute in "
                    "backward changes it twice",
                    "set parallel.recompute = 'none', or change the attribute between two steps "
                    "(wanma.session)",
                )


def _value(value: Any, depth: int) -> Any:
    """Return the comparable form of a value: numbers, texts and their containers; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _digest(local_tensor(value))
    if isinstance(value, np.ndarray):
        return _digest(torch.from_numpy(value)) if value.dtype.kind in "biuf" else None
    if depth == 0:
        return None
    if isinstance(value, list | tuple | deque):
        return [len(value), *(_value(item, depth - 1) for item in list(value)[-_ITEMS:])]
    if isinstance(value, dict):
        return {str(key): _value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return len(value)
    if is_user_object(value) and not isinstance(value, nn.Module):
        return {name: _value(item, depth - 1) for name, item in vars(value).items()}
    return None


def _digest(tensor: Tensor) -> Any:
    if is_fake(tensor) or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor.detach().double()
    size = float(values.abs().sum())
    # Relative to the size: a difference that rounding has left in a sum is none.
    return [str(tuple(tensor.shape)), size, size + float(values.sum())]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=1e-12) or left != left or right != right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
