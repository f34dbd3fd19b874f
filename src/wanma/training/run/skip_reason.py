"""Reason of an update that the job's policy for wrong numbers leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from torch import Tensor

from wanma.job.sections.train import TrainSection
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.training.checkpointing.training_state import TrainingState
from wanma.training.optimizer.loss_scale import MIN_SCALE
from wanma.training.step.anomaly_detection import AnomalyPolicy, enforce_policy
from wanma.training.step.parameter_update import (
    StepTotals,
    describe_missing_targets,
    describe_non_finite,
)


def find_skip_reason(
    totals: StepTotals,
    loss_sum: Tensor,
    state: TrainingState,
    train: TrainSection,
    parallel_mesh: ParallelMesh,
    *,
    retried_steps: Collection[int],
    non_finite_sample_names: Callable[[], list[str]],
    sample_names: Callable[[], list[str]],
    record_event: Callable[..., object],
) -> str:
    """Return the reason why policy skips the update; empty where it is made, or fp16's loss scale decides.

    Every rank calls it, before the update of the step.

    Args:
        totals: numbers of the step, the same on all ranks.
        loss_sum: sum of this rank's losses, as in `reduce_step_totals`.
        state: state before the update, whose history the step is compared with.
        train: section with the policies.
        parallel_mesh: device meshes of the plan.
        retried_steps: steps that are being made again already.
        non_finite_sample_names: function that names this rank's samples that are not finite themselves.
        sample_names: function that names all of this rank's samples.
        record_event: function that records an event, by its kind and fields.

    Raises:
        AllRanksError: the policy is another; the same on all ranks.
    """
    step = state.step + 1
    policy: AnomalyPolicy = train.non_finite
    key, remedy = "train.non_finite", ""
    if not totals.target_count:
        reason = describe_missing_targets(parallel_mesh, sample_names())
        remedy = "give these samples targets or remove them"
    elif totals.is_finite:
        policy, key = train.spike, "train.spike"
        if policy == "ignore":
            return ""
        reason = state.anomaly_detector.describe_spike(
            totals.loss, totals.gradient_norm, train.spike_deviations
        )
    elif state.loss_scale.value > MIN_SCALE and math.isfinite(totals.loss):
        return ""
    else:
        reason, ranks, samples = describe_non_finite(
            totals, loss_sum, state.named_optimizer, parallel_mesh, non_finite_sample_names()
        )
        record_event("non_finite", step=step, ranks=ranks, samples=samples)
    if reason:
        enforce_policy(step, reason, policy, key, retried_steps, remedy)
        state.anomaly_detector.record_skip(step, remedy)
    return reason
