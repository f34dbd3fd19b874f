"""A gate between two steps of a training: its ranks go on for as many steps as they are let.

A training that follows its own clock, as shares that move do, may not be stopped within a step. All ranks
stop after the same one, since a step begins for nobody before all have ended the last.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

POLL_SECONDS = 0.002


class Gate:
    """Steps that ranks may make and have made: a file that they and whoever lets them go map.

    Args:
        first: steps that they go at once when it opens for the first time; then one each time.
    """

    def __init__(self, path: Path, ranks: int, first: int = 1) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (1 + ranks)))
        self._numbers = np.memmap(path, np.int64, "r+", shape=(1 + ranks,))
        self._first = first

    def open(self) -> None:
        """Let them go."""
        self._numbers[0] += 1 if self._numbers[0] else self._first

    @property
    def is_reached(self) -> bool:
        """All have made their steps."""
        return bool((self._numbers[1:] >= self._numbers[0]).all())

    def wait(self, rank: int, step: int) -> None:
        """Called by a rank after its step: until the next may begin."""
        self._numbers[1 + rank] = step
        while step >= self._numbers[0]:
            time.sleep(POLL_SECONDS)
