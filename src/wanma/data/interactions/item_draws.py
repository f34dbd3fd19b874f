"""Negatives: items drawn by (seed, sample), and the logarithms of the probabilities of draws."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from wanma.data.sampling.permutation import IndexArray, mix_bits


class ItemDraws:
    """Draws of items in proportion to their count in training to a power.

    Args:
        items: items of the training rows.
        item_count: number of items of the catalogue.
        power: 1: as often as in training; 0: all items alike.
        seed: the job's.
    """

    def __init__(self, items: NDArray[np.int64], item_count: int, power: float, seed: int) -> None:
        counts = np.bincount(items, minlength=item_count).astype(np.float64)
        weights = np.power(counts, power) if power else np.ones(item_count)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._seed = seed
        # An item that training lacks, and that validation scores, counts as if it had been there once.
        floored = np.power(np.maximum(counts, 1), power)
        self.log_probability = np.log(floored / weights.sum()).astype(np.float32)
        """Logarithm of the probability of each item, (items,)."""

    def draw(self, samples: IndexArray, count: int, purpose: str) -> NDArray[np.int64]:
        """Return `count` items for each sample, (samples, count), with replacement."""
        digest = hashlib.blake2b(f"{self._seed}:{purpose}".encode(), digest_size=8).digest()
        key = np.uint64(int.from_bytes(digest, "little"))
        numbers = np.arange(count).astype(np.uint64)
        positions = mix_bits(samples.astype(np.uint64)[:, None], key) + numbers
        uniform = (mix_bits(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found = np.searchsorted(self._cumulative, uniform, side="right")
        return np.minimum(found, len(self._cumulative) - 1).astype(np.int64)
