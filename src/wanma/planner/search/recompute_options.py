"""Recompute policies and shares as an indexed list, and as arrays that many plans share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from wanma.job.sections.parallel import Recompute

Array = npt.NDArray[np.float64]


class Recomputes:
    """Recompute options in a fixed order, with arrays of one entry per option."""

    def __init__(self, kinds: Iterable[tuple[Recompute, float]]) -> None:
        self.all = tuple(kinds)
        self.is_selective: Array = np.array([float(kind == "selective") for kind, _ in self.all])
        self.is_full: Array = np.array([float(kind == "full") for kind, _ in self.all])
        self.shares: Array = np.array([share for _, share in self.all]) * (self.is_selective + self.is_full)
        """Share of a stage's blocks that is recomputed, 0 .. 1."""
        self._of_stages: dict[tuple[int, ...], Array] = {}

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[tuple[Recompute, float]]:
        return iter(self.all)

    def __getitem__(self, number: int) -> tuple[Recompute, float]:
        return self.all[number]

    def of_stages(self, sizes: tuple[int, ...]) -> Array:
        """Return the recomputed share of every stage's blocks, as `Plan.recomputed`; (recomputes, stages).

        Args:
            sizes: number of blocks of every stage.
        """
        if sizes not in self._of_stages:
            blocks = np.array(sizes)
            again = np.ceil(np.round(self.shares[:, None] * blocks, 9))
            self._of_stages[sizes] = again / np.maximum(blocks, 1)
        return self._of_stages[sizes]
