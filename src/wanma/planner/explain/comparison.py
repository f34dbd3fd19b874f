"""Comparison of a plan with the best one: its extra time by cause, or the reason why it cannot run.

    print(compare(problem, plan, found.best).sentence)
    # slower, 1.42 s per step against 1.01 s (+41 %): TP 16 crosses nodes: +410 ms of exposed all-reduce

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wanma.job.forecast.forecast import MEMORY_KINDS, Forecast, StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.explain.advice import fitting_changes, memory_saving_changes
from wanma.planner.explain.plan_changes import PlanChange
from wanma.planner.forecast.plan_forecast import forecast_plan, with_pipeline_rank_memory
from wanma.planner.forecast.plan_validity import invalid_plan_reason
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.rules.capabilities import unsupported_reason
from wanma.planner.rules.compression import compression_text
from wanma.planner.search.result import Candidate

Verdict = Literal["invalid", "unsupported", "does not fit", "slower", "equal", "faster", "no time forecast"]

EQUAL_TIME_SHARE = 0.005
"""Share of the step time within which two plans count as equally fast."""
MIN_NAMED_SHARE = 0.01
"""Share of the best plan's step time below which a difference is not named."""


@dataclass(frozen=True)
class TimeDifference:
    """Difference of two plans in one kind of step time."""

    kind: str
    """Field of `StepTime`."""
    seconds: float
    """Seconds beyond the best plan's; negative where it is less."""
    cause: str
    """Cause, such as 'TP 16 crosses nodes'; empty where no setting explains it."""
    description: str
    """Name of the time, such as 'exposed all-reduce'."""

    def __str__(self) -> str:
        sign = "+" if self.seconds >= 0 else "−"
        amount = f"{sign}{duration_text(abs(self.seconds))} of {self.description}"
        return f"{self.cause}: {amount}" if self.cause else amount


@dataclass(frozen=True)
class PlanComparison:
    """Comparison of one plan with the best."""

    plan: Plan
    verdict: Verdict
    headline: str
    """Result in words: 'slower, 1.42 s per step against 1.01 s (+41%)', or the reason why it is invalid."""
    forecast: Forecast | None = None
    """Forecast of the plan; None for an invalid plan."""
    differences: tuple[TimeDifference, ...] = ()
    """Differences by kind of time: the largest loss first, then the gains."""
    remedies: tuple[PlanChange, ...] = ()
    """Changes that make a plan fit that does not; without any, those that save most memory."""

    @property
    def sentence(self) -> str:
        """Return the headline with the largest causes."""
        sign = {"slower": 1, "faster": -1}.get(self.verdict, 0)
        causes = [str(difference) for difference in self.differences if sign * difference.seconds > 0]
        return f"{self.headline}: {'; '.join(causes[:3])}" if causes else self.headline


def compare_plans(
    problem: PlanningProblem, plan: Plan, best: Candidate | None, known_forecast: Forecast | None = None
) -> PlanComparison:
    """Compare `plan` with `best`, which may be None where nothing fits.

    Args:
        problem: the planning problem.
        plan: plan to compare.
        best: best plan of a search.
        known_forecast: forecast of `plan` from a search; required for plans with a replica placement.
    """
    if not plan.placement and (reason := invalid_plan_reason(problem, plan)):
        return PlanComparison(plan, "invalid", f"invalid: {reason}")
    forecast = known_forecast or forecast_plan(problem, plan)
    if forecast.memory_bytes > problem.memory_limit_bytes:
        remedies = tuple(
            fitting_changes(problem, plan, keep=3) or memory_saving_changes(problem, plan, keep=3)
        )
        return PlanComparison(
            plan, "does not fit", _too_large_text(problem, plan, forecast, remedies), forecast, (), remedies
        )
    reason = unsupported_reason(problem.job, plan, problem.cluster)
    if reason is not None and (best is None or best.unsupported_reason != reason):
        return PlanComparison(plan, "unsupported", f"unsupported: {reason}", forecast)
    if forecast.step is None or best is None or best.forecast.step is None:
        return PlanComparison(plan, "no time forecast", "fits; no step-time forecast", forecast)
    verdict, headline = _time_verdict(forecast.step, best.forecast.step)
    differences = tuple(_differences(problem, plan, forecast.step, best.plan, best.forecast.step))
    return PlanComparison(plan, verdict, headline, forecast, differences)


def _too_large_text(
    problem: PlanningProblem, plan: Plan, memory_forecast: Forecast, remedies: tuple[PlanChange, ...]
) -> str:
    """Describe a plan that does not fit, with the largest kind of memory and the best change.

    Example: 'does not fit: stage 0 needs 91.0 GiB, the limit is 80.0 GiB; largest: ...'.
    """
    kinds = {name: getattr(memory_forecast, field) for field, name in MEMORY_KINDS.items()}
    largest = max(kinds, key=lambda name: kinds[name])
    sentences = [
        f"does not fit: {_largest_rank_text(problem, plan, memory_forecast)} needs "
        f"{bytes_text(memory_forecast.memory_bytes)}, the limit is "
        f"{bytes_text(problem.memory_limit_bytes)}",
        f"largest: {largest} {bytes_text(kinds[largest])}",
    ]
    for remedy in remedies[:1]:
        is_enough = remedy.forecast.memory_bytes <= problem.memory_limit_bytes
        effect = ", which is enough" if is_enough else ", which is not enough"
        sentences.append(f"{remedy} would save {bytes_text(remedy.saved_bytes)}{effect}")
    return "; ".join(sentences)


def _largest_rank_text(problem: PlanningProblem, plan: Plan, memory_forecast: Forecast) -> str:
    """Name the largest rank: 'stage 0' in a pipeline; 'a rank' among equal ones."""
    if plan.pp == 1 or plan.placement:
        return "a rank"
    ranks = with_pipeline_rank_memory(problem, plan, memory_forecast).pipeline_ranks
    fullest = max(range(plan.pp), key=lambda rank: ranks[rank].memory_bytes)
    numbers = plan.stages_of_pipeline_rank(fullest)
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _time_verdict(step: StepTime, best: StepTime) -> tuple[Verdict, str]:
    """Return the verdict and the headline of a plan that fits."""
    ratio = step.seconds / best.seconds - 1.0
    if abs(ratio) < EQUAL_TIME_SHARE:
        return "equal", f"as fast as the best plan: {duration_text(step.seconds)} per step"
    verdict: Verdict = "slower" if ratio > 0 else "faster"
    times = f"{duration_text(step.seconds)} per step against {duration_text(best.seconds)}"
    return verdict, f"{verdict}, {times} ({ratio:+.0%})"


def _differences(
    problem: PlanningProblem, plan: Plan, step: StepTime, best_plan: Plan, best: StepTime
) -> list[TimeDifference]:
    differences = []
    for kind, (describe, cause) in _KINDS.items():
        seconds = getattr(step, kind) - getattr(best, kind)
        if abs(seconds) >= MIN_NAMED_SHARE * best.seconds:
            # A loss has its cause in this plan's settings, a gain in those of the best plan.
            if seconds > 0:
                differences.append(
                    TimeDifference(kind, seconds, cause(problem, plan, best_plan), describe(plan))
                )
            else:
                best_cause = cause(problem, best_plan, plan)
                differences.append(
                    TimeDifference(
                        kind, seconds, f"best plan: {best_cause}" if best_cause else "", describe(best_plan)
                    )
                )
    return sorted(differences, key=lambda difference: -difference.seconds)


def _crosses_nodes(problem: PlanningProblem, size: int, stride: int) -> bool:
    """Return whether a group of ranks reaches beyond the fastest links."""
    links = problem.hardware.links
    return len(links) > 1 and size > 1 and (size - 1) * stride >= links[0].devices


def _mesh_dimension_text(problem: PlanningProblem, name: str, size: int, stride: int) -> str:
    if size == 1:
        return ""
    crossing = " crosses nodes" if _crosses_nodes(problem, size, stride) else ""
    return f"{name} {size}{crossing}"


def _tensor_parallel_cause(problem: PlanningProblem, plan: Plan, _other: Plan) -> str:
    return _mesh_dimension_text(problem, "TP", plan.tp, 1)


def _outer_dimension_cause(axis: str) -> Cause:
    """Return the cause for a mesh dimension whose ranks are `tp` apart."""
    return lambda problem, plan, _: _mesh_dimension_text(problem, axis.upper(), getattr(plan, axis), plan.tp)


def _data_parallel_cause(problem: PlanningProblem, plan: Plan, other: Plan) -> str:
    ranks = plan.data_parallel_size * plan.cp
    if ranks == 1:
        return ""
    shared = "" if plan.shard == "none" else f", {plan.shard} sharded over {plan.shard_group_size}"
    if _compression_text(plan) != _compression_text(other):
        shared += f", gradients {_compression_text(plan)} instead of {_compression_text(other)}"
    return f"{_mesh_dimension_text(problem, 'DP', ranks, plan.tp)}{shared}"


def _compression_text(plan: Plan) -> str:
    return compression_text(plan) or "uncompressed"


def _offload_cause(_problem: PlanningProblem, plan: Plan, other: Plan) -> str:
    kinds = ("parameters", "optimizer", "activations")
    keys = [f"offload_{kind}" for kind in kinds]
    different = [key for key in keys if getattr(plan, key) != getattr(other, key)]
    return ", ".join(f"{key} {getattr(plan, key)}" for key in different)


def _bubble_cause(problem: PlanningProblem, plan: Plan, _other: Plan) -> str:
    if plan.pp == 1:
        return ""
    count = plan.gradient_accumulation_steps(problem.global_batch)
    return f"PP {plan.pp} with {count} micro-batches of {plan.schedule}"


def _optimizer_cause(_problem: PlanningProblem, plan: Plan, _other: Plan) -> str:
    return (
        f"state sharded over {plan.shard_group_size} ranks"
        if plan.shard_group_size > 1
        else "state not sharded"
    )


def _compute_cause(_problem: PlanningProblem, plan: Plan, other: Plan) -> str:
    """Name the settings by which a rank of `plan` computes longer than one of `other`."""
    causes = []
    if plan.world_size < other.world_size:
        causes.append(f"{plan.world_size} ranks instead of {other.world_size}")
    if (plan.recompute, plan.recompute_share) != (other.recompute, other.recompute_share):
        causes.append(f"recompute {_recompute_text(plan)} instead of {_recompute_text(other)}")
    if plan.compile != other.compile:
        causes.append("not compiled" if other.compile else "compiled")
    if plan.precision != other.precision:
        causes.append(f"computed in {plan.precision} instead of {other.precision}")
    if plan.fp8 != other.fp8:
        causes.append("16-bit matrix products instead of fp8" if other.fp8 else "fp8 matrix products")
    if plan.tp > other.tp:
        causes.append(f"TP {plan.tp} has smaller matrix products than {other.tp}")
    if plan.micro_batch < other.micro_batch:
        causes.append(f"micro-batch {plan.micro_batch} instead of {other.micro_batch}")
    if plan.pp > 1 and plan.stage_count != other.stage_count:
        causes.append(f"{plan.stage_count} stages, limited by the longest")
    return ", ".join(causes[:2])


def _recompute_text(plan: Plan) -> str:
    share = "" if plan.recompute == "none" or plan.recompute_share == 1 else f" of {plan.recompute_share:.0%}"
    return f"{plan.recompute}{share}"


def _constant_text(text: str) -> Callable[[Plan], str]:
    return lambda _plan: text


def _tensor_exchange(plan: Plan) -> str:
    return "exposed all-gather and reduce-scatter" if plan.sequence_parallel else "exposed all-reduce"


def _context_exchange(plan: Plan) -> str:
    return "exposed ring exchange" if plan.cp_method == "ring" else "exposed all-to-all"


Cause = Callable[[PlanningProblem, Plan, Plan], str]
"""Function of (problem, slower plan, other plan) that names the cause of a difference."""

_KINDS: dict[str, tuple[Callable[[Plan], str], Cause]] = {
    "compute": (_constant_text("compute"), _compute_cause),
    "tensor": (_tensor_exchange, _tensor_parallel_cause),
    "context": (_context_exchange, _outer_dimension_cause("cp")),
    "expert": (_constant_text("exposed token dispatch"), _outer_dimension_cause("ep")),
    "data": (_constant_text("exposed gradient reduction and parameter gather"), _data_parallel_cause),
    "moving": (_constant_text("exposed offload transfer"), _offload_cause),
    "bubble": (_constant_text("pipeline bubble"), _bubble_cause),
    "optimizer": (_constant_text("optimizer"), _optimizer_cause),
    "loading": (_constant_text("exposed data loading"), lambda *_: ""),
    "checkpoint": (_constant_text("checkpoint saving"), lambda *_: ""),
}
