"""Finding: one cause of a diagnosis, with its evidence and the change to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Urgency = Literal["end", "wrong", "slow"]
"""Subject of a finding: the end of the run, wrong numbers, or lost time."""

MIN_SHARE = 0.05
"""Share of the step below which a cause of lost time is not worth a change."""


@dataclass(frozen=True)
class Finding:
    """Finding: one cause."""

    name: str
    urgency: Urgency
    title: str
    """The cause in one sentence."""
    evidence: tuple[str, ...]
    """Facts from the records."""
    change: str
    """Change to make."""
    lost_share: float = 0.0
    """Share of the step that it costs, 0 to 1; an upper bound of the gain."""
    plan_keys: tuple[str, ...] = ()
    """Keys of [parallel] whose change may remove the cause, where the planner can forecast it."""
    needs_gain: bool = False
    """True if there is no cause unless a changed plan is faster by forecast, where there can be one."""
    gain: float | None = None
    """Rise of the throughput by the best change of `plan_keys`, as a share; None: no forecast, or no gain."""
    forecast: str = ""
    """Text of that change with its forecast, or the reason why there is none; empty without `plan_keys`."""
