"""Data order: a shuffle of [0, n) per epoch that is computed, never stored.

A keyed Feistel network permutes the integers of as many bits as n has; values outside [0, n) are
permuted again until they are inside (cycle walking, Black & Rogaway 2002), which keeps it a bijection. Memory
is O(1) in n, so 10**12 samples cost what 10 do. The arithmetic is our own and integer only: the order does
not change with the version of numpy or of Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

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
    return map_epochs(
        stream_positions,
        epoch_size,
        lambda positions, epoch: permute_indices(positions, epoch_size, *key, epoch),
    )


def map_epochs(
    stream_positions: IndexArray, epoch_size: int, order: Callable[[IndexArray, int], IndexArray]
) -> IndexArray:
    """Return the sample index for each of `stream_positions`, where `order` is the order of one epoch.

    Args:
        stream_positions: positions in the endless stream of epochs.
        order: function (positions in [0, epoch_size), epoch) -> sample indices.
    """
    epochs, positions = np.divmod(stream_positions, epoch_size)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        epoch_mask = epochs == epoch
        indices[epoch_mask] = order(positions[epoch_mask], int(epoch))
    return indices


def permute_indices(positions: IndexArray, size: int, *key: int | str) -> IndexArray:
    """Return the keyed permutation of [0, size) at `positions`.

    Raises:
        ValueError: a position outside [0, size), or a size beyond 2**62.
    """
    _check_positions(positions, size)
    return _walk_cycle(positions, size, _round_keys(key))


def invert_permutation(indices: IndexArray, size: int, *key: int | str) -> IndexArray:
    """Return the positions at which `permute_indices` with the same size and key gives `indices`.

    Raises:
        ValueError: as `permute_indices`.
    """
    _check_positions(indices, size)
    return _walk_cycle(indices, size, _round_keys(key), range(_ROUNDS - 1, -1, -1))


def permute_in_groups(
    positions: IndexArray, groups: IndexArray, sizes: IndexArray, *key: int | str
) -> IndexArray:
    """Return a keyed permutation of [0, size) at `positions`, another one for each group.

    Args:
        positions: position of each element in its group.
        groups: number of each element's group, 0 or more.
        sizes: size of each element's group; few different ones, since each is computed by itself.
        key: key of all groups together.

    Returns:
        Positions in [0, size), same shape as `positions`.

    Raises:
        ValueError: a position outside its group.
    """
    # The keys of group g are element g of the splitmix64 streams that the round keys of `key` start.
    round_keys = mix_bits(groups.astype(np.uint64)[None, :], _round_keys(key)[:, None])
    permuted = np.empty_like(positions)
    for size in np.unique(sizes):
        mask = sizes == size
        _check_positions(positions[mask], int(size))
        permuted[mask] = _walk_cycle(positions[mask], int(size), round_keys[:, mask])
    return permuted


def _check_positions(positions: IndexArray, size: int) -> None:
    if not 1 <= size <= _MAX_SIZE:
        raise ValueError(f"cannot permute {size} positions; from 1 to 2**62 can")
    if positions.size and (positions.min() < 0 or positions.max() >= size):
        raise ValueError(f"positions {positions.min()}..{positions.max()} outside [0, {size})")


def _walk_cycle(
    positions: IndexArray, size: int, round_keys: NDArray[np.uint64], rounds: Sequence[int] = range(_ROUNDS)
) -> IndexArray:
    """Apply the Feistel network until every value is inside [0, size).

    Args:
        positions: integers in [0, size).
        round_keys: keys of the rounds, (rounds,), or (rounds, positions) with keys of their own.
        rounds: order of the rounds; reversed, the inverse walks the same cycles backward.
    """
    bits = (size - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, round_keys, rounds)
    is_outside = values >= size
    while is_outside.any():  # at most half of the domain is outside: two passes on average
        keys = round_keys if round_keys.ndim == 1 else round_keys[:, is_outside]
        values[is_outside] = _feistel(values[is_outside], bits, keys, rounds)
        is_outside = values >= size
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64], rounds: Sequence[int]
) -> NDArray[np.uint64]:
    """Apply an unbalanced Feistel network on `bits` bits: each round keys one half by the other."""
    low_bits = np.uint64(bits - bits // 2)
    masks = np.uint64((1 << int(low_bits)) - 1), np.uint64((1 << (bits // 2)) - 1)
    halves = [values & masks[0], values >> low_bits]
    for index in rounds:
        half = index % 2
        halves[half] = halves[half] ^ (mix_bits(halves[1 - half], round_keys[index]) & masks[half])
    return (halves[1] << low_bits) | halves[0]


def mix_bits(values: NDArray[np.uint64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele et al. 2014): every input bit reaches every output bit."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
