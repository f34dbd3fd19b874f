"""What a search returns: plans with their forecasts, the best ones first. Pure data; pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at to the end."""

    plan: Plan
    forecast: Forecast
    forecast_only: str | None = None
    """Why wanma cannot run it, or not unless the job allows it by name; None for a plan that runs."""

    @property
    def seconds(self) -> float:
        """Of one step; endless where nothing is known of the machine's rates."""
        return self.forecast.step.seconds if self.forecast.step else float("inf")

    @property
    def memory_bytes(self) -> int:
        return self.forecast.memory_bytes


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    candidates: tuple[Candidate, ...]
    """Plans that fit: first what wanma runs, then what is a forecast only; of each the fastest first."""
    pareto: tuple[Candidate, ...]
    """No plan is both faster and smaller than one of these; the fastest first. Where wanma runs any plan, of
    those alone."""
    nearest: Candidate | None
    """Where nothing fits: the plan that needs the least memory."""
    considered: int
    """Plans of the space, those pruned included."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Plans that were never forecast to the end, by what left them out: `memory` that they need, `time` that
    they take at least, or `beaten` by themselves compiled."""
    seconds: float = 0.0
    """That the search took."""

    @property
    def best(self) -> Candidate | None:
        """The fastest that wanma runs."""
        return next(iter(self.runnable), None)

    @property
    def runnable(self) -> tuple[Candidate, ...]:
        """Plans that wanma runs."""
        return tuple(one for one in self.candidates if one.forecast_only is None)

    @property
    def forecasts_only(self) -> tuple[Candidate, ...]:
        """Plans that wanma does not run."""
        return tuple(one for one in self.candidates if one.forecast_only is not None)

    @property
    def shown(self) -> Candidate | None:
        """`best`; where wanma runs none of them, the fastest that it does not run."""
        return self.best or next(iter(self.candidates), None)


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those beside which no other is at least as fast and needs less memory; the fastest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.seconds, one.memory_bytes)):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return tuple(front)
