"""Where published checkpoints keep a model's parameters: under other names, fused, split or turned.

A `Piece` ties rows of one parameter to a box of one tensor of a safetensors checkpoint, whichever way
it is copied: a rank reads only what its part of the parameter needs, an export writes tensor by tensor.
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
    """Rows `first` to `first + shape[0]` of a parameter (dim 0), all of its other dims."""

    tensor: str
    """Name in the published checkpoint."""
    first: int
    shape: Shape
    """Of the piece, in the parameter's own dims."""
    offset: Shape
    """Where the piece begins in the published tensor, in that tensor's dims."""
    transposed: bool = False
    """The published tensor has the last two dims the other way round."""
    stacked: bool = False
    """One row, which is a whole published tensor: experts are published one by one."""
    head_width: int | None = None
    """Rows are those of heads with rotary positions: the parameter turns pairs (0, 1), (2, 3), ..., the
    published one (0, width / 2), (1, width / 2 + 1), ..."""

    @property
    def published_shape(self) -> Shape:
        """Of the box in the published tensor."""
        return self._turned(self.shape)

    def region(self, offset: Shape, shape: Shape) -> tuple[Shape, Shape]:
        """Where a box of the piece lies in the published tensor, with whole heads.

        Args:
            offset, shape: of the box, in the parameter's dims and counted from the piece's beginning.

        Returns:
            its offset and shape there.
        """
        if self.head_width is not None:
            start = offset[0] // self.head_width * self.head_width
            stop = -(-(offset[0] + shape[0]) // self.head_width) * self.head_width
            offset, shape = (start, *offset[1:]), (stop - start, *shape[1:])
        moved = (at + base for at, base in zip(self._turned(offset), self.offset, strict=True))
        return tuple(moved), self._turned(shape)

    def to_parameter(self, offset: Shape, shape: Shape, region: Tensor) -> Tensor:
        """The box of the piece whose `region` was read."""
        if self.transposed:
            region = region.transpose(-1, -2)
        if self.stacked:
            region = region.unsqueeze(0)
        if self.head_width is None:
            return region
        rows = torch.arange(offset[0], offset[0] + shape[0])
        return region[self._published_rows(rows) - offset[0] // self.head_width * self.head_width]

    def to_published(self, part: Tensor) -> Tensor:
        """The inverse of `to_parameter`, for the whole piece."""
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
        """Rows in the published tensor, of the piece's rows `rows`."""
        assert self.head_width is not None
        head, inside = rows // self.head_width, rows % self.head_width
        return head * self.head_width + inside % 2 * (self.head_width // 2) + inside // 2


Alternative = tuple[Piece, ...]
"""Pieces that together hold a parameter."""


class Published(Protocol):
    """A model whose weights can be started from, and written as, a published checkpoint."""

    @property
    def published_ties(self) -> tuple[tuple[str, str], ...]:
        """Published tensors that are one parameter here; the first is the one that is written."""

    def published(self, name: str, shape: Shape) -> tuple[Alternative, ...]:
        """Where parameter `name` of `shape` lies; several ways to publish it, the usual one first.

        Returns:
            nothing for what no published checkpoint holds, such as adapters.
        """

    def published_ignores(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor is none of the weights, such as a stored mask."""

    def published_differences(self, config: Mapping[str, Any]) -> list[str]:
        """What a published `config.json` says of the arithmetic that this model does otherwise."""

    def published_config(self, sequence_length: int) -> dict[str, Any]:
        """The `config.json` that goes with the weights.

        Args:
            sequence_length: that the model was trained with.

        Raises:
            WanmaError: no published family has this architecture.
        """


def whole(tensor: str, shape: Shape, *, transposed: bool = False, head_width: int | None = None) -> Piece:
    """A parameter that is published as one tensor."""
    return Piece(tensor, 0, shape, (0,) * len(shape), transposed=transposed, head_width=head_width)


def one_by_one(tensor: str, shape: Shape, *, transposed: bool = False) -> Alternative:
    """A parameter whose rows are tensors of their own; `tensor` holds "{}" for their number."""
    offset = (0,) * (len(shape) - 1)
    return tuple(
        Piece(tensor.format(row), row, (1, *shape[1:]), offset, transposed=transposed, stacked=True)
        for row in range(shape[0])
    )


def mixture(block: str, part: str | None, shape: Shape, family: str) -> list[Alternative]:
    """Where a block's router and routed experts lie: experts one by one, as weights are published, or
    stacked, as transformers holds them.

    Args:
        block: path of the block, such as "model.layers.0".
        part: "gate", "up" or "down" of the experts; None: the router.
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
    """Shapes of the published tensors that the pieces of several parameters make up together."""
    shapes: dict[str, Shape] = {}
    for piece in (piece for pieces in alternatives for piece in pieces):
        ends = tuple(at + size for at, size in zip(piece.offset, piece.published_shape, strict=True))
        shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def choose(alternatives: Iterable[Alternative], present: Mapping[str, object]) -> Alternative | None:
    """The first way to publish a parameter of which all tensors are there."""
    return next((pieces for pieces in alternatives if all(p.tensor in present for p in pieces)), None)
