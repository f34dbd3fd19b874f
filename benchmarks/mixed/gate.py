"""Gate between two steps of a training: its ranks continue for a granted number of steps.

A training that follows its own clock, such as one with moving shares, may not be stopped within a step. All
ranks stop after the same step, because none begins a step before all have ended the last.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

POLL_SECONDS = 0.002


class Gate:
    """Numbers of granted and finished steps, in a file mapped by the ranks and their controller.

    Args:
        first: steps granted at the first opening; later ones grant one each.
    """

    def __init__(self, path: Path, ranks: int, first: int = 1) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (1 + ranks)))
        self._numbers = np.memmap(path, np.int64, "r+", shape=(1 + ranks,))
        self._first = first

    def open(self) -> None:
        """Grant the next steps."""
        self._numbers[0] += 1 if self._numbers[0] else self._first

    @property
    def is_reached(self) -> bool:
        """Return True if all ranks have finished the granted steps."""
        return bool((self._numbers[1:] >= self._numbers[0]).all())

    def wait(self, rank: int, step: int) -> None:
        """Wait, after a rank's step, until the next may begin."""
        self._numbers[1 + rank] = step
        while step >= self._numbers[0]:
            time.sleep(POLL_SECONDS)
