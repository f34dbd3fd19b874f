"""Data order: a shuffle of [0, n) per epoch that is computed, never stored.

A keyed Feistel network permutes the integers of as many bits as n has; values outside [0, n) are
permuted again until they are inside (cycle walking, Black & Rogaway 2002), which keeps it a bijection. Memory
is O(1) in n, so 10**12 samples cost what 10 do. The arithmetic is our own and integer only: the order does
not change with the version of numpy or of Python.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]

_ROUNDS = 8
_MAX_SIZE = 1 << 62


def shuffle_indices(stream_positions: IndexArray, epoch_size: int, *key: int | str) -> IndexArray:
    """Return the sample index for each of `stream_positions`, in an endless stream of reshuffled epochs.

    Args:
        stream_positions: positions in the stream, 0 or more, in any order and number.
        epoch_size: samples of one epoch; positions [e * epoch_size, (e + 1) * epoch_size) visit each once.
        key: key of the order besides the epoch: the seed first, then names that distinguish streams.

    Returns:
        Indices in [0, epoch_size), same shape as `stream_positions`.
    """
    epochs, positions = np.divmod(stream_positions, epoch_size)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        epoch_mask = epochs == epoch
        indices[epoch_mask] = permute_indices(positions[epoch_mask], epoch_size, *key, int(epoch))
    return indices


def permute_indices(positions: IndexArray, size: int, *key: int | str) -> IndexArray:
    """Return the keyed permutation of [0, size) at `positions`.

    Raises:
        ValueError: a position outside [0, size), or a size beyond 2**62.
    """
    if not 1 <= size <= _MAX_SIZE:
        raise ValueError(f"cannot permute {size} positions; from 1 to 2**62 can")
    if positions.size and (positions.min() < 0 or positions.max() >= size):
        raise ValueError(f"positions {positions.min()}..{positions.max()} outside [0, {size})")
    bits = (size - 1).bit_length()
    round_keys = _round_keys(key)
    values = _feistel(positions.astype(np.uint64), bits, round_keys)
    is_outside = values >= size
    while is_outside.any():  # at most half of the domain is outside: two passes on average
        values[is_outside] = _feistel(values[is_outside], bits, round_keys)
        is_outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply an unbalanced Feistel network on `bits` bits: each round keys one half by the other."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for index in range(0, _ROUNDS, 2):
        low = low ^ (_mix(high, round_keys[index]) & low_mask)
        high = high ^ (_mix(low, round_keys[index + 1]) & high_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele et al. 2014): every input bit reaches every output bit."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
