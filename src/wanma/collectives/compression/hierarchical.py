"""Hierarchical compressed sums: uncompressed within each node, compressed between nodes.

Each tensor, or part of one, has an owner on every node. The owner sums it over the node, together with every
rank's error feedback. The owners of the same part on all nodes sum it by the compressor, as if each of them
were a node. They keep the error feedback; and each hands its sum to the others of its node.

The links between nodes thus carry what one rank of each would send, however many there are, and compression
loses only what it loses of sums over nodes. The error feedback over all ranks sums up to the same as without
hierarchy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.balanced_owners import assign_balanced_owners
from wanma.collectives.compression.bucket_tensors import (
    BucketSlice,
    BucketTensor,
    Compressor,
    ErrorFeedback,
    align_up,
    compute_row_elements,
    slice_bucket,
)
from wanma.collectives.compression.overlap import CollectiveSteps
from wanma.collectives.compression.uncompressed import (
    FP32_BYTES,
    IdentityCompressor,
    compute_all_reduce_bytes,
)
from wanma.torch_internals.distributed import all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class NodeGroups:
    """Process groups of this rank on two levels: within its node, and of equal ranks between nodes."""

    intra_node: dist.ProcessGroup
    inter_node: dist.ProcessGroup


@dataclass(frozen=True)
class OwnedSlice(BucketSlice):
    """Slice that one owner on each node sums; its offset is within the elements that the owner sums."""

    owner: int


class HierarchicalCompressor:
    """Hierarchical sum: `compressor` is the compressor between the nodes.

    Args:
        compressor: compressor between the nodes.
        node_groups: process groups within and between the nodes.
        splits_tensors: True if `compressor` may get a part of a tensor; else each tensor has one owner on a
            node.
    """

    def __init__(self, compressor: Compressor, node_groups: NodeGroups, *, splits_tensors: bool) -> None:
        # A single node has no slow links, so it compresses nothing.
        self._compressor = compressor if node_groups.inter_node.size() > 1 else IdentityCompressor()
        self._node_groups, self._splits_tensors = node_groups, splits_tensors

    def all_reduce(self, tensors: Sequence[BucketTensor]) -> Iterator[CollectiveSteps[int]]:
        """Return the sums over all ranks, as a compressor does; their bytes are those sent to other nodes."""
        if not self._splits_tensors:
            yield self._sum_in_place(tensors)
            return
        for run in slice_bucket(tensors, 1):
            yield self._sum_slices(split_among_ranks(run, self._node_groups.intra_node.size()))

    def compute_uncompressed_bytes(self, tensors: Sequence[BucketTensor]) -> int:
        """Return the bytes that this rank would send to other nodes for the same parts, uncompressed."""
        ranks, own_rank = self._node_groups.intra_node.size(), self._node_groups.intra_node.rank()
        if self._splits_tensors:
            parts = [
                part
                for run in slice_bucket(tensors, 1)
                for part in split_among_ranks(run, ranks)
                if part.owner == own_rank
            ]
            own_elements = sum(part.stop - part.start for part in parts)
        else:
            owners = assign_balanced_owners([piece.length for piece in tensors], ranks)
            own_elements = sum(
                piece.length for piece, owner in zip(tensors, owners, strict=True) if owner == own_rank
            )
        return compute_all_reduce_bytes(own_elements * FP32_BYTES, self._node_groups.inter_node.size())

    def _sum_between_nodes(self, tensors: list[BucketTensor]) -> CollectiveSteps[int]:
        """Sum pieces between nodes; there are no more than the compressor takes at once."""
        if not tensors:
            # This node's other ranks wait for their peers on the other nodes meanwhile; they communicate
            # within the node in the order in which sums continue.
            for _ in range(self._compressor.collectives_per_sum):
                yield None
            return 0
        (steps,) = self._compressor.all_reduce(tensors, self._node_groups.inter_node)
        sent_bytes = yield from steps
        return sent_bytes

    def _sum_slices(self, slices: Sequence[OwnedSlice]) -> CollectiveSteps[int]:
        """Sum parts over all ranks: each owner's parts are adjacent in one row of a buffer."""
        intra_node, own_rank = self._node_groups.intra_node, self._node_groups.intra_node.rank()
        row = max(part.offset + align_up(part.stop - part.start) for part in slices)
        work = slices[0].tensor.values.new_zeros(intra_node.size(), row)
        for part in slices:
            target = work[part.owner, part.buffer_range]
            target.copy_(part.tensor.values[0, part.start : part.stop])
            if _has_residual(part.tensor):
                error = part.tensor.residual[0, part.start : part.stop]
                target += error
                error.zero_()
        owned_values = work.new_empty(row)
        reduce_scatter_single(owned_values, work.view(-1), group=intra_node)
        del work, target  # while the compressed values travel
        own_slices = [part for part in slices if part.owner == own_rank]
        pieces = [_owned_tensor(part, owned_values) for part in own_slices]
        sent_bytes = yield from self._sum_between_nodes(pieces)
        for part, piece in zip(own_slices, pieces, strict=True):
            if _has_residual(part.tensor):
                part.tensor.residual[0, part.start : part.stop] = piece.residual[0]
        sums = owned_values.new_empty(intra_node.size(), row)
        all_gather_single(sums.view(-1), owned_values, group=intra_node)
        for part in slices:
            part.tensor.values[0, part.start : part.stop] = sums[part.owner, part.buffer_range]
        return sent_bytes

    def _sum_in_place(self, tensors: Sequence[BucketTensor]) -> CollectiveSteps[int]:
        """Sum whole tensors over all ranks, in their own memory."""
        intra_node, own_rank = self._node_groups.intra_node, self._node_groups.intra_node.rank()
        owners = assign_balanced_owners([piece.length for piece in tensors], intra_node.size())
        own_pieces = []
        for piece, owner in zip(tensors, owners, strict=True):
            if _has_residual(piece):
                piece.values.add_(piece.residual)
                piece.residual.zero_()
            dist.all_reduce(piece.values, group=intra_node)
            if owner == own_rank:
                own_pieces.append(piece)
            else:
                piece.values.zero_()  # the next all-reduce distributes the owner's values
                if piece.error_feedback is not None and piece.error_feedback.power_sgd_q is not None:
                    piece.power_sgd_q.zero_()
        sent_bytes = yield from self._sum_between_nodes(own_pieces)
        for piece in tensors:
            dist.all_reduce(piece.values, group=intra_node)
            if piece.error_feedback is not None and piece.error_feedback.power_sgd_q is not None:
                dist.all_reduce(piece.power_sgd_q, group=intra_node)
        return sent_bytes


def split_among_ranks(slices: Sequence[BucketSlice], ranks: int) -> list[OwnedSlice]:
    """Cut a run into as many equal rows as there are ranks, and return its parts with their owners."""
    row = align_up(math.ceil(compute_row_elements(slices) / ranks))
    parts = []
    for bucket_slice in slices:
        start = bucket_slice.start
        while start < bucket_slice.stop:
            owner, offset = divmod(bucket_slice.offset + start - bucket_slice.start, row)
            stop = min(bucket_slice.stop, start + row - offset)
            parts.append(OwnedSlice(bucket_slice.tensor, start, stop, offset, owner))
            start = stop
    return parts


def _owned_tensor(owned_slice: OwnedSlice, owned_values: Tensor) -> BucketTensor:
    """Return a part as a piece for the compressor between nodes; the values include the error feedback."""
    values = owned_values[None, owned_slice.buffer_range]
    memory = ErrorFeedback(torch.zeros_like(values)) if _has_residual(owned_slice.tensor) else None
    return BucketTensor(values, None, owned_slice.tensor.matrix_columns, memory)


def _has_residual(tensor: BucketTensor) -> bool:
    return tensor.error_feedback is not None and tensor.error_feedback.residual is not None
