"""Comparison of two checkpoints, block by block, whatever layouts they were saved from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wanma.checkpoint.format.manifest import TensorEntry
from wanma.checkpoint.format.tensor_blocks import BLOCK_ELEMENTS, blocks
from wanma.checkpoint.load.reader import Saved
from wanma.checkpoint.store.checkpoint_folder import read_manifest


@dataclass(frozen=True)
class Difference:
    """Differences of one tensor in both checkpoints; values are compared where the shapes are equal."""

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    differing: int = 0
    """Number of elements with unequal values; NaN equals NaN here."""
    non_finite: int = 0
    """Number of unequal elements with a NaN or an infinity on one side; left out of the two values below."""
    largest: float = 0.0
    """Maximum of |a - b|."""
    relative: float | None = 0.0
    """Relative norm ‖a - b‖ / ‖a‖, Euclidean; None where a is zero."""

    @property
    def is_none(self) -> bool:
        return self.dtypes[0] == self.dtypes[1] and self.shapes[0] == self.shapes[1] and not self.differing


@dataclass(frozen=True)
class Comparison:
    """Differences between checkpoints A and B."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[Difference, ...]
    """Tensors that differ."""
    equal: int
    """Number of equal tensors."""
    state: tuple[tuple[str, Any, Any], ...]
    """Differing state that is not a tensor: (dotted key, value in A, value in B); None where missing."""
    ranks: tuple[int, ...]
    """Ranks whose own state differs."""

    @property
    def is_none(self) -> bool:
        return not (self.only_a or self.only_b or self.tensors or self.state or self.ranks)


def compare(a: Path, b: Path, block_elements: int = BLOCK_ELEMENTS) -> Comparison:
    """Compare two checkpoints; memory holds one block of each at a time.

    Raises:
        WanmaError: one cannot be read.
    """
    left, right = Saved(a), Saved(b)
    both = [name for name in left.tensors if name in right.tensors]
    found = [_difference(name, left, right, block_elements) for name in both]
    manifests = read_manifest(a), read_manifest(b)
    states = [{"step": one.step, "metric": one.metric, **dict(_flat(one.state))} for one in manifests]
    ranks = [one.rank_state for one in manifests]
    return Comparison(
        only_a=tuple(sorted(set(left.tensors).difference(right.tensors))),
        only_b=tuple(sorted(set(right.tensors).difference(left.tensors))),
        tensors=tuple(one for one in found if not one.is_none),
        equal=sum(one.is_none for one in found),
        state=tuple(
            (key, states[0].get(key), states[1].get(key))
            for key in dict.fromkeys([*states[0], *states[1]])
            if states[0].get(key) != states[1].get(key)
        ),
        ranks=tuple(
            rank for rank in sorted({*ranks[0], *ranks[1]}) if ranks[0].get(rank) != ranks[1].get(rank)
        ),
    )


def _difference(name: str, a: Saved, b: Saved, block_elements: int) -> Difference:
    entries: tuple[TensorEntry, TensorEntry] = a.tensors[name], b.tensors[name]
    dtypes = entries[0].dtype, entries[1].dtype
    shapes = entries[0].shape, entries[1].shape
    if shapes[0] != shapes[1]:
        return Difference(name, dtypes, shapes, relative=None)
    differing = non_finite = 0
    largest = squares = norm = 0.0
    for box in blocks(shapes[0], block_elements):
        x, y = a.read(name, box).reshape(-1), b.read(name, box).reshape(-1)
        wide = _wide(x)
        norm += float(wide[wide.isfinite()].square().sum())
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        other = _wide(y)
        unequal = _unequal(x, y, wide, other)
        finite = wide.isfinite() & other.isfinite()
        gap = (wide - other)[unequal & finite].abs()
        differing += int(unequal.sum())
        non_finite += int((unequal & ~finite).sum())
        if gap.numel():
            largest = max(largest, float(gap.max()))
            squares += float(gap.square().sum())
    relative = math.sqrt(squares / norm) if norm > 0 else None if squares else 0.0
    return Difference(name, dtypes, shapes, differing, non_finite, largest, relative)


def _wide(part: Tensor) -> Tensor:
    """Convert to fp64; one-byte floating-point dtypes only convert by way of fp32."""
    return (part.float() if part.is_floating_point() and part.itemsize == 1 else part).double()


def _unequal(x: Tensor, y: Tensor, wide: Tensor, other: Tensor) -> Tensor:
    """Return the mask of unequal elements; integers of one dtype are compared exactly, which fp64 cannot."""
    if x.dtype == y.dtype and not x.is_floating_point():
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        return x.view(signed) != y.view(signed)
    return (wide != other) & ~(wide.isnan() & other.isnan())


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", one
