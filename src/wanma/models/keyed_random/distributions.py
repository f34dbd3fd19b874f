"""Random numbers that are pure functions of keys: int64 hashes, and distributions made from them."""

from __future__ import annotations

import torch
from torch import Tensor

PROBABILITY_LEVELS = 1 << 16
"""Number of values of a 16-bit draw; one hash holds four draws."""

# SplitMix64 (Steele et al. 2014): a counter times the golden ratio, then a finalizer of full avalanche.
# Integer products wrap alike on every device; torch's >> keeps the sign, so the upper bits are masked.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_MULTIPLIER = 0x94D049BB133111EB - (1 << 64)

_MAX_INT64 = (1 << 63) - 1
_RANDOM_BITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
"""Random bits of a uniform number that is exact in its dtype; 24 for fp32."""


def hash_int64(x: Tensor) -> Tensor:
    """Hash int64 to int64, element by element."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST_MULTIPLIER
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND_MULTIPLIER
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def hash_scalar(x: int) -> int:
    """Return `hash_int64` of one Python integer, as a signed 64-bit one."""
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ (x >> 30)) * (_FIRST_MULTIPLIER & mask) & mask
    x = (x ^ (x >> 27)) * (_SECOND_MULTIPLIER & mask) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def draw_uniform_int16(row_keys: Tensor, positions: Tensor | None, shape: torch.Size) -> Tensor:
    """Draw uniform int16 for every element of `shape` = (rows, columns, ...) or (rows, features).

    Args:
        row_keys: (rows,) int64.
        positions: (columns,) int64, indices of the columns if dim 1 holds only a part of them; None: all.
        shape: of the result.
    """
    columns, features = (shape[1], shape[2:].numel()) if len(shape) > 2 else (1, shape[1:].numel())
    if positions is None or len(shape) <= 2:
        offsets = _key_offsets(columns, row_keys.device)
    else:
        offsets = positions * GOLDEN_GAMMA
    keys = hash_int64(row_keys.unsqueeze(1) + offsets)  # (rows, columns)
    quads = _key_offsets(-(-features // 4), keys.device)
    hashes = hash_int64(keys.unsqueeze(2) + quads)  # (rows, columns, rest / 4)
    return hashes.view(torch.int16)[..., :features].reshape(shape)


def element_keys(row_keys: Tensor, count: int) -> Tensor:
    """Return keys (rows, count) int64 for `count` numbers of each row."""
    return hash_int64(row_keys.unsqueeze(1) + _key_offsets(count, row_keys.device))


def _key_offsets(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... times GOLDEN_GAMMA, (count,) int64 that wraps around.

    The mask changes no number. Without it a compiler takes the product for an index of its loop: that of
    torch 2.15 computes it as a signed C++ integer, whose overflow is undefined, and the loop writes beyond
    its end.
    """
    return (torch.arange(count, device=device) & _MAX_INT64) * GOLDEN_GAMMA


def draw_uniform(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw uniform numbers in [0, 1) of dtype `dtype`, none of which rounds up to 1."""
    bits = _RANDOM_BITS.get(dtype, 24)
    return (((keys >> (64 - bits)) & ((1 << bits) - 1)).to(_compute_dtype(dtype)) * 2.0**-bits).to(dtype)


def draw_normal(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw normal numbers of mean 0 and deviation 1 (Box and Muller 1958)."""
    compute_dtype = _compute_dtype(dtype)
    radius = (-2 * torch.log1p(-draw_uniform(keys, compute_dtype))).sqrt()
    return (radius * torch.cos(2 * torch.pi * draw_uniform(hash_int64(keys + 1), compute_dtype))).to(dtype)


def draw_exponential(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw exponential numbers of rate 1, never 0: their logarithm is finite, as with torch's own."""
    compute_dtype = _compute_dtype(dtype)
    draws = -torch.log1p(-draw_uniform(keys, compute_dtype))
    return draws.clamp_(min=torch.finfo(compute_dtype).eps / 2).to(dtype)


def draw_integers(keys: Tensor, low: int, high: int) -> Tensor:
    """Draw integers in [low, high), int64."""
    return low + ((keys >> 1) & ((1 << 62) - 1)) % (high - low)


def draw_categorical(keys: Tensor, weights: Tensor, count: int, replacement: bool) -> Tensor:
    """Draw indices in proportion to `weights`: (rows, classes) to (rows, count) int64.

    Args:
        keys: (rows, count) with replacement, else (rows, classes).
        weights: (rows, classes), not negative.
        count: indices per row.
        replacement: if True, an index may be drawn again.
    """
    weights = weights.to(_compute_dtype(weights.dtype))
    if not replacement:
        # The first arrivals of an exponential race are a sample without replacement.
        return (weights / draw_exponential(keys, weights.dtype)).topk(count).indices
    cumulative = weights.cumsum(-1)
    indices = torch.searchsorted(
        cumulative, draw_uniform(keys, weights.dtype) * cumulative[..., -1:], right=True
    )
    return indices.clamp_(max=weights.shape[-1] - 1)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
