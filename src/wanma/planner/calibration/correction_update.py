"""Update of correction factors from a run: measured over forecast times, by kind.

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wanma.job.forecast.forecast import Forecast
from wanma.job.forecast.step_phases import comparable_phases, forecast_phases
from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.calibration import FACTOR_BOUNDS, CorrectionFactors

MIN_UPDATE_WEIGHT = 0.2
"""Weight of the newest run, however many came before: nodes and programs change."""
MIN_STEP_SHARE = 0.02
"""Share of a step below which a phase gives no reliable evidence, 0 .. 1."""
FIXED_POINT_ITERATIONS = 8
"""Iterations of fitting the factors to a run; they depend on each other, because compute hides communication.
"""
MAX_COMMUNICATION_SHARE = 0.1
"""Share of forward and backward below which communication inside them is ignored, 0 .. 1."""


@dataclass(frozen=True)
class ObservedStep:
    """Measured steps of a run, as medians over similar steps."""

    seconds: float
    """Seconds of a step."""
    phases: Mapping[str, float]
    """Seconds of each phase, by the recorder's names."""
    memory_bytes: int | None = None
    """Peak of the rank with most memory, in bytes; None when unknown."""


@dataclass(frozen=True)
class CorrectionChange:
    """Change of one correction factor by a run."""

    kind: str
    before: float
    after: float
    forecast: float
    """Forecast with `before`, in seconds; for 'unused' in bytes."""
    measured: float


def update_corrections(
    corrections: CorrectionFactors,
    plan: Plan,
    forecast: Callable[[CorrectionFactors], Forecast],
    observed: ObservedStep,
) -> tuple[CorrectionFactors, tuple[CorrectionChange, ...]]:
    """Return the correction factors after one more run, and their changes.

    Each factor moves towards the one with which this run's forecast would have been right: all the way after
    the first run, then as a running geometric mean whose newest weight never falls below `MIN_UPDATE_WEIGHT`.

    Args:
        forecast: function that forecasts this very run with correction factors.

    Raises:
        ValueError: a forecast has no step time.
    """
    first = _forecast_and_measured(plan, forecast(corrections), observed)
    right = corrections
    for _ in range(FIXED_POINT_ITERATIONS):
        evidence = _forecast_and_measured(plan, forecast(right), observed)
        misses = {
            kind: measured / expected for kind, (expected, measured) in evidence.items() if kind in first
        }
        right = _with(right, {kind: _bounded(getattr(right, kind) * miss) for kind, miss in misses.items()})
    gain = max(1 / (corrections.runs + 1), MIN_UPDATE_WEIGHT)
    lessons = []
    for kind, (expected, measured) in first.items():
        before = getattr(corrections, kind)
        after = _bounded(before * (getattr(right, kind) / before) ** gain)
        lessons.append(CorrectionChange(kind, before, after, expected, measured))
    factors = {lesson.kind: lesson.after for lesson in lessons}
    return replace(_with(corrections, factors), runs=corrections.runs + 1), tuple(lessons)


def _with(corrections: CorrectionFactors, factors: dict[str, Any]) -> CorrectionFactors:
    return replace(corrections, **factors)


def _bounded(factor: float) -> float:
    low, high = FACTOR_BOUNDS
    return min(max(factor, low), high)


def _forecast_and_measured(
    plan: Plan, forecast: Forecast, observed: ObservedStep
) -> dict[str, tuple[float, float]]:
    """Return kind -> (forecast, measured), for kinds that the phases separate."""
    step = forecast.step
    if step is None:
        raise ValueError("a forecast without a step's time cannot be compared with one")
    expected = forecast_phases(step, plan)
    measured = comparable_phases(dict(observed.phases), plan)
    pairs: dict[str, tuple[float, float]] = {}

    def compare(kind: str, phase: str) -> None:
        if expected.get(phase, 0.0) > MIN_STEP_SHARE * step.seconds and measured.get(phase, 0.0) > 0:
            pairs[kind] = expected[phase], measured[phase]

    # With offload a miss may be the copy's or the compute's beside it: no factor may absorb it.
    if plan.offload_parameters == plan.offload_activations == "none":
        compare("compute", "forward_backward")
    compare("communication", "communication")
    if plan.offload_parameters == plan.offload_optimizer == "none":
        compare("optimizer", "optimizer")
    hidden = expected["forward_backward"] - step.compute - step.bubble
    if "compute" in pairs and hidden > MAX_COMMUNICATION_SHARE * expected["forward_backward"]:
        # Both are measured together, so that both get the same factor.
        pairs.setdefault("communication", pairs["compute"])
    if (unused := _fragmentation_bytes(plan, forecast, observed)) is not None:
        pairs["unused"] = unused
    return pairs


def _fragmentation_bytes(
    plan: Plan, forecast: Forecast, observed: ObservedStep
) -> tuple[float, float] | None:
    """Return (forecast, measured) bytes of allocator memory beside all that the forecast counts exactly.

    Return None on a GPU, whose recorder counts live tensors alone.
    """
    unused = forecast.fragmentation_bytes
    if plan.device != "cpu" or observed.memory_bytes is None:
        return None
    if unused < MIN_STEP_SHARE * forecast.memory_bytes:
        return None
    measured = observed.memory_bytes - (forecast.memory_bytes - unused)
    return unused, max(measured, FACTOR_BOUNDS[0] * unused)
