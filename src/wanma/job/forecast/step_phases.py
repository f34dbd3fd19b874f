"""A forecast step in the phases that a run's recorder measures, so that one can be set beside the other."""

from __future__ import annotations

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan


def phases_of(step: StepTime, plan: Plan) -> dict[str, float]:
    """Seconds by phase of `observe.phases`, those that a forecast knows.

    Communication of tensors, context and experts is inside forward and backward, for the recorder as for the
    model. That of data-parallel ranks is apart only where it can be: on a GPU it runs beside computing, and
    a pipeline's ranks wait in it for each other.
    """
    inside = step.compute + step.tensor + step.context + step.expert + step.moving + step.bubble
    apart = is_communication_apart(plan)
    return {
        "forward_backward": inside if apart else inside + step.data,
        **({"communication": step.data} if apart else {}),
        "optimizer": step.optimizer,
        "data": step.loading,
        "checkpoint": step.checkpoint,
    }


def measured_phases(phases: dict[str, float], plan: Plan) -> dict[str, float]:
    """The recorder's phases, put together as `phases_of` has them; validation is no part of a step."""
    told = {name: seconds for name, seconds in phases.items() if name != "validation"}
    if not is_communication_apart(plan):
        told["forward_backward"] = told.get("forward_backward", 0.0) + told.pop("communication", 0.0)
    return told


def is_communication_apart(plan: Plan) -> bool:
    """Whether the recorder tells data-parallel communication from computing."""
    return plan.device == "cpu" and plan.pp == 1
