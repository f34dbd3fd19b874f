"""Mapping of a model's parameters to published tensors, which may be renamed, fused, split or transposed.

A `TensorSlice` ties rows of one parameter to a box of one tensor of a safetensors checkpoint, for copies in
both directions: a rank reads only what its part of the parameter needs, an export writes tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSlice:
    """Tensor slice: rows `first_row` to `first_row + shape[0]` of a parameter, all of its other dims."""

    tensor_name: str
    """Name in the published checkpoint."""
    first_row: int
    shape: Shape
    """Shape of the slice, in the parameter's own dims."""
    offset: Shape
    """Offset of the slice in the published tensor, in that tensor's dims."""
    is_transposed: bool = False
    """True if the published tensor has the last two dims transposed."""
    is_single_row: bool = False
    """True if one row is a whole published tensor: experts are published one by one."""
    head_dim: int | None = None
    """Width of heads whose rows have rotary positions; None: rows are in the same order.

    The parameter turns pairs (0, 1), (2, 3), ..., the published one (0, width / 2), (1, width / 2 + 1), ...
    """

    @property
    def tensor_shape(self) -> Shape:
        """Shape of the box in the published tensor."""
        return self._to_tensor_dims(self.shape)

    def locate_box(self, offset: Shape, shape: Shape) -> tuple[Shape, Shape]:
        """Return the region in the published tensor, with whole heads, that a box of the slice needs.

        Args:
            offset: of the box, in the parameter's dims and counted from the slice's beginning.
            shape: of the box, in the parameter's dims.

        Returns:
            Its offset and shape in the published tensor.
        """
        if self.head_dim is not None:
            start = offset[0] // self.head_dim * self.head_dim
            stop = -(-(offset[0] + shape[0]) // self.head_dim) * self.head_dim
            offset, shape = (start, *offset[1:]), (stop - start, *shape[1:])
        absolute_offset = (
            position + base for position, base in zip(self._to_tensor_dims(offset), self.offset, strict=True)
        )
        return tuple(absolute_offset), self._to_tensor_dims(shape)

    def from_huggingface(self, offset: Shape, shape: Shape, region: Tensor) -> Tensor:
        """Convert a `region` that was read to the box of the slice."""
        if self.is_transposed:
            region = region.transpose(-1, -2)
        if self.is_single_row:
            region = region.unsqueeze(0)
        if self.head_dim is None:
            return region
        rows = torch.arange(offset[0], offset[0] + shape[0])
        return region[self._huggingface_rows(rows) - offset[0] // self.head_dim * self.head_dim]

    def to_huggingface(self, parameter_slice: Tensor) -> Tensor:
        """Convert the whole slice to the published layout: the inverse of `from_huggingface`."""
        if self.head_dim is not None:
            order = torch.empty(self.shape[0], dtype=torch.int64)
            order[self._huggingface_rows(torch.arange(self.shape[0]))] = torch.arange(self.shape[0])
            parameter_slice = parameter_slice[order]
        if self.is_single_row:
            parameter_slice = parameter_slice.squeeze(0)
        return parameter_slice.transpose(-1, -2) if self.is_transposed else parameter_slice

    def _to_tensor_dims(self, sizes: Shape) -> Shape:
        if self.is_single_row:
            sizes = sizes[1:]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.is_transposed else sizes

    def _huggingface_rows(self, rows: Tensor) -> Tensor:
        """Return the rows in the published tensor of the slice's rows `rows`."""
        assert self.head_dim is not None
        head, head_row = rows // self.head_dim, rows % self.head_dim
        return head * self.head_dim + head_row % 2 * (self.head_dim // 2) + head_row // 2


TensorMapping = tuple[TensorSlice, ...]
"""Slices that together hold a parameter."""


class StateDictAdapter(Protocol):
    """State-dict adapter: a model whose weights can be read from, and written as, a published checkpoint."""

    @property
    def tied_tensors(self) -> tuple[tuple[str, str], ...]:
        """Pairs of published tensors that are one parameter here; the first is the one that is written."""

    def tensor_mappings(self, name: str, shape: Shape) -> tuple[TensorMapping, ...]:
        """Return the slices of parameter `name` of `shape`; several ways to publish it, the usual one first.

        Returns:
            Empty for a parameter that no published checkpoint holds, such as an adapter.
        """

    def is_ignored_tensor(self, tensor: str) -> bool:
        """Return True if a checkpoint's tensor is not a weight, such as a stored mask."""

    def config_mismatches(self, config: Mapping[str, Any]) -> list[str]:
        """List the settings of a published `config.json` that this model computes otherwise."""

    def export_config(self, sequence_length: int) -> dict[str, Any]:
        """Return the `config.json` that goes with the weights.

        Args:
            sequence_length: sequence length of the training.

        Raises:
            WanmaError: no published family has this architecture.
        """


def map_tensor(
    tensor_name: str, shape: Shape, *, is_transposed: bool = False, head_dim: int | None = None
) -> TensorSlice:
    """Return the slice of a parameter that is published as one tensor."""
    return TensorSlice(
        tensor_name, 0, shape, (0,) * len(shape), is_transposed=is_transposed, head_dim=head_dim
    )


def map_unstacked_rows(name_pattern: str, shape: Shape) -> TensorMapping:
    """Return the slices of a parameter with a tensor for each row; `name_pattern` holds "{}" for the row."""
    offset = (0,) * (len(shape) - 1)
    return tuple(
        TensorSlice(name_pattern.format(row), row, (1, *shape[1:]), offset, is_single_row=True)
        for row in range(shape[0])
    )


def map_moe_parameter(
    block: str, expert_matrix: str | None, shape: Shape, family: str
) -> list[TensorMapping]:
    """Return the slices of a block's router or routed experts.

    Experts are separate tensors, as weights are published, or stacked, as transformers holds them.

    Args:
        block: path of the block, such as "model.layers.0".
        expert_matrix: "gate", "up" or "down" of the experts; None: the router.
        shape: of the parameter.
        family: "mixtral", or one whose names are like Qwen's.
    """
    paths = [f"{block}.mlp"]
    if family == "mixtral":
        paths.insert(0, f"{block}.block_sparse_moe")
    if expert_matrix is None:
        return [(map_tensor(f"{path}.gate.weight", shape),) for path in paths]
    matrix = f"{expert_matrix}_proj"
    if family == "mixtral":
        matrix = {"gate": "w1", "up": "w3", "down": "w2"}[expert_matrix]
    fused = "down_proj" if expert_matrix == "down" else "gate_up_proj"
    offset = (0, shape[1] if expert_matrix == "up" else 0, 0)
    return [
        map_unstacked_rows(f"{paths[0]}.experts.{{}}.{matrix}.weight", shape),
        (TensorSlice(f"{block}.mlp.experts.{fused}", 0, shape, offset),),
    ]


def tensor_shapes(mappings: Iterable[TensorMapping]) -> dict[str, Shape]:
    """Return the shapes of the published tensors that the slices of several parameters cover together."""
    shapes: dict[str, Shape] = {}
    for piece in (piece for pieces in mappings for piece in pieces):
        ends = tuple(start + size for start, size in zip(piece.offset, piece.tensor_shape, strict=True))
        shapes[piece.tensor_name] = tuple(map(max, ends, shapes.get(piece.tensor_name, ends)))
    return shapes


def select_mapping(
    mappings: Iterable[TensorMapping], present_tensors: Mapping[str, object]
) -> TensorMapping | None:
    """Return the first way to publish a parameter of which all tensors are present; None: there is none."""
    return next(
        (pieces for pieces in mappings if all(p.tensor_name in present_tensors for p in pieces)), None
    )
