"""Attention of a block of queries over a block of keys, and the log-sum-exp by which blocks are merged.

Backward is given the output and the log-sum-exp over all blocks, and computes this block's share of the
gradients: exp(scores − log-sum-exp) is then the block's part of the whole softmax (Dao et al. 2022, appendix
B.2; Liu et al. 2023, "Ring Attention"). torch's flash operators do it where they can, plain torch elsewhere.
Scores and masks are computed for tiles of queries, so that neither is ever as large as the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wanma.torch_internals.operators import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    flash_attention,
    flash_attention_backward,
)

TILE_ELEMENTS = 1 << 24
"""Largest number of elements of scores or mask in memory at once: 64 MiB in fp32."""


@dataclass(frozen=True)
class BlockVisibility:
    """Visibility of the keys of one block to its queries."""

    causal: bool = False
    """Causal mask: query i sees keys 0 to i. False: it sees all keys."""
    document_ids: tuple[Tensor, Tensor] | None = None
    """Document numbers of the queries and of the keys, (rows, length) each; equal numbers see each other.

    None: the block has no document mask.
    """


def compute_block_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: BlockVisibility, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys of this block alone.

    Args:
        query: (rows, heads, queries, head_dim); of this and the others the last dim is contiguous.
        key: (rows, key/value heads, keys, head_dim), and so is value, perhaps of another width.
        scale: of the scores; None: 1 / sqrt(head_dim).

    Returns:
        output (rows, heads, queries, value's width), and the log-sum-exp of the scores (rows, heads,
        queries) in at least fp32; 0 and −infinity where a query sees none of the keys.
    """
    kernel = _kernel(query, value, visibility)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = kernel.padded_width(query, value), value.shape[-1]
    query, key, value = (_pad_width(x, width) for x in (query, key, value))
    outputs, log_sums = [], []
    for tile in _tiles(query, key, visibility, kernel):
        output, log_sum = kernel.forward(_select_inputs(query, key, value, tile, scale))
        outputs.append(output)
        log_sums.append(log_sum)
    return _concatenate_queries(outputs)[..., :value_width], _concatenate_queries(log_sums)


def compute_block_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    visibility: BlockVisibility,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this block's share of the gradients of query, key and value.

    Args:
        gradient: of `output`.
        output: over all blocks, in the dtype of the query.
        log_sum_exp: over all blocks.
    """
    kernel = _kernel(query, value, visibility)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width, widths = kernel.padded_width(query, value), (query.shape[-1], value.shape[-1])
    query, key, value, output, gradient = (
        _pad_width(x, width) for x in (query, key, value, output, gradient)
    )
    query_gradients: list[Tensor] = []
    key_gradient = value_gradient = None
    for tile in _tiles(query, key, visibility, kernel):
        share = kernel.backward(
            _select_inputs(query, key, value, tile, scale),
            _ForwardResult(output[:, :, tile.queries], log_sum_exp[:, :, tile.queries]),
            gradient[:, :, tile.queries],
        )
        query_gradients.append(share[0])
        if tile.covers_all_queries:
            key_gradient, value_gradient = share[1:]
            break
        if key_gradient is None or value_gradient is None:
            compute_dtype = torch.promote_types(query.dtype, torch.float32)
            key_gradient = torch.zeros_like(key, dtype=compute_dtype)
            value_gradient = torch.zeros_like(value, dtype=compute_dtype)
        key_gradient[:, :, tile.keys] += share[1]
        value_gradient[:, :, tile.keys] += share[2]
    assert key_gradient is not None
    assert value_gradient is not None
    return (
        _concatenate_queries(query_gradients)[..., : widths[0]],
        key_gradient[..., : widths[0]],
        value_gradient[..., : widths[1]],
    )


@dataclass(frozen=True)
class _Tile:
    """Queries of a block and the keys that they can see."""

    queries: slice
    keys: slice
    covers_all_queries: bool
    causal: bool
    """Causal mask without a mask tensor: query i sees keys 0 to i."""
    mask: Tensor | None
    """Boolean mask (rows or 1, 1, queries, keys), true where a query sees a key."""


@dataclass(frozen=True)
class _KernelInputs:
    """Queries of a tile and the keys and values that they can see, and how their scores are made."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    """Causal mask without a mask tensor, as in `_Tile`."""
    mask: Tensor | None
    """Boolean mask, as in `_Tile`."""
    scale: float
    """Scale of the scores."""


class _ForwardResult(NamedTuple):
    """Result of forward for the queries of a tile; backward gets that over all blocks."""

    output: Tensor
    log_sum_exp: Tensor


@dataclass(frozen=True)
class _Kernel:
    forward: Callable[[_KernelInputs], _ForwardResult]
    backward: Callable[[_KernelInputs, _ForwardResult, Tensor], tuple[Tensor, Tensor, Tensor]]
    """Gradients of query, key and value, from that of the output, which is last."""
    is_flash: bool
    """Flash kernel: scores are never in memory, and all tensors have one width."""
    width_multiple: int = 1
    """Divisor of the width of every tensor, in elements."""

    def padded_width(self, query: Tensor, value: Tensor) -> int | None:
        """Return the width to which zeros extend all tensors; None leaves them. Zeros change no score."""
        widest = max(query.shape[-1], value.shape[-1])
        return -(-widest // self.width_multiple) * self.width_multiple if self.is_flash else None


def _select_inputs(query: Tensor, key: Tensor, value: Tensor, tile: _Tile, scale: float) -> _KernelInputs:
    """Return the part of a block's tensors that one tile needs."""
    return _KernelInputs(
        query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys], tile.causal, tile.mask, scale
    )


def _kernel(query: Tensor, value: Tensor, visibility: BlockVisibility) -> _Kernel:
    """Return the fastest kernel that can compute these tensors."""
    if query.device.type == "cpu":
        return _FLASH_ON_CPU
    if (
        query.device.type == "cuda"
        and visibility.document_ids is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    ):
        return _FLASH_ON_CUDA
    return _PLAIN


def _pad_width(x: Tensor, width: int | None) -> Tensor:
    return x if width is None or x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _tiles(query: Tensor, key: Tensor, visibility: BlockVisibility, kernel: _Kernel) -> Iterator[_Tile]:
    rows, heads, queries, _ = query.shape
    keys = key.shape[2]
    if visibility.document_ids is None and kernel.is_flash:
        yield _Tile(slice(0, queries), slice(0, keys), True, visibility.causal, None)
        return
    of_one_query = rows * keys * (1 if kernel.is_flash else heads)
    size = min(max(TILE_ELEMENTS // of_one_query, 1), queries)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        visible_keys = min(stop, keys) if visibility.causal else keys
        mask = _mask(visibility, start, stop, visible_keys, query.device)
        yield _Tile(slice(start, stop), slice(0, visible_keys), size == queries, False, mask)


def _mask(
    visibility: BlockVisibility, start: int, stop: int, visible_keys: int, device: torch.device
) -> Tensor | None:
    mask = None
    if visibility.causal:
        positions = torch.arange(stop, device=device)
        mask = (positions[start:, None] >= positions[:visible_keys]).view(1, 1, stop - start, visible_keys)
    if visibility.document_ids is not None:
        query_ids, key_ids = visibility.document_ids
        is_same_document = (query_ids[:, start:stop, None] == key_ids[:, None, :visible_keys]).unsqueeze(1)
        mask = is_same_document if mask is None else is_same_document.logical_and_(mask)
    return mask


def _concatenate_queries(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


# ---------------------------------------------------------------- torch's flash operator on CPU


def _cpu_forward(inputs: _KernelInputs) -> _ForwardResult:
    output, log_sum = cpu_flash_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        0.0,
        inputs.causal,
        attn_mask=_additive(inputs.mask, inputs.query.dtype),
        scale=inputs.scale,
    )
    if inputs.mask is not None:
        # Its output is zero where a query sees no key, but its log-sum-exp is zero there too.
        log_sum = log_sum.masked_fill(~inputs.mask.any(dim=-1), -torch.inf)
    return _ForwardResult(output, log_sum)


def _cpu_backward(
    inputs: _KernelInputs, result: _ForwardResult, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = cpu_flash_attention_backward(
        gradient,
        inputs.query,
        inputs.key,
        inputs.value,
        *result,
        0.0,
        inputs.causal,
        attn_mask=_additive(inputs.mask, inputs.query.dtype),
        scale=inputs.scale,
    )
    return gradients


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


_FLASH_ON_CPU = _Kernel(_cpu_forward, _cpu_backward, is_flash=True)

# ---------------------------------------------------------------- torch's flash operator on CUDA


def _cuda_forward(inputs: _KernelInputs) -> _ForwardResult:
    output, log_sum, *_ = flash_attention(
        inputs.query, inputs.key, inputs.value, 0.0, inputs.causal, False, scale=inputs.scale
    )
    return _ForwardResult(output, log_sum)


def _cuda_backward(
    inputs: _KernelInputs, result: _ForwardResult, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key = inputs.query, inputs.key
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = flash_attention_backward(
        gradient,
        query,
        key,
        inputs.value,
        result.output,
        result.log_sum_exp.contiguous(),  # it reads no strides
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        inputs.causal,
        no_dropout_state,
        no_dropout_state[0],
        scale=inputs.scale,
    )
    return gradients


_FLASH_ON_CUDA = _Kernel(_cuda_forward, _cuda_backward, is_flash=True, width_multiple=8)

# ---------------------------------------------------------------- plain torch, in at least fp32


def _plain_forward(inputs: _KernelInputs) -> _ForwardResult:
    query = inputs.query
    scores = _scores(inputs)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    # −infinity less −infinity is no number; any finite sum gives the zeros that an empty row should have.
    weights = scores.sub_(log_sum.masked_fill(log_sum == -torch.inf, 0.0)).exp_()
    output = weights @ inputs.value.to(weights.dtype)
    return _ForwardResult(_unfold(output, query).to(query.dtype), _unfold(log_sum, query).squeeze(-1))


def _plain_backward(
    inputs: _KernelInputs, result: _ForwardResult, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key = inputs.query, inputs.key
    scores = _scores(inputs)
    compute_dtype, heads = scores.dtype, key.shape[1]
    weights = scores.sub_(_fold(result.log_sum_exp.unsqueeze(-1), heads)).exp_()
    output_gradient = _fold(gradient.to(compute_dtype), heads)
    value_gradient = weights.transpose(-1, -2) @ output_gradient
    row_sums = (output_gradient * _fold(result.output.to(compute_dtype), heads)).sum(dim=-1, keepdim=True)
    score_gradient = output_gradient @ inputs.value.to(compute_dtype).transpose(-1, -2)
    score_gradient = score_gradient.sub_(row_sums).mul_(weights).mul_(inputs.scale)
    query_gradient = score_gradient @ key.to(compute_dtype)
    key_gradient = score_gradient.transpose(-1, -2) @ _fold(query.to(compute_dtype), heads)
    return _unfold(query_gradient, query), key_gradient, value_gradient


def _scores(inputs: _KernelInputs) -> Tensor:
    """Return masked scores (rows, key/value heads, heads of each × queries, keys), in at least fp32."""
    query, key = inputs.query, inputs.key
    heads, queries = key.shape[1], query.shape[2]
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (_fold(query.to(compute_dtype), heads) @ key.to(compute_dtype).transpose(-1, -2)).mul_(
        inputs.scale
    )
    if inputs.mask is not None:
        scores_by_head = scores.unflatten(2, (-1, queries))
        scores_by_head.masked_fill_(~inputs.mask.unsqueeze(2), -torch.inf)
    return scores


def _fold(x: Tensor, heads: int) -> Tensor:
    """Reshape (rows, all heads, queries, width) to (rows, heads, heads of each × queries, width)."""
    result: Tensor = x.unflatten(1, (heads, -1)).flatten(2, 3)
    return result


def _unfold(x: Tensor, query: Tensor) -> Tensor:
    """Undo `_fold`: reshape to the heads and queries of `query`."""
    result: Tensor = x.unflatten(2, (-1, query.shape[2])).flatten(1, 2)
    return result


_PLAIN = _Kernel(_plain_forward, _plain_backward, is_flash=False)
