"""Step overhead outside computing: wait for data before, save of the training state after.

Loader threads read ahead while the model trains, and a thread writes what a save has copied
(`data.step_loader`, `checkpoint.save`): they cost a step only where they take longer than all the rest of it.
The rates are of the runtime's own code on one core, measured on a server's processor of 2023; a run's
measured overhead is in its report. Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wanma.job.forecast.forecast import CheckpointForecast
from wanma.job.plan.plan import Plan
from wanma.planner.cost.gradient_collectives import error_feedback_bytes
from wanma.planner.cost.offload import keeps_state_on_disk, master_weight_bytes
from wanma.planner.forecast.data_loading import load_cost
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.memory.model_states import optimizer_state_elements, weight_bytes

HANDOFF_SECONDS = 100e-6
"""Seconds to take a loaded step from the loader and request the next one."""

CPU_COPY_BYTES_PER_SECOND = 6.5e9
"""Rate, in bytes/s, at which a rank on a CPU copies its part of the state while training waits.

Measured: 0.2 GB in 0.030 s (docs/results/performance.md).
"""
HASH_BYTES_PER_SECOND = 0.65e9
"""Rate of SHA-256 on one core beside the write, in bytes/s."""


@dataclass(frozen=True)
class StepOverhead:
    """Overheads of a step under one plan, independent of the step's own time."""

    load_seconds: float
    """Seconds to read a step's samples on the node in the background, divided by what works on them at once.
    """
    handoff_seconds: float
    """Seconds to take the samples from the loader, while training waits."""
    checkpoint_copy_seconds: float
    """Seconds to copy the state of one save, while training waits."""
    checkpoint_write_seconds: float
    """Seconds to write one save, in the background."""
    hash_slowdown_seconds: float
    """Seconds of computing that one save's hash takes away: on a CPU, all of whose cores compute."""
    checkpoint_every_steps: int
    """Steps from one save to the next; 0: only at the end."""
    saves_at_last_step: bool
    """True if the last step saves anyway."""
    store_load_seconds: float = 0.0
    """As `load_seconds`, for samples that come from a store."""
    store_share: float = 0.0
    """Share of the steps whose samples come from a store, 0 .. 1."""
    checkpoint_bytes: float = 0.0
    """Bytes of one save, of all ranks."""

    def loading_stall(self, step_seconds: float) -> float:
        """Return the seconds for which a step of `step_seconds` waits for data, mean over the run."""
        local = max(0.0, self.load_seconds - step_seconds)
        from_store = max(0.0, self.store_load_seconds - step_seconds)
        return self.handoff_seconds + (1 - self.store_share) * local + self.store_share * from_store

    def checkpoint_stall(self, step_seconds: float) -> float:
        """Return the share of saves in a step of `step_seconds`, in seconds.

        It counts the copy, the computing that the hash takes away, and the wait for the save before it, whose
        buffer it needs.
        """
        if not self.checkpoint_every_steps:
            return 0.0
        save_seconds = self.checkpoint_copy_seconds + self.hash_slowdown_seconds
        return save_seconds / self.checkpoint_every_steps + max(
            0.0, self.checkpoint_write_seconds / self.checkpoint_every_steps - step_seconds
        )

    def checkpoint_forecast(self, step_seconds: float) -> CheckpointForecast:
        """Return the forecast of one save, beside steps of `step_seconds` without saves."""
        interval_seconds = self.checkpoint_every_steps * step_seconds
        waited = max(0.0, self.checkpoint_write_seconds - interval_seconds) if interval_seconds else 0.0
        stall_seconds = self.checkpoint_copy_seconds + waited
        return CheckpointForecast(round(self.checkpoint_bytes), stall_seconds, self.checkpoint_write_seconds)

    def with_stalls(self, step_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return seconds of steps with both overheads; monotonic in the steps' own time."""
        seconds = np.maximum(step_seconds, self.load_seconds)
        if self.store_share:
            from_store = np.maximum(step_seconds, self.store_load_seconds)
            seconds = (1 - self.store_share) * seconds + self.store_share * from_store
        seconds = seconds + self.handoff_seconds
        if self.checkpoint_every_steps:
            save_seconds = self.checkpoint_copy_seconds + self.hash_slowdown_seconds
            seconds = (
                np.maximum(seconds, self.checkpoint_write_seconds / self.checkpoint_every_steps)
                + save_seconds / self.checkpoint_every_steps
            )
        return seconds

    @property
    def final_checkpoint_seconds(self) -> float:
        """Return the seconds of the last save, once a run, whose write is waited for."""
        return self.checkpoint_write_seconds + (
            0.0 if self.saves_at_last_step else self.checkpoint_copy_seconds
        )


def step_overhead(problem: PlanningProblem, plan: Plan) -> StepOverhead:
    """Return the step overheads of `plan`."""
    train, interval = problem.job.train, problem.job.checkpoint.every_steps
    size = _checkpoint_bytes(problem, plan)
    copied, written = _checkpoint_seconds(problem, plan, size)
    hashed = size / HASH_BYTES_PER_SECOND / plan.threads_per_rank if plan.device == "cpu" else 0.0
    due = interval if interval <= train.steps else 0
    is_last_due = due > 0 and train.steps % due == 0
    load = load_cost(problem, plan)
    return StepOverhead(
        load.local_seconds,
        HANDOFF_SECONDS,
        copied,
        written,
        hashed,
        due,
        is_last_due,
        load.store_seconds,
        load.store_share,
        size * plan.world_size,
    )


def _checkpoint_bytes(problem: PlanningProblem, plan: Plan) -> float:
    """Return the bytes of a rank's part of a save; replicas of a part share it."""
    workload, train = problem.workload, problem.job.train
    rounds = problem.framework.casts_frozen_weights
    average = workload.parameters * (workload.trainable_share if rounds else 1.0)
    elements = optimizer_state_elements(workload, train) + (average if train.weight_average > 0 else 0.0)
    saved = weight_bytes(workload, plan, casts_frozen_weights=rounds) + master_weight_bytes(plan) * elements
    rank_parameters = workload.dense_parameters / plan.tp / plan.pp
    feedback = error_feedback_bytes(plan, rank_parameters, rank_parameters / plan.shard_group_size)
    return saved / plan.world_size + feedback


def _checkpoint_seconds(problem: PlanningProblem, plan: Plan, size: float) -> tuple[float, float]:
    """Return (copy, write) seconds of a save of `size` bytes on each rank."""
    host = problem.hardware.host
    if keeps_state_on_disk(plan):
        # State on disk is copied into files, for want of memory (`Trainer`).
        copied = size / host.read_rate + size / host.write_rate
    elif plan.device == "cpu" or plan.offload_parameters == plan.offload_optimizer == "host":
        copied = size / CPU_COPY_BYTES_PER_SECOND
    else:
        copied = size / host.link_bytes_per_second
    devices_per_node = max(problem.hardware.device_count // problem.cluster.node_count, 1)
    disk = (
        host.disk_bytes_per_second * devices_per_node / min(plan.world_size, devices_per_node)
    )  # the node's ranks share it
    return copied, size / min(disk, HASH_BYTES_PER_SECOND)
