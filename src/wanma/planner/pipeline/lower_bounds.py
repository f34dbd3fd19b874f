"""Lower bounds of a pipeline's time without simulating its schedule: longest of several paths through it.

Each bound is the length of a chain of operations in which each one waits for the one before, so that no
pipeline is faster (`simulate_pipeline` simulates all). Many variants of one schedule are computed at once, as
arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wanma.job.plan.stage_order import V_SHAPED_SCHEDULES
from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.simulation import default_in_flight

Array = npt.NDArray[np.float64]
Number = float | npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""Number for all variants, or one for each of shape (variants, 1)."""


def rank_compute_seconds(schedule: Schedule, costs: Array, pp: int, micro_batches: Number) -> Array:
    """Return the seconds in which each rank computes, of shape (variants, ranks).

    Args:
        costs: seconds of one micro-batch in every stage, of shape (variants, stages).
    """
    if schedule in V_SHAPED_SCHEDULES:
        busy: Array = costs[:, :pp] + costs[:, : -pp - 1 : -1]
    else:
        busy = costs.reshape(len(costs), -1, pp).sum(axis=1)
    return micro_batches * busy


def pipeline_lower_bound(
    schedule: Schedule,
    forward: Array,
    backward: Array,
    backward_weight: Array | None,
    pp: int,
    micro_batches: Number,
    send_seconds: Number,
) -> Array:
    """Return the lower bound of every variant in seconds, of shape (variants,).

    Args:
        forward: seconds of one micro-batch in every stage, of shape (variants, stages).
        backward: the same for backward.
        backward_weight: the same for weight gradients, where the schedule splits backward.
    """
    passes = forward + backward
    busy: Array = rank_compute_seconds(
        schedule, passes if backward_weight is None else passes + backward_weight, pp, micro_batches
    )
    if pp == 1:
        single: Array = busy[:, 0]
        return single
    if backward_weight is not None:
        return _split_backward_bound(schedule, forward, backward, busy, pp, micro_batches, send_seconds)
    if schedule == "gpipe":
        # All forwards pass the slowest stage one by one, then all backwards do.
        slowest = forward.max(axis=1, keepdims=True) + backward.max(axis=1, keepdims=True)
        traversal = passes.sum(axis=1, keepdims=True) + 2 * (passes.shape[1] - 1) * send_seconds
        pipelined: Array = traversal + (micro_batches - 1) * slowest
        return pipelined[:, 0]
    # Before rank r begins, one forward has passed the r stages before its first one; and after its last
    # backward, which is of that stage, one backward passes them.
    ramp = np.zeros_like(busy)
    np.cumsum(passes[:, : pp - 1] + 2 * send_seconds, axis=1, out=ramp[:, 1:])
    bound: Array = (ramp + busy).max(axis=1, keepdims=True)
    if schedule == "1f1b":
        # The first rank begins forward j + pp after backward j, which has been through all stages.
        rounds = (micro_batches - 1) // pp
        remaining = micro_batches - rounds * pp
        zigzag = passes.sum(axis=1, keepdims=True) + 2 * (pp - 1) * send_seconds
        warm = np.minimum(np.arange(pp - 1, -1, -1), rounds * pp)
        tail = (ramp + remaining * passes + warm * backward).max(axis=1, keepdims=True)
        bound = np.maximum(bound, rounds * zigzag + tail)
    else:
        traversal = passes.sum(axis=1, keepdims=True) + 2 * (passes.shape[1] - 1) * send_seconds
        bound = np.maximum(bound, traversal)
    return bound[:, 0]


def _split_backward_bound(
    schedule: Schedule,
    forward: Array,
    backward: Array,
    compute_seconds: Array,
    pp: int,
    micro_batches: Number,
    send_seconds: Number,
) -> Array:
    """Return the lower bound of schedules with split backward, of shape (variants,)."""
    assert schedule in SPLIT_BACKWARD
    stages = forward.shape[1]
    begins = np.zeros_like(compute_seconds)
    np.cumsum(forward[:, : pp - 1] + send_seconds, axis=1, out=begins[:, 1:])
    # The first backward of rank r comes after all forwards and the backwards down to its last stage; until
    # then it may run as many forwards as it can hold.
    v_shaped = schedule in V_SHAPED_SCHEDULES
    hops = (stages - 2 if v_shaped else stages - 1) * send_seconds
    down = forward.sum(axis=1, keepdims=True) + hops
    return_seconds = np.zeros_like(compute_seconds)
    last = backward[:, :-pp:-1]  # of the last stages, from the last one on
    if v_shaped:
        np.cumsum(last + send_seconds, axis=1, out=return_seconds[:, 1:])
        dearest = np.maximum(forward[:, :pp], forward[:, : -pp - 1 : -1])
    else:
        return_seconds[:, :-1] = np.cumsum(last + send_seconds, axis=1)[:, ::-1]
        dearest = forward.reshape(len(forward), -1, pp).max(axis=1)
    in_flight = np.minimum(default_in_flight(schedule, pp, stages // pp), stages // pp * micro_batches)
    wait = down + return_seconds - in_flight * dearest
    bound: Array = (compute_seconds + np.maximum(begins, wait)).max(axis=1)
    return bound
