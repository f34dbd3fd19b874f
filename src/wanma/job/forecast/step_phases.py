"""Mapping from a forecast step to the step phases of a recorder, so that both can be compared."""

from __future__ import annotations

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan


def forecast_phases(step: StepTime, plan: Plan) -> dict[str, float]:
    """Return the forecast seconds by phase of `PhaseTimer`, as far as a forecast knows them.

    Communication over `tp`, `cp` and `ep` is part of forward and backward, for the recorder as for the cost
    model. Data-parallel communication is a phase of its own only if it can be measured: on a GPU it overlaps
    with computation, and the ranks of a pipeline wait in it for each other.
    """
    step_seconds = step.compute + step.tensor + step.context + step.expert + step.moving + step.bubble
    has_communication_phase = separates_communication(plan)
    return {
        "forward_backward": step_seconds if has_communication_phase else step_seconds + step.data,
        **({"communication": step.data} if has_communication_phase else {}),
        "optimizer": step.optimizer,
        "data": step.loading,
        "checkpoint": step.checkpoint,
    }


def forecast_exposed_communication(step: StepTime) -> dict[str, float]:
    """Return the forecast seconds of exposed communication by the kinds of a recorder.

    That of a pipeline is its bubble, which includes the transfers between stages.
    """
    kinds = ("data", "tensor", "context", "expert")
    return {**{kind: getattr(step, kind) for kind in kinds}, "pipeline": step.bubble}


def communication_kinds(plan: Plan) -> list[str]:
    """Return the kinds of communication of a plan, as a recorder names them."""
    ranks = {
        "data": plan.data_parallel_size * plan.cp,
        "tensor": plan.tp,
        "context": plan.cp,
        "expert": plan.ep,
        "pipeline": plan.pp,
    }
    return [kind for kind, size in ranks.items() if size > 1]


def comparable_phases(phases: dict[str, float], plan: Plan) -> dict[str, float]:
    """Return the recorder's seconds, merged into the phases of `forecast_phases`; validation is left out."""
    merged = {name: seconds for name, seconds in phases.items() if name != "validation"}
    if not separates_communication(plan):
        merged["forward_backward"] = merged.get("forward_backward", 0.0) + merged.pop("communication", 0.0)
    return merged


def separates_communication(plan: Plan) -> bool:
    """Return True if the recorder separates data-parallel communication from computation."""
    return plan.device == "cpu" and plan.pp == 1
