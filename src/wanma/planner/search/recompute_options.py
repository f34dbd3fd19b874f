"""Recompute policies and shares as an indexed list, and as arrays that many plans share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from wanma.job.sections.parallel import Recompute

Array = npt.NDArray[np.float64]


class RecomputeOptions:
    """Recompute options in a fixed order, with arrays of one entry per option."""

    def __init__(self, kinds: Iterable[tuple[Recompute, float]]) -> None:
        self.options = tuple(kinds)
        self.is_selective: Array = np.array([float(kind == "selective") for kind, _ in self.options])
        self.is_full: Array = np.array([float(kind == "full") for kind, _ in self.options])
        self.shares: Array = np.array([share for _, share in self.options]) * (
            self.is_selective + self.is_full
        )
        """Share of a stage's blocks that is recomputed, 0 .. 1."""
        self._stage_shares: dict[tuple[int, ...], Array] = {}

    def __len__(self) -> int:
        return len(self.options)

    def __iter__(self) -> Iterator[tuple[Recompute, float]]:
        return iter(self.options)

    def __getitem__(self, number: int) -> tuple[Recompute, float]:
        return self.options[number]

    def stage_shares(self, sizes: tuple[int, ...]) -> Array:
        """Return each stage's recomputed share of blocks (`Plan.recomputed_blocks`); (recomputes, stages).

        Args:
            sizes: number of blocks of every stage.
        """
        if sizes not in self._stage_shares:
            blocks = np.array(sizes)
            recomputed = np.ceil(np.round(self.shares[:, None] * blocks, 9))
            self._stage_shares[sizes] = recomputed / np.maximum(blocks, 1)
        return self._stage_shares[sizes]
