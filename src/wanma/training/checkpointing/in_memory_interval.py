"""Interval at which in-memory checkpoints cost next to nothing, and the cost of exchanges with partners."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from wanma.planner.memory.in_memory_checkpoints import MAX_OVERHEAD_SHARE, interval_steps

COST_HISTORY = 5
"""Number of newest costs that count."""
_INTERVAL_MARGIN = 1.2
"""Factor by which a new interval exceeds the needed one, so that it stays."""
_SIGNIFICANT_SLOWDOWN = 1.02
"""Ratio of step times, with an exchange to without, above which the difference is its cost."""


class AdaptiveInterval:
    """Interval between in-memory checkpoints, in steps, at which they cost next to nothing; None: unknown."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps

    def update(self, cost_seconds: float, step_seconds: float, min_steps: int = 1) -> bool:
        """Choose the interval again; return whether it has changed.

        It is lengthened where it is too short, and shortened where half of it would do.

        Args:
            cost_seconds: seconds of an in-memory checkpoint.
            step_seconds: seconds of a step without one.
            min_steps: shortest interval in steps, at any cost.
        """
        min_interval = max(interval_steps(cost_seconds, step_seconds), min_steps)
        if self.steps is not None and self.steps / 2 <= min_interval <= self.steps:
            return False
        before, self.steps = self.steps, max(round(_INTERVAL_MARGIN * min_interval), 1)
        return self.steps != before


class ReplicationCost:
    """Cost of the exchange with a partner node: steps beside it take longer.

    They share cores and the network with it. All ranks see the same steps, and so count alike.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        """Core seconds of the newest exchange, where training computes on the same cores."""
        self.steps_since_replication = 0
        """Number of steps without an exchange since the newest one."""
        self.has_new_cost = False
        """True if an exchange ended in the newest step."""
        self._completed: deque[tuple[float, int]] = deque(maxlen=COST_HISTORY)
        """Seconds and number of the steps beside each of the newest exchanges."""
        self._count: int | None = None
        """Number of steps so far beside the current exchange; None without one."""
        self._seconds = 0.0
        """Seconds of the steps beside the current exchange."""

    def start(self) -> None:
        self._count, self._seconds = 0, 0.0

    def record_step(self, seconds: float, is_pending: bool) -> bool:
        """Note a step; return whether an exchange was in progress.

        Args:
            seconds: seconds of the step.
            is_pending: true if an exchange is in progress at its end.
        """
        self.has_new_cost = False
        if self._count is None:
            self.steps_since_replication += 1
            return False
        self.steps_since_replication = 0
        self._count += 1
        self._seconds += seconds
        if not is_pending:
            self._completed.append((self._seconds, self._count))
            self._count, self.has_new_cost = None, True
        return True

    def cost_seconds(self, step_seconds: float) -> float:
        """Return the cost of one exchange in seconds: training's loss, and at least the core seconds.

        Args:
            step_seconds: seconds of a step without one; 0: not known yet.
        """
        return max(self.slowdown_seconds(step_seconds), self.cpu_seconds)

    def slowdown_seconds(self, step_seconds: float) -> float:
        """Return the seconds that one exchange adds to the steps beside it in total; 0 where it may be noise.

        Of each exchange all steps count: over a slow link some may be much longer, and most not at all.
        """
        if not self._completed or step_seconds <= 0:
            return 0.0
        longer = median(seconds - steps * step_seconds for seconds, steps in self._completed)
        steps = median(steps for _, steps in self._completed)
        return longer if longer > (_SIGNIFICANT_SLOWDOWN - 1) * step_seconds * steps else 0.0

    @property
    def min_interval_steps(self) -> int:
        """Fewest steps from one exchange to the next that keep even an unnoticed cost within its share.

        A step beside one may then be longer by up to `_SIGNIFICANT_SLOWDOWN`: only so many of all steps are
        beside one.
        """
        if not self._completed:
            return 1
        steps = median(steps for _, steps in self._completed)
        return math.ceil(round(steps * (_SIGNIFICANT_SLOWDOWN - 1) / MAX_OVERHEAD_SHARE, 6))
