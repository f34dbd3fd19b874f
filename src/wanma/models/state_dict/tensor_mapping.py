"""Mapping of a model's parameters to published tensors, which may be renamed, fused, split or transposed.

A `Piece` ties rows of one parameter to a box of one tensor of a safetensors checkpoint, for copies in both
directions: a rank reads only what its part of the parameter needs, an export writes tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Tensor slice: rows `first` to `first + shape[0]` of a parameter (dim 0), all of its other dims."""

    tensor: str
    """Name in the published checkpoint."""
    first: int
    shape: Shape
    """Shape of the slice, in the parameter's own dims."""
    offset: Shape
    """Offset of the slice in the published tensor, in that tensor's dims."""
    transposed: bool = False
    """True if the published tensor has the last two dims transposed."""
    stacked: bool = False
    """True if one row is a whole published tensor: experts are published one by one."""
    head_width: int | None = None
    """Width of heads whose rows have rotary positions; None: rows are in the same order.

    The parameter turns pairs (0, 1), (2, 3), ..., the published one (0, width / 2), (1, width / 2 + 1), ...
    """

    @property
    def published_shape(self) -> Shape:
        """Shape of the box in the published tensor."""
        return self._turned(self.shape)

    def region(self, offset: Shape, shape: Shape) -> tuple[Shape, Shape]:
        """Return the region in the published tensor, with whole heads, that a box of the slice needs.

        Args:
            offset: of the box, in the parameter's dims and counted from the slice's beginning.
            shape: of the box, in the parameter's dims.

        Returns:
            Its offset and shape in the published tensor.
        """
        if self.head_width is not None:
            start = offset[0] // self.head_width * self.head_width
            stop = -(-(offset[0] + shape[0]) // self.head_width) * self.head_width
            offset, shape = (start, *offset[1:]), (stop - start, *shape[1:])
        moved = (at + base for at, base in zip(self._turned(offset), self.offset, strict=True))
        return tuple(moved), self._turned(shape)

    def to_parameter(self, offset: Shape, shape: Shape, region: Tensor) -> Tensor:
        """Convert a `region` that was read to the box of the slice."""
        if self.transposed:
            region = region.transpose(-1, -2)
        if self.stacked:
            region = region.unsqueeze(0)
        if self.head_width is None:
            return region
        rows = torch.arange(offset[0], offset[0] + shape[0])
        return region[self._published_rows(rows) - offset[0] // self.head_width * self.head_width]

    def to_published(self, part: Tensor) -> Tensor:
        """Convert the whole slice to the published layout: the inverse of `to_parameter`."""
        if self.head_width is not None:
            order = torch.empty(self.shape[0], dtype=torch.int64)
            order[self._published_rows(torch.arange(self.shape[0]))] = torch.arange(self.shape[0])
            part = part[order]
        if self.stacked:
            part = part.squeeze(0)
        return part.transpose(-1, -2) if self.transposed else part

    def _turned(self, sizes: Shape) -> Shape:
        if self.stacked:
            sizes = sizes[1:]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes

    def _published_rows(self, rows: Tensor) -> Tensor:
        """Return the rows in the published tensor of the slice's rows `rows`."""
        assert self.head_width is not None
        head, inside = rows // self.head_width, rows % self.head_width
        return head * self.head_width + inside % 2 * (self.head_width // 2) + inside // 2


Alternative = tuple[Piece, ...]
"""Slices that together hold a parameter."""


class Published(Protocol):
    """State-dict adapter: a model whose weights can be read from, and written as, a published checkpoint."""

    @property
    def published_ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of published tensors that are one parameter here; the first is the one that is written."""

    def published(self, name: str, shape: Shape) -> tuple[Alternative, ...]:
        """Return the slices of parameter `name` of `shape`; several ways to publish it, the usual one first.

        Returns:
            Empty for a parameter that no published checkpoint holds, such as an adapter.
        """

    def published_ignores(self, tensor: str) -> bool:
        """Return True if a checkpoint's tensor is not a weight, such as a stored mask."""

    def published_differences(self, config: Mapping[str, Any]) -> list[str]:
        """List the settings of a published `config.json` that this model computes otherwise."""

    def published_config(self, sequence_length: int) -> dict[str, Any]:
        """Return the `config.json` that goes with the weights.

        Args:
            sequence_length: sequence length of the training.

        Raises:
            WanmaError: no published family has this architecture.
        """


def whole(tensor: str, shape: Shape, *, transposed: bool = False, head_width: int | None = None) -> Piece:
    """Return the slice of a parameter that is published as one tensor."""
    return Piece(tensor, 0, shape, (0,) * len(shape), transposed=transposed, head_width=head_width)


def one_by_one(tensor: str, shape: Shape, *, transposed: bool = False) -> Alternative:
    """Return the slices of a parameter whose rows are separate tensors; `tensor` holds "{}" for the row."""
    offset = (0,) * (len(shape) - 1)
    return tuple(
        Piece(tensor.format(row), row, (1, *shape[1:]), offset, transposed=transposed, stacked=True)
        for row in range(shape[0])
    )


def mixture(block: str, part: str | None, shape: Shape, family: str) -> list[Alternative]:
    """Return the slices of a block's router or routed experts.

    Experts are separate tensors, as weights are published, or stacked, as transformers holds them.

    Args:
        block: path of the block, such as "model.layers.0".
        part: "gate", "up" or "down" of the experts; None: the router.
        shape: of the parameter.
        family: "mixtral", or one whose names are like Qwen's.
    """
    paths = [f"{block}.mlp"]
    if family == "mixtral":
        paths.insert(0, f"{block}.block_sparse_moe")
    if part is None:
        return [(whole(f"{path}.gate.weight", shape),) for path in paths]
    matrix = f"{part}_proj"
    if family == "mixtral":
        matrix = {"gate": "w1", "up": "w3", "down": "w2"}[part]
    fused = "down_proj" if part == "down" else "gate_up_proj"
    offset = (0, shape[1] if part == "up" else 0, 0)
    return [
        one_by_one(f"{paths[0]}.experts.{{}}.{matrix}.weight", shape),
        (Piece(f"{block}.mlp.experts.{fused}", 0, shape, offset),),
    ]


def published_shapes(alternatives: Iterable[Alternative]) -> dict[str, Shape]:
    """Return the shapes of the published tensors that the slices of several parameters cover together."""
    shapes: dict[str, Shape] = {}
    for piece in (piece for pieces in alternatives for piece in pieces):
        ends = tuple(at + size for at, size in zip(piece.offset, piece.published_shape, strict=True))
        shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def choose(alternatives: Iterable[Alternative], present: Mapping[str, object]) -> Alternative | None:
    """Return the first way to publish a parameter of which all tensors are present; None: there is none."""
    return next((pieces for pieces in alternatives if all(p.tensor in present for p in pieces)), None)
