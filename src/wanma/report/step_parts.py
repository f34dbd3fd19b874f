"""Parts of a step that add up to its time, from the times that a run records, and the same of a forecast.

On a CPU every wait is timed where it happens, on a GPU where its stream waits. Where a run has no such times,
forward and backward are one part. The time in which a GPU ran no kernel is known from NVML.
"""

from __future__ import annotations

from collections.abc import Mapping

from wanma.job.forecast.forecast import STEP_TIME_KINDS, StepTime

FORWARD_BACKWARD, PIPELINE, HOST, OTHER = "forward_backward", "pipeline", "host", "other"
GPU_IDLE = "gpu_idle"
"""Seconds of a step in which no kernel ran on the GPU."""
EXPOSED = "exposed."
"""Prefix of the exposed communication of a kind."""
PART_NAMES = {
    "compute": STEP_TIME_KINDS["compute"],
    FORWARD_BACKWARD: "forward and backward, with communication",
    **{kind: STEP_TIME_KINDS[kind] for kind in ("tensor", "context", "expert", "data")},
    PIPELINE: "exposed communication (pp)",
    "bubble": STEP_TIME_KINDS["bubble"],
    "optimizer": STEP_TIME_KINDS["optimizer"],
    "loading": STEP_TIME_KINDS["loading"],
    "checkpoint": STEP_TIME_KINDS["checkpoint"],
    HOST: "host",
    OTHER: "not explained",
}
"""Names of the parts, in the order of a stacked bar; those of a forecast have its names."""
_PHASE_PARTS = {"communication": "data", "data": "loading"}
"""Phases of a recorder whose part has another name."""
_MODEL_AXES = ("tensor", "context", "expert")
_TIMES = {"compute_seconds": "compute", "bubble_seconds": "bubble"}
_TIME_PREFIXES = {"phases.": "", "exposed_communication_seconds.": EXPOSED}
"""Names for `step_parts` of the columns of a report's steps that are times of a step, and of their groups."""


def step_parts(seconds: float, times: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step by their keys in `PART_NAMES`, in seconds; they add up to `seconds`.

    Args:
        seconds: wall clock of the step.
        times: seconds by phase, as in metrics.jsonl; `exposed.KIND` of communication inside forward and
            backward; `compute` and `bubble`, if they are known; `gpu_idle` of ranks on GPUs. Another name is
            a part of its own. Means over steps give means of the parts.
    """
    left = {name: value for name, value in times.items() if name != "validation"}
    exposed = {name.removeprefix(EXPOSED): left.pop(name) for name in tuple(left) if name.startswith(EXPOSED)}
    parts = dict.fromkeys(PART_NAMES, 0.0)
    forward_backward, idle = left.pop(FORWARD_BACKWARD, 0.0), left.pop(GPU_IDLE, 0.0)
    compute, bubble = left.pop("compute", None), left.pop("bubble", None)
    if compute is not None:
        parts["compute"] = compute
        parts |= {axis: exposed.get(axis, 0.0) for axis in _MODEL_AXES}
        wait = exposed.get(PIPELINE, 0.0)
        parts["bubble"] = wait if bubble is None else min(bubble, wait)
        parts[PIPELINE] = wait - parts["bubble"]
    for name, value in left.items():
        part = _PHASE_PARTS.get(name, name)
        parts[part] = parts.get(part, 0.0) + value
    if compute is None:
        parts[FORWARD_BACKWARD] = forward_backward
    # Idle while the host waited for data or saved is explained; the rest is the host's dispatch.
    kernels = "compute" if compute is not None else FORWARD_BACKWARD
    dispatch = max(idle - parts["loading"] - parts["checkpoint"] - parts[HOST], 0.0)
    dispatch = min(dispatch, parts[kernels])
    parts[kernels] -= dispatch
    parts[HOST] += dispatch
    parts[OTHER] = seconds - sum(parts.values())
    return {name: value for name, value in parts.items() if value != 0 or name == OTHER}


def forecast_parts(step: StepTime, separates_compute: bool) -> dict[str, float]:
    """Return the forecast of the parts, in seconds, without parts that take no time.

    The bubble includes exposed transfers between stages, and compute those of offloaded tensors.

    Args:
        step: forecast.
        separates_compute: true if the measured step has compute and communication apart.
    """
    inside = {
        "compute": step.compute + step.moving,
        **{axis: getattr(step, axis) for axis in (*_MODEL_AXES, "data", "bubble")},
    }
    if not separates_compute:
        inside = {FORWARD_BACKWARD: sum(inside.values())}
    after = {name: getattr(step, name) for name in ("optimizer", "loading", "checkpoint")}
    return {name: seconds for name, seconds in (inside | after).items() if seconds > 0}


def time_name(column: str) -> str:
    """Return the name of a column of a report's steps as `step_parts` takes it; empty: it is no such time."""
    for prefix, kind in _TIME_PREFIXES.items():
        if column.startswith(prefix):
            return kind + column.removeprefix(prefix)
    return _TIMES.get(column, "")
