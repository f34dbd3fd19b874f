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
from wanma.checkpoint.format.tensor_blocks import BLOCK_ELEMENTS, iterate_blocks
from wanma.checkpoint.load.reader import CheckpointReader
from wanma.checkpoint.store.checkpoint_folder import read_manifest


@dataclass(frozen=True)
class TensorDifference:
    """Differences of one tensor in both checkpoints; values are compared where the shapes are equal."""

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    unequal_elements: int = 0
    """Number of elements with unequal values; NaN equals NaN here."""
    non_finite_elements: int = 0
    """Number of unequal elements with a NaN or an infinity on one side; left out of the two values below."""
    max_absolute_difference: float = 0.0
    """Maximum of |a - b|."""
    relative_norm: float | None = 0.0
    """Relative norm ‖a - b‖ / ‖a‖, Euclidean; None where a is zero."""

    @property
    def is_empty(self) -> bool:
        return (
            self.dtypes[0] == self.dtypes[1]
            and self.shapes[0] == self.shapes[1]
            and not self.unequal_elements
        )


@dataclass(frozen=True)
class CheckpointDifference:
    """Differences between checkpoints A and B."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    """Tensors that differ."""
    equal_tensors: int
    """Number of equal tensors."""
    state_differences: tuple[tuple[str, Any, Any], ...]
    """Differing state that is not a tensor: (dotted key, value in A, value in B); None where missing."""
    ranks_with_different_state: tuple[int, ...]
    """Ranks whose own state differs."""

    @property
    def is_empty(self) -> bool:
        return not (
            self.only_a
            or self.only_b
            or self.tensors
            or self.state_differences
            or self.ranks_with_different_state
        )


def compare_checkpoints(a: Path, b: Path, block_elements: int = BLOCK_ELEMENTS) -> CheckpointDifference:
    """Compare two checkpoints; memory holds one block of each at a time.

    Raises:
        WanmaError: one cannot be read.
    """
    left, right = CheckpointReader(a), CheckpointReader(b)
    common_names = [name for name in left.tensors if name in right.tensors]
    differences = [_compare_tensor(name, left, right, block_elements) for name in common_names]
    manifests = read_manifest(a), read_manifest(b)
    states = [
        {"step": entry.step, "metric": entry.metric, **dict(_flatten_state(entry.state))}
        for entry in manifests
    ]
    ranks = [entry.rank_state for entry in manifests]
    return CheckpointDifference(
        only_a=tuple(sorted(set(left.tensors).difference(right.tensors))),
        only_b=tuple(sorted(set(right.tensors).difference(left.tensors))),
        tensors=tuple(entry for entry in differences if not entry.is_empty),
        equal_tensors=sum(entry.is_empty for entry in differences),
        state_differences=tuple(
            (key, states[0].get(key), states[1].get(key))
            for key in dict.fromkeys([*states[0], *states[1]])
            if states[0].get(key) != states[1].get(key)
        ),
        ranks_with_different_state=tuple(
            rank for rank in sorted({*ranks[0], *ranks[1]}) if ranks[0].get(rank) != ranks[1].get(rank)
        ),
    )


def _compare_tensor(
    name: str, a: CheckpointReader, b: CheckpointReader, block_elements: int
) -> TensorDifference:
    entries: tuple[TensorEntry, TensorEntry] = a.tensors[name], b.tensors[name]
    dtypes = entries[0].dtype, entries[1].dtype
    shapes = entries[0].shape, entries[1].shape
    if shapes[0] != shapes[1]:
        return TensorDifference(name, dtypes, shapes, relative_norm=None)
    unequal_count = non_finite = 0
    max_difference = squares = norm = 0.0
    for box in iterate_blocks(shapes[0], block_elements):
        x, y = a.read(name, box).reshape(-1), b.read(name, box).reshape(-1)
        left_values = _to_fp64(x)
        norm += float(left_values[left_values.isfinite()].square().sum())
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        right_values = _to_fp64(y)
        unequal = _unequal_mask(x, y, left_values, right_values)
        finite = left_values.isfinite() & right_values.isfinite()
        gaps = (left_values - right_values)[unequal & finite].abs()
        unequal_count += int(unequal.sum())
        non_finite += int((unequal & ~finite).sum())
        if gaps.numel():
            max_difference = max(max_difference, float(gaps.max()))
            squares += float(gaps.square().sum())
    relative = math.sqrt(squares / norm) if norm > 0 else None if squares else 0.0
    return TensorDifference(name, dtypes, shapes, unequal_count, non_finite, max_difference, relative)


def _to_fp64(part: Tensor) -> Tensor:
    """Convert to fp64; one-byte floating-point dtypes only convert by way of fp32."""
    return (part.float() if part.is_floating_point() and part.itemsize == 1 else part).double()


def _unequal_mask(x: Tensor, y: Tensor, x_fp64: Tensor, y_fp64: Tensor) -> Tensor:
    """Return the mask of unequal elements; integers of one dtype are compared exactly, which fp64 cannot."""
    if x.dtype == y.dtype and not x.is_floating_point():
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        return x.view(signed) != y.view(signed)
    return (x_fp64 != y_fp64) & ~(x_fp64.isnan() & y_fp64.isnan())


def _flatten_state(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _flatten_state(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry
