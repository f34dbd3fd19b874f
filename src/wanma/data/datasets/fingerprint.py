"""Fingerprint of a user's dataset: its length, and a few samples if they are the same when read again.

Numbers are compared to some three digits, because a dataset's computations may differ in the last ones
between nodes; of large arrays a few elements are compared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wanma.job.errors import WanmaError

_SAMPLED_ELEMENTS = 16
_MAX_DEPTH = 6

ReadItem = Callable[[Any, int], Any]
"""Function (dataset, row) -> item."""


def dataset_fingerprint(dataset: Any, read: ReadItem) -> str:
    """Return a hash of a map-style dataset: the same for the same dataset in another process.

    Reads the first item twice, the middle one and the last. If the dataset draws random numbers, only the
    types and shapes of its items count. Items that cannot be read are left out: they fail in training.
    """
    size = len(dataset)
    with _preserve_generators():
        try:
            descriptions = _describe_items(dataset, size, read)
        except WanmaError:
            descriptions = []
    return hash_texts(str(size), *descriptions)


def _describe_items(dataset: Any, size: int, read: ReadItem) -> list[str]:
    """Describe some items; a row of a table that cannot be read counts as its padding."""
    first = _describe_item(read(dataset, 0), _describe_value)
    if first != _describe_item(read(dataset, 0), _describe_value):
        return [_describe_item(read(dataset, 0), _describe_type)]
    return [
        first,
        *(_describe_item(read(dataset, row), _describe_value) for row in sorted({size // 2, size - 1} - {0})),
    ]


def hash_texts(*texts: str) -> str:
    """Return the hash of texts, with boundaries between them."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def describe_tensor(tensor: Tensor) -> str:
    """Describe a tensor by shape, type and a few elements, floats rounded to some three digits."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return _describe_type(tensor)
    flat = tensor.detach().reshape(-1)
    if len(flat) > _SAMPLED_ELEMENTS:
        sampled_positions = torch.linspace(
            0, len(flat) - 1, _SAMPLED_ELEMENTS, dtype=torch.float64, device=flat.device
        )
        flat = flat[sampled_positions.long()]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    values = flat.to("cpu", torch.bfloat16).float().tolist() if flat.is_floating_point() else flat.tolist()
    return f"{_describe_type(tensor)} {values}"


def _describe_type(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def _describe_value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            return _describe_type(value)
        flat = value.reshape(-1)
        sampled = flat[np.linspace(0, len(flat) - 1, min(len(flat), _SAMPLED_ELEMENTS)).astype(np.int64)]
        numbers = sampled.astype(np.float64) if value.dtype.kind == "f" else sampled.astype(np.int64)
        return f"{_describe_type(value)} {describe_tensor(torch.from_numpy(numbers))}"
    if isinstance(value, Tensor):
        return describe_tensor(value)
    if isinstance(value, float):
        return describe_tensor(torch.tensor(value))
    return repr(value) if isinstance(value, int | str | bytes | None) else _describe_type(value)


def _describe_item(item: Any, leaf: Callable[[Any], str], depth: int = 0) -> str:
    """Describe an item with its nested containers, each leaf by `leaf`."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{key}: {_describe_item(item[key], leaf, depth + 1)}" for key in item) + "}"
    if isinstance(item, tuple | list):
        if len(item) > _SAMPLED_ELEMENTS and all(isinstance(part, int | float) for part in item):
            return leaf(np.asarray(item))
        return "[" + ", ".join(_describe_item(part, leaf, depth + 1) for part in item) + "]"
    if hasattr(item, "__dict__") and not isinstance(item, Tensor):
        return type(item).__name__ + _describe_item(vars(item), leaf, depth + 1)
    return leaf(item)


@contextmanager
def _preserve_generators() -> Iterator[None]:
    """Restore the generators of torch, numpy and `random` after the block, whatever a dataset draws in it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
