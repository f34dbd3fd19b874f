"""What a run teaches about forecasts: by how much they missed, by kind. Pure functions, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wanma.job.forecast.forecast import Forecast
from wanma.job.forecast.step_phases import measured_phases, phases_of
from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.calibration import FACTOR_BOUNDS, Corrections

LEAST_GAIN = 0.2
"""Weight of the newest run, however many came before: machines and programs change."""
LEAST_SHARE = 0.02
"""Of a step: what is shorter says nothing reliable about its kind."""
ROUNDS = 8
"""Of looking for the factors that are right for a run: what is hidden behind computing depends on both."""
PURE_SHARE = 0.1
"""Of forward and backward, communication below which these say how fast the machine computes."""


@dataclass(frozen=True)
class Observed:
    """A run's steps, in medians over those that are like each other."""

    seconds: float
    """Of a step."""
    phases: Mapping[str, float]
    """As the recorder has them."""
    memory_bytes: int | None = None
    """Peak of the fullest rank; None when unknown."""


@dataclass(frozen=True)
class Lesson:
    """One factor, before and after a run."""

    kind: str
    before: float
    after: float
    forecast: float
    """Seconds (of 'unused' bytes) as they were forecast with `before`."""
    measured: float


def learned(
    corrections: Corrections, plan: Plan, forecast: Callable[[Corrections], Forecast], observed: Observed
) -> tuple[Corrections, tuple[Lesson, ...]]:
    """Corrections after one more run.

    Each factor moves towards the one with which this run would have been forecast as it was: all the way
    after the first run, then as a running geometric mean that never forgets how to move.

    Args:
        forecast: of this very run, with corrections.

    Raises:
        ValueError: a forecast has no step time.
    """
    first = _evidence(plan, forecast(corrections), observed)
    right = corrections
    for _ in range(ROUNDS):
        evidence = _evidence(plan, forecast(right), observed)
        misses = {
            kind: measured / expected for kind, (expected, measured) in evidence.items() if kind in first
        }
        right = _with(right, {kind: _bounded(getattr(right, kind) * miss) for kind, miss in misses.items()})
    gain = max(1 / (corrections.runs + 1), LEAST_GAIN)
    lessons = []
    for kind, (expected, measured) in first.items():
        before = getattr(corrections, kind)
        after = _bounded(before * (getattr(right, kind) / before) ** gain)
        lessons.append(Lesson(kind, before, after, expected, measured))
    factors = {lesson.kind: lesson.after for lesson in lessons}
    return replace(_with(corrections, factors), runs=corrections.runs + 1), tuple(lessons)


def _with(corrections: Corrections, factors: dict[str, Any]) -> Corrections:
    return replace(corrections, **factors)


def _bounded(factor: float) -> float:
    low, high = FACTOR_BOUNDS
    return min(max(factor, low), high)


def _evidence(plan: Plan, forecast: Forecast, observed: Observed) -> dict[str, tuple[float, float]]:
    """Kind -> (forecast, measured), of kinds that the phases tell apart."""
    step = forecast.step
    if step is None:
        raise ValueError("a forecast without a step's time cannot be compared with one")
    expected = phases_of(step, plan)
    measured = measured_phases(dict(observed.phases), plan)
    found: dict[str, tuple[float, float]] = {}

    def compare(kind: str, phase: str) -> None:
        if expected.get(phase, 0.0) > LEAST_SHARE * step.seconds and measured.get(phase, 0.0) > 0:
            found[kind] = expected[phase], measured[phase]

    # Of what is offloaded a copy may miss as well as what it waits beside: no factor is to bear that.
    if plan.offload_parameters == plan.offload_activations == "nothing":
        compare("compute", "forward_backward")
    compare("communication", "communication")
    if plan.offload_parameters == plan.offload_optimizer == "nothing":
        compare("optimizer", "optimizer")
    inside = expected["forward_backward"] - step.compute - step.bubble
    if "compute" in found and inside > PURE_SHARE * expected["forward_backward"]:
        # They are measured as one: both are taken to be off by the same.
        found.setdefault("communication", found["compute"])
    if (unused := _unused(plan, forecast, observed)) is not None:
        found["unused"] = unused
    return found


def _unused(plan: Plan, forecast: Forecast, observed: Observed) -> tuple[float, float] | None:
    """(forecast, measured) of what the allocator held beside all that the forecast counts exactly.

    None on a GPU, whose recorder counts what is used alone.
    """
    unused = forecast.fragmentation_bytes
    if plan.device != "cpu" or observed.memory_bytes is None:
        return None
    if unused < LEAST_SHARE * forecast.memory_bytes:
        return None
    measured = observed.memory_bytes - (forecast.memory_bytes - unused)
    return unused, max(measured, FACTOR_BOUNDS[0] * unused)
