"""Candidate plans and the result of a search.

Pure data; pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """Candidate plan: a plan that a search evaluated, with its forecast."""

    plan: Plan
    forecast: Forecast
    unsupported_reason: str | None = None
    """Reason why the plan is forecast-only; None for a runnable plan."""

    @property
    def seconds(self) -> float:
        """Return the seconds of one step; infinite where rates are unknown."""
        return self.forecast.step.seconds if self.forecast.step else float("inf")

    @property
    def memory_bytes(self) -> int:
        return self.forecast.memory_bytes


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    candidates: tuple[Candidate, ...]
    """Plans that fit: runnable ones first, then forecast-only ones; each by rising step time."""
    pareto_front: tuple[Candidate, ...]
    """Pareto front of step time and memory, fastest first.

    It has only runnable plans, if there are any.
    """
    smallest: Candidate | None
    """Plan that needs the least memory, where nothing fits."""
    plan_count: int
    """Number of plans of the space, pruned ones included."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Number of plans that were not forecast, by the cause.

    Causes: `memory` that they need, lower bound on `time`, or `beaten` by the same plan compiled.
    """
    seconds: float = 0.0
    """Seconds that the search took."""

    @property
    def best(self) -> Candidate | None:
        """Return the fastest runnable plan."""
        return next(iter(self.supported), None)

    @property
    def supported(self) -> tuple[Candidate, ...]:
        """Return the runnable plans."""
        return tuple(candidate for candidate in self.candidates if candidate.unsupported_reason is None)

    @property
    def unsupported(self) -> tuple[Candidate, ...]:
        """Return the forecast-only plans."""
        return tuple(candidate for candidate in self.candidates if candidate.unsupported_reason is not None)

    @property
    def best_or_unsupported(self) -> Candidate | None:
        """Return `best`; without a runnable plan, the fastest forecast-only one."""
        return self.best or next(iter(self.candidates), None)


def build_pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other beats in both step time and memory, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.memory_bytes)):
        if not front or candidate.memory_bytes < front[-1].memory_bytes:
            front.append(candidate)
    return tuple(front)
