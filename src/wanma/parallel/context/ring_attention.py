"""Ring attention (Liu et al. 2023): keys and values travel from rank to rank, queries stay.

Every rank holds a piece from the front of each sequence and its mirror from the back, in that order
(`sequence_shards.context_rank_positions`). Then what a rank can see of another's keys under a causal mask is
always half a block: all its queries see the front piece of an earlier rank, and its back piece sees all of a
later one's. All ranks have the same work in every round, and none of it is masked away.

To torch the whole ring is one operator: selective recompute can keep its result, torch.compile leaves it as
it is, and a dry run passes over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.timing.communication_timer import AsyncTransfer
from wanma.parallel.context.block_attention import (
    BlockVisibility,
    compute_block_attention,
    compute_block_attention_backward,
)
from wanma.torch_internals.distributed import resolve_process_group


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor | None,
    scale: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute causal attention over sequences that the ranks of `group` share; every rank calls it.

    Args:
        query: (rows, local sequence, heads, head_dim), of an even length, the same on all ranks.
        key: (rows, local sequence, key/value heads, head_dim), and so is value, perhaps of another width.
        document_ids: (rows, ranks × local sequence), all ranks' in the order of ranks; tokens see their own
            document only. None: all earlier tokens.
        scale: of the scores; None: 1 / sqrt(head_dim).

    Returns:
        (rows, local sequence, heads, value's width).
    """
    attended: Tensor = _ring_attention(query.contiguous(), key, value, document_ids, scale, group.group_name)[
        0
    ]
    return attended


def _forward(
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, scale: float | None, group: str
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of all scores (rows, heads, local sequence)."""
    ring = _Ring(group)
    queries = query.transpose(1, 2)  # (rows, heads, local sequence, head_dim)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    output = log_sum = queries.new_empty(0)
    key_value = _KeyValueBuffer.of(key, value)
    for step in range(ring.size):
        receive = ring.send_to_next(key_value.data, _KEY_VALUE_TAG) if step < ring.size - 1 else None
        block = _visible_block(ring, step, query.shape[1], document_ids)
        block_output, block_log_sum = compute_block_attention(
            queries[:, :, block.queries],
            key_value.key[:, :, block.keys],
            key_value.value[:, :, block.keys],
            block.visibility,
            scale,
        )
        if step == 0:
            output, log_sum = block_output.to(compute_dtype), block_log_sum.contiguous()
        else:
            _merge(output[:, :, block.queries], log_sum[:, :, block.queries], block_output, block_log_sum)
        if receive is not None:
            key_value = key_value.like(receive.wait())
    return output.transpose(1, 2).to(query.dtype).contiguous(), log_sum


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    log_sum_exp: Tensor,
    document_ids: Tensor | None,
    scale: float | None,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the gradient of the output."""
    ring = _Ring(group)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    queries, outputs = query.transpose(1, 2), attended.transpose(1, 2)
    gradients = gradient.contiguous().transpose(1, 2)
    query_gradient = torch.zeros_like(queries, dtype=compute_dtype)
    key_value = _KeyValueBuffer.of(key, value)
    # Gradients of a rank's keys and values travel one round behind them: each rank adds its share, and the
    # last one hands them to the rank that they belong to.
    sums = _KeyValueBuffer.of(
        torch.zeros_like(key, dtype=compute_dtype), torch.zeros_like(value, dtype=compute_dtype)
    )
    gradient_receive: _PendingReceive | None = None
    for step in range(ring.size):
        receive = ring.send_to_next(key_value.data, _KEY_VALUE_TAG) if step < ring.size - 1 else None
        block = _visible_block(ring, step, query.shape[1], document_ids)
        query_share, key_share, value_share = compute_block_attention_backward(
            gradients[:, :, block.queries],
            queries[:, :, block.queries],
            key_value.key[:, :, block.keys],
            key_value.value[:, :, block.keys],
            outputs[:, :, block.queries],
            log_sum_exp[:, :, block.queries],
            block.visibility,
            scale,
        )
        query_gradient[:, :, block.queries] += query_share
        if gradient_receive is not None:
            sums = sums.like(gradient_receive.wait())
        sums.key[:, :, block.keys] += key_share
        sums.value[:, :, block.keys] += value_share
        gradient_receive = ring.send_to_next(sums.data, _GRADIENT_TAG)
        if receive is not None:
            key_value = key_value.like(receive.wait())
    assert gradient_receive is not None
    sums = sums.like(gradient_receive.wait())
    # Copies: an operator's results may not share memory.
    key_gradient, value_gradient = (
        part.transpose(1, 2).to(query.dtype, copy=True) for part in (sums.key, sums.value)
    )
    return query_gradient.transpose(1, 2).to(query.dtype).contiguous(), key_gradient, value_gradient


@dataclass(frozen=True)
class _Block:
    """Attention block that a rank computes in one round."""

    queries: slice
    keys: slice
    visibility: BlockVisibility


def _visible_block(ring: _Ring, step: int, length: int, document_ids: Tensor | None) -> _Block:
    """Return the part of this rank's queries and of the keys received in round `step` that see each other."""
    source = (ring.rank - step) % ring.size
    full_range, first_half, second_half = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    queries = second_half if source > ring.rank else full_range
    keys = first_half if source < ring.rank else full_range
    pair = None
    if document_ids is not None:
        ids_by_rank = document_ids.unflatten(1, (ring.size, length))
        pair = ids_by_rank[:, ring.rank, queries], ids_by_rank[:, source, keys]
    return _Block(queries, keys, BlockVisibility(causal=step == 0, document_ids=pair))


def _merge(output: Tensor, log_sum_exp: Tensor, block_output: Tensor, block_log_sum: Tensor) -> None:
    """Merge the output of a block into the output of earlier blocks, in place.

    Each output is an average over its keys; the weight of the new one is its share of both sums, which is a
    logistic function of the logarithms and cannot overflow.
    """
    share = torch.sigmoid(block_log_sum - log_sum_exp).unsqueeze(-1)
    output.lerp_(block_output.to(output.dtype), share.to(output.dtype))
    log_sum_exp.copy_(torch.logaddexp(log_sum_exp, block_log_sum))


@dataclass(frozen=True)
class _KeyValueBuffer:
    """Keys and values, or their gradients, in one piece of memory: one message."""

    data: Tensor
    key: Tensor
    """View of `data`, (rows, heads, local sequence, width)."""
    value: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _KeyValueBuffer:
        """Return a pair made of a key and a value, (rows, local sequence, heads, width) each."""
        return cls._view(torch.cat([key.flatten(), value.flatten()]), key.shape, value.shape)

    def like(self, data: Tensor) -> _KeyValueBuffer:
        """Return a pair of the same shapes over other data."""
        return self._view(data, self.key.transpose(1, 2).shape, self.value.transpose(1, 2).shape)

    @classmethod
    def _view(cls, data: Tensor, key: torch.Size, value: torch.Size) -> _KeyValueBuffer:
        key_data, value_data = data.split([key.numel(), value.numel()])
        return cls(data, key_data.view(key).transpose(1, 2), value_data.view(value).transpose(1, 2))


_KEY_VALUE_TAG, _GRADIENT_TAG = 0, 1
"""Message tags: keys with values, and their gradients, may be in transit at once."""


class _Ring:
    """Ring of ranks as this rank sees it, between its two neighbours."""

    def __init__(self, group: str) -> None:
        self._group = resolve_process_group(group)
        self.rank, self.size = self._group.rank(), self._group.size()

    def send_to_next(self, tensor: Tensor, tag: int) -> _PendingReceive:
        """Begin to send `tensor` to the next rank and to receive as much from the one before.

        Point to point under Gloo as under NCCL: both go on while the blocks are computed.
        """
        receive_buffer, transfer = torch.empty_like(tensor), AsyncTransfer("context")
        next_rank, previous_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self._group, tag=tag, group_peer=next_rank),
                dist.P2POp(dist.irecv, receive_buffer, group=self._group, tag=tag, group_peer=previous_rank),
            ]
        )
        return _PendingReceive(tensor, receive_buffer, works, transfer)


@dataclass(frozen=True)
class _PendingReceive:
    """Tensor that this rank receives, and the one that it sends, which must not change until then."""

    send_buffer: Tensor
    receive_buffer: Tensor
    works: list[dist.Work]
    transfer: AsyncTransfer

    def wait(self) -> Tensor:
        self.transfer.wait(self._wait)
        return self.receive_buffer

    def _wait(self) -> None:
        for work in self.works:
            work.wait()


# ---------------------------------------------------------------- as operators of torch

_ring_attention = torch.library.custom_op(
    "wanma::ring_attention",
    _forward,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? document_ids, float? scale, str group) "
    "-> (Tensor, Tensor)",
)
_ring_attention_backward = torch.library.custom_op(
    "wanma::ring_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor attended, Tensor log_sum_exp, "
    "Tensor? document_ids, float? scale, str group) -> (Tensor, Tensor, Tensor)",
)


@_ring_attention.register_fake
def _shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    rows, length, heads, _width = query.shape
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    attended = query.new_empty(rows, length, heads, value.shape[-1])
    return attended, query.new_empty(rows, heads, length, dtype=compute_dtype)


@_ring_attention_backward.register_fake
def _backward_shapes(
    gradient: Tensor,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


RING_ATTENTION_OPERATOR: Any = torch.ops.wanma.ring_attention.default
"""Operator of the forward pass, as torch's dispatch modes see it."""


def ring_message_bytes(operator: Any, arguments: tuple[Any, ...]) -> tuple[str, list[int]]:
    """Return the messages that one call of `operator` sends to the next rank, and alike receives.

    Args:
        operator: operator as a dispatch mode sees it.

    Returns:
        the name of the group, and the bytes of each message; none for an operator of another file.
    """
    if operator is RING_ATTENTION_OPERATOR:
        _, key, value, _, _, group = arguments
        gradient_bytes = 0
    elif operator is torch.ops.wanma.ring_attention_backward.default:
        _, _, key, value, *_, group = arguments
        gradient_bytes = (key.numel() + value.numel()) * max(key.element_size(), 4)
    else:
        return "", []
    ranks = resolve_process_group(group).size()
    key_value_bytes = (key.numel() + value.numel()) * key.element_size()
    return group, [key_value_bytes] * (ranks - 1) + ([gradient_bytes] * ranks if gradient_bytes else [])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, scale, group = inputs
    ctx.save_for_backward(query, key, value, *output, documents)
    ctx.scale, ctx.group = scale, group


def _autograd_backward(ctx: Any, gradient: Tensor, _of_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _ring_attention_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.group)
    return *gradients, None, None, None


_ring_attention.register_autograd(_autograd_backward, setup_context=_setup_context)
