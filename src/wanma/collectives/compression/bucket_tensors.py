"""Tensors of a bucket as compressors take them, their error feedback, and the collectives on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS, MAX_SLICE_ELEMENTS
from wanma.collectives.compression.overlap import CollectiveSteps, require_work
from wanma.torch_internals.distributed import all_gather_single


@dataclass
class ErrorFeedback:
    """State of compression that one rank keeps for one tensor between steps."""

    residual: Tensor | None = None
    """Error feedback, (destinations, length) fp32: values that sums so far left out of the gradients."""
    power_sgd_q: Tensor | None = None
    """PowerSGD's Q, (columns, rank) fp32: start of the next sum; the same on all ranks of the group."""


@dataclass(frozen=True)
class BucketTensor:
    """Part of a bucket that belongs to one tensor."""

    values: Tensor
    """Gradient of this rank, (destinations, length) fp32.

    One destination if all ranks get the whole sum, which is written here; else one row for each rank's shard.
    """
    shard_sum: Tensor | None = None
    """Buffer (length,) for the sum of this rank's shard; None: with one destination, `values` gets it."""
    matrix_columns: int = 1
    """Elements in one row of the tensor as a matrix; they divide `length`."""
    error_feedback: ErrorFeedback | None = None

    @property
    def length(self) -> int:
        return self.values.shape[1]

    @property
    def residual(self) -> Tensor:
        assert self.error_feedback is not None  # lossy compressors have one
        assert self.error_feedback.residual is not None
        return self.error_feedback.residual

    @property
    def power_sgd_q(self) -> Tensor:
        assert self.error_feedback is not None  # PowerSGD starts from its last result
        assert self.error_feedback.power_sgd_q is not None
        return self.error_feedback.power_sgd_q

    def write_sum(self, total: Tensor) -> None:
        """Write the sum, (length,), to the result, or to the values if every rank gets it."""
        (self.values[0] if self.shard_sum is None else self.shard_sum).copy_(total)


class Compressor(Protocol):
    """Compressor: sums the tensors of a bucket over ranks in fewer bytes than the gradients have.

    Every rank of the group calls it with pieces of the same sizes, in the same order. It returns sums of
    parts of the pieces, to be run by `overlap.run_interleaved`; each of them returns the bytes that this
    rank sends.
    """

    collectives_per_sum: int
    """Number of waits in each sum of an all-reduce."""

    def all_reduce(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        """Put the sum over the ranks into each piece's values."""

    def reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        """Put the sum of this rank's row of each piece into its result."""


class SingleSumCompressor(ABC):
    """Compressor that sums all tensors of a bucket at once, in one sum."""

    def all_reduce(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        yield self._all_reduce(tensors, group)

    def reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        yield self._reduce_scatter(tensors, group)

    @abstractmethod
    def _all_reduce(self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup) -> CollectiveSteps[int]:
        """Put the sum over the ranks into each tensor's values; return the bytes sent."""

    @abstractmethod
    def _reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> CollectiveSteps[int]:
        """Put the sum of this rank's row of each tensor into its result; return the bytes sent."""


@dataclass(frozen=True)
class BucketSlice:
    """Columns `start` to `stop` of a piece, and their offset in a buffer shared with other slices."""

    tensor: BucketTensor
    start: int
    stop: int
    offset: int

    @property
    def buffer_range(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


def slice_bucket(tensors: Sequence[BucketTensor], destinations: int) -> Iterator[list[BucketSlice]]:
    """Yield runs of slices that cover all pieces.

    Each slice starts at a multiple of `CODEC_BLOCK_ELEMENTS`; a run has at most `MAX_SLICE_ELEMENTS` over all
    destinations.
    """
    max_width = max(MAX_SLICE_ELEMENTS // destinations // CODEC_BLOCK_ELEMENTS, 1) * CODEC_BLOCK_ELEMENTS
    run: list[BucketSlice] = []
    width = 0
    for piece in tensors:
        start = 0
        while start < piece.length:
            stop = min(piece.length, start + max_width - width)
            run.append(BucketSlice(piece, start, stop, width))
            width += align_up(stop - start)
            start = stop
            if width >= max_width:
                yield run
                run, width = [], 0
    if run:
        yield run


def compute_row_elements(slices: Sequence[BucketSlice]) -> int:
    """Return the elements of a run's buffer, for one destination."""
    last = slices[-1]
    return last.offset + align_up(last.stop - last.start)


def align_up(elements: int) -> int:
    return math.ceil(elements / CODEC_BLOCK_ELEMENTS) * CODEC_BLOCK_ELEMENTS


def all_gather_rows(part: Tensor, group: dist.ProcessGroup) -> CollectiveSteps[Tensor]:
    """All-gather every rank's part, of equal size: (elements,) → (ranks, elements)."""
    gathered = part.new_empty(group.size() * part.numel())
    yield require_work(all_gather_single(gathered, part, group=group, async_op=True))
    return gathered.view(group.size(), -1)


def all_to_all_rows(rows: Tensor, group: dist.ProcessGroup) -> CollectiveSteps[Tensor]:
    """Exchange rows all-to-all: (ranks, width) → every rank's row for this one, (ranks, width), by rank."""
    received_rows = torch.empty_like(rows)
    yield require_work(dist.all_to_all_single(received_rows, rows, group=group, async_op=True))
    return received_rows


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> CollectiveSteps[None]:
    """Sum over the ranks, in place."""
    yield require_work(dist.all_reduce(values, group=group, async_op=True))
