"""Update of correction factors from a run: measured over forecast times, by kind.

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wanma.job.forecast.forecast import Forecast
from wanma.job.forecast.step_phases import measured_phases, phases_of
from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.calibration import FACTOR_BOUNDS, Corrections

LEAST_GAIN = 0.2
"""Weight of the newest run, however many came before: nodes and programs change."""
LEAST_SHARE = 0.02
"""Share of a step below which a phase gives no reliable evidence, 0 .. 1."""
ROUNDS = 8
"""Iterations of fitting the factors to a run; they depend on each other, because compute hides communication.
"""
PURE_SHARE = 0.1
"""Share of forward and backward below which communication inside them is ignored, 0 .. 1."""


@dataclass(frozen=True)
class Observed:
    """Measured steps of a run, as medians over similar steps."""

    seconds: float
    """Seconds of a step."""
    phases: Mapping[str, float]
    """Seconds of each phase, by the recorder's names."""
    memory_bytes: int | None = None
    """Peak of the rank with most memory, in bytes; None when unknown."""


@dataclass(frozen=True)
class Lesson:
    """Change of one correction factor by a run."""

    kind: str
    before: float
    after: float
    forecast: float
    """Forecast with `before`, in seconds; for 'unused' in bytes."""
    measured: float


def learned(
    corrections: Corrections, plan: Plan, forecast: Callable[[Corrections], Forecast], observed: Observed
) -> tuple[Corrections, tuple[Lesson, ...]]:
    """Return the correction factors after one more run, and their changes.

    Each factor moves towards the one with which this run's forecast would have been right: all the way after
    the first run, then as a running geometric mean whose newest weight never falls below `LEAST_GAIN`.

    Args:
        forecast: function that forecasts this very run with correction factors.

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
    """Return kind -> (forecast, measured), for kinds that the phases separate."""
    step = forecast.step
    if step is None:
        raise ValueError("a forecast without a step's time cannot be compared with one")
    expected = phases_of(step, plan)
    measured = measured_phases(dict(observed.phases), plan)
    found: dict[str, tuple[float, float]] = {}

    def compare(kind: str, phase: str) -> None:
        if expected.get(phase, 0.0) > LEAST_SHARE * step.seconds and measured.get(phase, 0.0) > 0:
            found[kind] = expected[phase], measured[phase]

    # With offload a miss may be the copy's or the compute's beside it: no factor may absorb it.
    if plan.offload_parameters == plan.offload_activations == "none":
        compare("compute", "forward_backward")
    compare("communication", "communication")
    if plan.offload_parameters == plan.offload_optimizer == "none":
        compare("optimizer", "optimizer")
    inside = expected["forward_backward"] - step.compute - step.bubble
    if "compute" in found and inside > PURE_SHARE * expected["forward_backward"]:
        # Both are measured together, so that both get the same factor.
        found.setdefault("communication", found["compute"])
    if (unused := _unused(plan, forecast, observed)) is not None:
        found["unused"] = unused
    return found


def _unused(plan: Plan, forecast: Forecast, observed: Observed) -> tuple[float, float] | None:
    """Return (forecast, measured) bytes of allocator memory beside all that the forecast counts exactly.

    Return None on a GPU, whose recorder counts live tensors alone.
    """
    unused = forecast.fragmentation_bytes
    if plan.device != "cpu" or observed.memory_bytes is None:
        return None
    if unused < LEAST_SHARE * forecast.memory_bytes:
        return None
    measured = observed.memory_bytes - (forecast.memory_bytes - unused)
    return unused, max(measured, FACTOR_BOUNDS[0] * unused)
