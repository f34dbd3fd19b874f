"""Ring attention (Liu et al. 2023): keys and values travel from rank to rank, queries stay.

Every rank holds a piece from the front of each sequence and its mirror from the back, in that order
(`sequence.context_positions`). Then what a rank can see of another's keys under a causal mask is always half
a block: all its queries see the front piece of an earlier rank, and its back piece sees all of a later one's.
All ranks have the same work in every round, and none of it is masked away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.parallel.block_attention import Sight, attend, attend_backward


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    scale: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention over sequences that the ranks of `group` share; all of them call it.

    Args:
        query: (rows, local sequence, heads, head_width), of an even length, the same on all ranks.
        key: (rows, local sequence, key/value heads, head_width), and so is value, perhaps of another width.
        documents: (rows, ranks × local sequence), all ranks' in the order of ranks; tokens see their own
            document only. None: all earlier tokens.
        scale: of the scores; None: 1 / sqrt(head_width).

    Returns:
        (rows, local sequence, heads, value's width).
    """
    attended: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]  # torch's own
        query, key, value, documents, scale, group
    )
    return attended


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ring = _Ring(group)
        query = query.contiguous()
        queries = query.transpose(1, 2)  # (rows, heads, local sequence, head_width)
        precise = torch.promote_types(query.dtype, torch.float32)
        output = log_sum = queries.new_empty(0)
        travelling = _Pair.of(key, value)
        for step in range(ring.size):
            arriving = ring.pass_on(travelling.data, _FORWARD) if step < ring.size - 1 else None
            block = _block(ring, step, query.shape[1], documents)
            block_output, block_log_sum = attend(
                queries[:, :, block.queries],
                travelling.key[:, :, block.keys],
                travelling.value[:, :, block.keys],
                block.sight,
                scale,
            )
            if step == 0:
                output, log_sum = block_output.to(precise), block_log_sum
            else:
                _merge(output[:, :, block.queries], log_sum[:, :, block.queries], block_output, block_log_sum)
            if arriving is not None:
                travelling = travelling.like(arriving.wait())
        attended = output.transpose(1, 2).to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, attended, log_sum, documents)
        ctx.scale, ctx.group = scale, group
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, log_sum, documents = ctx.saved_tensors
        ring = _Ring(ctx.group)
        precise = torch.promote_types(query.dtype, torch.float32)
        queries, outputs = query.transpose(1, 2), attended.transpose(1, 2)
        gradients = gradient.contiguous().transpose(1, 2)
        of_query = torch.zeros_like(queries, dtype=precise)
        travelling = _Pair.of(key, value)
        # Gradients of a rank's keys and values travel one round behind them, each rank adds its share,
        # and the last one hands them to the rank that they belong to.
        sums = _Pair.of(torch.zeros_like(key, dtype=precise), torch.zeros_like(value, dtype=precise))
        returning: _Arrival | None = None
        for step in range(ring.size):
            arriving = ring.pass_on(travelling.data, _FORWARD) if step < ring.size - 1 else None
            block = _block(ring, step, query.shape[1], documents)
            of_queries, of_keys, of_values = attend_backward(
                gradients[:, :, block.queries],
                queries[:, :, block.queries],
                travelling.key[:, :, block.keys],
                travelling.value[:, :, block.keys],
                outputs[:, :, block.queries],
                log_sum[:, :, block.queries],
                block.sight,
                ctx.scale,
            )
            of_query[:, :, block.queries] += of_queries
            if returning is not None:
                sums = sums.like(returning.wait())
            sums.key[:, :, block.keys] += of_keys
            sums.value[:, :, block.keys] += of_values
            returning = ring.pass_on(sums.data, _BACKWARD)
            if arriving is not None:
                travelling = travelling.like(arriving.wait())
        assert returning is not None
        sums = sums.like(returning.wait())
        of_key, of_value = (part.transpose(1, 2).to(query.dtype) for part in (sums.key, sums.value))
        return of_query.transpose(1, 2).to(query.dtype), of_key, of_value, None, None, None


@dataclass(frozen=True)
class _Block:
    """What a rank computes in one round."""

    queries: slice
    keys: slice
    sight: Sight


def _block(ring: _Ring, step: int, length: int, documents: Tensor | None) -> _Block:
    """Of this rank's queries and the keys that have come `step` ranks far: those that see each other."""
    source = (ring.rank - step) % ring.size
    whole, front, back = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    queries = back if source > ring.rank else whole
    keys = front if source < ring.rank else whole
    pair = None
    if documents is not None:
        by_rank = documents.unflatten(1, (ring.size, length))
        pair = by_rank[:, ring.rank, queries], by_rank[:, source, keys]
    return _Block(queries, keys, Sight(causal=step == 0, documents=pair))


def _merge(output: Tensor, log_sum: Tensor, block_output: Tensor, block_log_sum: Tensor) -> None:
    """Add a block to what others gave, in place.

    Each output is an average over its keys; the weight of the new one is its share of both sums, which is a
    logistic function of the logarithms and cannot overflow.
    """
    share = torch.sigmoid(block_log_sum - log_sum).unsqueeze(-1)
    output.lerp_(block_output.to(output.dtype), share.to(output.dtype))
    log_sum.copy_(torch.logaddexp(log_sum, block_log_sum))


@dataclass(frozen=True)
class _Pair:
    """Keys and values, or their gradients, in one piece of memory: one message."""

    data: Tensor
    key: Tensor
    """(rows, heads, local sequence, width), a view of `data`."""
    value: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Pair:
        """From (rows, local sequence, heads, width) each."""
        return cls._view(torch.cat([key.flatten(), value.flatten()]), key.shape, value.shape)

    def like(self, data: Tensor) -> _Pair:
        """Other data of the same shapes."""
        return self._view(data, self.key.transpose(1, 2).shape, self.value.transpose(1, 2).shape)

    @classmethod
    def _view(cls, data: Tensor, key: torch.Size, value: torch.Size) -> _Pair:
        of_key, of_value = data.split([key.numel(), value.numel()])
        return cls(data, of_key.view(key).transpose(1, 2), of_value.view(value).transpose(1, 2))


_FORWARD, _BACKWARD = 0, 1
"""Tags: keys with values, and their gradients, may be under way at once."""


class _Ring:
    """This rank between its neighbours."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def pass_on(self, tensor: Tensor, tag: int) -> _Arrival:
        """Begin to send `tensor` to the next rank and to receive as much from the one before.

        Point to point under Gloo as under NCCL: both go on while the blocks are computed.
        """
        received = torch.empty_like(tensor)
        following, preceding = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self._group, tag=tag, group_peer=following),
                dist.P2POp(dist.irecv, received, group=self._group, tag=tag, group_peer=preceding),
            ]
        )
        return _Arrival(tensor, received, works)


@dataclass(frozen=True)
class _Arrival:
    """A tensor on its way to this rank, and one on its way from it, which must stay as it is until then."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
