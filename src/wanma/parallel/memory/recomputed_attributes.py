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
from torch._subclasses.fake_tensor import is_fake

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import JobError
from wanma.models.user_modules.user_attributes import MODULE_ATTRIBUTES, is_user_object

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

    def _compare(self, left: dict[str, Any]) -> None:
        now = self._values()
        for name in dict.fromkeys((*left, *now)):
            if name not in now or name not in left or not _same(left[name], now[name]):
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
        return [len(value), *(_value(one, depth - 1) for one in list(value)[-_ITEMS:])]
    if isinstance(value, dict):
        return {str(key): _value(one, depth - 1) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return len(value)
    if is_user_object(value) and not isinstance(value, nn.Module):
        return {name: _value(one, depth - 1) for name, one in vars(value).items()}
    return None


def _digest(tensor: Tensor) -> Any:
    if is_fake(tensor) or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    precise = tensor.detach().double()
    size = float(precise.abs().sum())
    # Relative to the size: a difference that rounding has left in a sum is none.
    return [str(tuple(tensor.shape)), size, size + float(precise.sum())]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12) or one != one or other != other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
