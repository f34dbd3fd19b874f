"""Quantized all-reduce and reduce-scatter: a codec encodes what travels, and sums are made in fp32.

Each rank sums one part of the bucket: the others send it theirs, encoded (all-to-all); it decodes them, adds
them to its own unencoded part in fp32, encodes the sum, and all get it (all-gather). Encoded bytes travel
both ways, and no rank ever adds two encoded numbers.

Error feedback (Seide et al. 2014; for both phases Tang et al. 2019, algorithm 1): a sender keeps what
encoding lost of its parts; the rank that sums keeps what encoding lost of the sum, in the error feedback of
its own part, which holds nothing else, as a rank sends itself nothing. All ranks decode the same bytes, and
so hold the same sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import (
    BucketSlice,
    BucketTensor,
    align_up,
    all_gather_rows,
    all_to_all_rows,
    compute_row_elements,
    slice_bucket,
)
from wanma.collectives.compression.overlap import CollectiveSteps


class Codec(ABC):
    """Codec of fp32 rows in fewer bytes; `decode` returns as many values as `encode` got."""

    uses_error_feedback: bool

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode values: (rows, multiple of `CODEC_BLOCK_ELEMENTS`) fp32 → (rows, bytes) uint8."""

    @abstractmethod
    def decode(self, encoded: Tensor) -> Tensor:
        """Decode values: (rows, bytes) uint8 → (rows, elements) fp32."""

    def encode_with_residual(self, values: Tensor) -> Tensor:
        """Encode values, and replace them by their encoding errors."""
        encoded = self.encode(values)
        values -= self.decode(encoded)
        return encoded


class QuantizedCompressor:
    """Compressor that sums by all-to-all and all-gather of what `codec` encodes."""

    collectives_per_sum = 2

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def all_reduce(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        return (self._all_reduce(run, group) for run in slice_bucket(tensors, 1))

    def reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        return (self._reduce_scatter(run, group) for run in slice_bucket(tensors, group.size()))

    def _all_reduce(self, slices: Sequence[BucketSlice], group: dist.ProcessGroup) -> CollectiveSteps[int]:
        ranks, own_rank, width = group.size(), group.rank(), compute_row_elements(slices)
        row = align_up(math.ceil(width / ranks))
        work = slices[0].tensor.values.new_zeros(ranks * row)
        self._fill(work[None, :width], slices)
        rows = work.view(ranks, row)
        total, sent_bytes = yield from self._sum_own_rows(rows, group)
        if self.codec.uses_error_feedback:
            encoded = self.codec.encode_with_residual(total[None])
            rows[own_rank] = total  # its encoding error
            self._store_residual(work[None, :width], slices)
        else:
            encoded = self.codec.encode(total[None])
        del work, rows, total  # while the encoded sum travels
        gathered = yield from all_gather_rows(encoded[0], group)
        sums = self.codec.decode(gathered).view(-1)
        for bucket_slice in slices:
            bucket_slice.tensor.values[0, bucket_slice.start : bucket_slice.stop] = sums[
                bucket_slice.buffer_range
            ]
        return sent_bytes + (ranks - 1) * encoded.numel()

    def _reduce_scatter(
        self, slices: Sequence[BucketSlice], group: dist.ProcessGroup
    ) -> CollectiveSteps[int]:
        rows = slices[0].tensor.values.new_zeros(group.size(), compute_row_elements(slices))
        self._fill(rows, slices)
        total, sent_bytes = yield from self._sum_own_rows(rows, group)
        if self.codec.uses_error_feedback:
            rows[group.rank()] = 0.0  # this rank's own row is not encoded
            self._store_residual(rows, slices)
        for bucket_slice in slices:
            assert bucket_slice.tensor.shard_sum is not None
            bucket_slice.tensor.shard_sum[bucket_slice.start : bucket_slice.stop] = total[
                bucket_slice.buffer_range
            ]
        return sent_bytes

    def _sum_own_rows(self, rows: Tensor, group: dist.ProcessGroup) -> CollectiveSteps[tuple[Tensor, int]]:
        """Return the sum over the ranks of their row for this one, (width,), and the bytes sent.

        With a codec that keeps errors the other ranks' rows become their encoding errors.
        """
        own_rank = group.rank()
        own_row = rows[own_rank].clone()
        encoded = (
            self.codec.encode_with_residual(rows)
            if self.codec.uses_error_feedback
            else self.codec.encode(rows)
        )
        received_rows = yield from all_to_all_rows(encoded, group)
        parts = self.codec.decode(received_rows)
        parts[own_rank] = own_row
        return parts.sum(0), (group.size() - 1) * encoded.shape[1]

    def _fill(self, rows: Tensor, slices: Sequence[BucketSlice]) -> None:
        """Fill the rows with gradients plus their error feedback."""
        for bucket_slice in slices:
            values = bucket_slice.tensor.values[:, bucket_slice.start : bucket_slice.stop]
            target = rows[:, bucket_slice.buffer_range]
            if self.codec.uses_error_feedback:
                torch.add(
                    values,
                    bucket_slice.tensor.residual[:, bucket_slice.start : bucket_slice.stop],
                    out=target,
                )
            else:
                target.copy_(values)

    def _store_residual(self, residual: Tensor, slices: Sequence[BucketSlice]) -> None:
        for bucket_slice in slices:
            bucket_slice.tensor.residual[:, bucket_slice.start : bucket_slice.stop] = residual[
                :, bucket_slice.buffer_range
            ]
