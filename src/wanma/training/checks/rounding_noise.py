"""Noise of the size of rounding, by which a check tells rounding from a difference of meaning.

A small loss may be a difference of large values (a cross-entropy near zero), so that rounding in other places
changes it by more than any relative tolerance allows. The noise shows by how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wanma.training.loss.model_outputs import map_tensors

ROUNDING_MARGIN = 16
"""Ratio of the difference that counts as rounding to the largest that noise has made."""
_SIGN_FREQUENCIES = (1e4, 3.1e4, 7.7e4)
"""Frequencies of the signs of noise, one a pass: two values of a tensor hardly ever have all signs alike."""
NOISE_PASSES = len(_SIGN_FREQUENCIES)


def with_rounding_noise(tensor: Tensor, number: int = 0) -> Tensor:
    """Return a tensor whose elements are one unit of rounding larger or smaller; integers as they are.

    Args:
        tensor: tensor of any shape.
        number: number of the pass, below `NOISE_PASSES`; each has other signs.
    """
    if not tensor.is_floating_point():
        return tensor
    signs = (tensor * _SIGN_FREQUENCIES[number]).cos().sign()
    return tensor + tensor * signs * torch.finfo(tensor.dtype).eps


@contextmanager
def rounding_noise(parts: Iterable[nn.Module], number: int) -> Iterator[None]:
    """Add noise to the outputs of all modules without submodules."""

    def add(module: nn.Module, arguments: Any, output: Any) -> Any:  # noqa: ARG001  # a hook's
        return map_tensors(lambda tensor: with_rounding_noise(tensor, number), output)

    leaves = [module for part in parts for module in part.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(add) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
