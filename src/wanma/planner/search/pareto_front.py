"""Incremental Pareto front of step time and memory: no other plan is both faster and smaller."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Plan = TypeVar("Plan")


class ParetoFront(Generic[Plan]):
    """Pareto front, sorted by rising time and so by falling memory.

    Args:
        tolerance: share by which a point must be faster or smaller than each of the front to join it.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance_factor = 1 + tolerance
        self._seconds: list[float] = []
        self._memory: list[float] = []
        self.plans: list[Plan] = []

    def dominates(self, seconds: float, memory: float) -> bool:
        """Return whether a point of the front is as good, to within the tolerance."""
        after = bisect_right(self._seconds, seconds * self._tolerance_factor)
        return after > 0 and self._memory[after - 1] <= memory * self._tolerance_factor

    def undominated(self, seconds: Array, memory: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the points that the front does not cover."""
        smallest = np.array([np.inf, *self._memory])
        after = np.searchsorted(np.array(self._seconds), seconds * self._tolerance_factor, side="right")
        denied: npt.NDArray[np.bool_] = smallest[after] > memory * self._tolerance_factor
        return denied

    def add(self, seconds: float, memory: float, plan: Plan) -> None:
        """Add a point unless the front covers it, and remove the points that it beats."""
        if self.dominates(seconds, memory):
            return
        at = bisect_right(self._seconds, seconds)
        if at and self._seconds[at - 1] == seconds:  # replaces that point, which is larger
            at -= 1
        end = at
        while end < len(self._memory) and self._memory[end] >= memory:
            end += 1
        self._seconds[at:end], self._memory[at:end], self.plans[at:end] = [seconds], [memory], [plan]
