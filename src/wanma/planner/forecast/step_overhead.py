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

from wanma.job.plan.plan import Plan
from wanma.planner.cost.gradient_collectives import error_bytes
from wanma.planner.cost.offload import master_bytes
from wanma.planner.forecast.problem import Problem
from wanma.planner.memory.model_states import state_elements, weight_bytes

BATCH_SECONDS = 250e-6
"""Seconds of a loader thread per micro-batch, whatever its size: locating its samples."""
TOKEN_SECONDS = 8e-9
"""Seconds of a loader thread per token: read of a mapped file, cast to 64 bits, copy to input and target."""
VALUE_SECONDS = 2.5e-9
"""Seconds of a loader thread per number of an image: cast to 32 bits, shift and scale."""
STORED_BYTES = {"tokens": 4.0, "images": 1.0}
"""Bytes of a token or a pixel in its file, all of which count as read from disk."""
HANDED_SECONDS = 100e-6
"""Seconds to take a loaded step from the loader and request the next one."""

SNAPSHOT_BYTES_PER_SECOND = 6.5e9
"""Rate, in bytes/s, at which a rank on a CPU copies its part of the state while training waits.

Measured: 0.2 GB in 0.030 s (docs/performance.md).
"""
HASH_BYTES_PER_SECOND = 0.65e9
"""Rate of SHA-256 on one core beside the write, in bytes/s."""


@dataclass(frozen=True)
class Around:
    """Overheads of a step under one plan, independent of the step's own time."""

    load_seconds: float
    """Seconds to read a step's samples in the background, divided by the steps that are loaded at once."""
    handed_seconds: float
    """Seconds to take the samples from the loader, while training waits."""
    copy_seconds: float
    """Seconds to copy the state of one save, while training waits."""
    write_seconds: float
    """Seconds to write one save, in the background."""
    disturbing_seconds: float
    """Seconds of computing that one save's hash takes away: on a CPU, all of whose cores compute."""
    every: int
    """Steps from one save to the next; 0: only at the end."""
    is_last_due: bool
    """True if the last step saves anyway."""

    def loading(self, step_seconds: float) -> float:
        """Return the seconds for which a step of `step_seconds` waits for data."""
        return self.handed_seconds + max(0.0, self.load_seconds - step_seconds)

    def saving(self, step_seconds: float) -> float:
        """Return the share of saves in a step of `step_seconds`, in seconds.

        It counts the copy, the computing that the hash takes away, and the wait for the save before it, whose
        buffer it needs.
        """
        if not self.every:
            return 0.0
        own = self.copy_seconds + self.disturbing_seconds
        return own / self.every + max(0.0, self.write_seconds / self.every - step_seconds)

    def with_both(self, step_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return seconds of steps with both overheads; monotonic in the steps' own time."""
        seconds = np.maximum(step_seconds, self.load_seconds) + self.handed_seconds
        if self.every:
            own = self.copy_seconds + self.disturbing_seconds
            seconds = np.maximum(seconds, self.write_seconds / self.every) + own / self.every
        return seconds

    @property
    def at_end_seconds(self) -> float:
        """Return the seconds of the last save, once a run, whose write is waited for."""
        return self.write_seconds + (0.0 if self.is_last_due else self.copy_seconds)


def around(problem: Problem, plan: Plan) -> Around:
    """Return the step overheads of `plan`."""
    train, every = problem.job.train, problem.job.checkpoint.every_steps
    size = _saved_bytes(problem, plan)
    copied, written = _save_seconds(problem, plan, size)
    hashed = size / HASH_BYTES_PER_SECOND / plan.threads_per_rank if plan.device == "cpu" else 0.0
    due = every if every <= train.steps else 0
    is_last_due = due > 0 and train.steps % due == 0
    load = _load_seconds(problem, plan)
    return Around(load, HANDED_SECONDS, copied, written, hashed, due, is_last_due)


def _load_seconds(problem: Problem, plan: Plan) -> float:
    """Return the seconds to load a step's samples in the background, divided by the steps loaded at once.

    All ranks of a data rank load the same samples. The cost of a user's own data set is unknown and counts as
    0.
    """
    data = problem.job.data
    if data.factory is not None:
        return 0.0
    images = problem.workload.input_elements_per_sample
    if images is None:
        number, each, stored = problem.sequence + 1.0, TOKEN_SECONDS, STORED_BYTES["tokens"]
    else:
        number, each, stored = images, VALUE_SECONDS, STORED_BYTES["images"]
    each += stored / problem.machine.host.disk_bytes_per_second
    at_once = min(data.workers, data.prefetch)
    micro_batches, samples = plan.accumulation(problem.global_batch), plan.most_rows(problem.global_batch)
    return (micro_batches * BATCH_SECONDS + samples * number * each) / at_once


def _saved_bytes(problem: Problem, plan: Plan) -> float:
    """Return the bytes of a rank's part of a save; replicas of a part share it."""
    workload, train = problem.workload, problem.job.train
    rounds = problem.software.rounds_frozen
    average = workload.parameters * (workload.trained_share if rounds else 1.0)
    elements = state_elements(workload, train) + (average if train.weight_average > 0 else 0.0)
    saved = weight_bytes(workload, plan, rounds_frozen=rounds) + master_bytes(plan) * elements
    whole = workload.parameters / plan.tp / plan.pp
    kept = error_bytes(plan, whole, whole / plan.shard_ranks)
    return saved / plan.world_size + kept


def _save_seconds(problem: Problem, plan: Plan, size: float) -> tuple[float, float]:
    """Return (copy, write) seconds of a save of `size` bytes on each rank."""
    host = problem.machine.host
    if "disk" in (plan.offload_parameters, plan.offload_optimizer):
        # State on disk is copied into files, for want of memory (`Trainer`).
        copied = size / host.read_rate + size / host.write_rate
    elif plan.device == "cpu" or plan.offload_parameters == plan.offload_optimizer == "host":
        copied = size / SNAPSHOT_BYTES_PER_SECOND
    else:
        copied = size / host.link_bytes_per_second
    here = max(problem.machine.devices // problem.cluster.node_count, 1)
    disk = host.disk_bytes_per_second * here / min(plan.world_size, here)  # the node's ranks share it
    return copied, size / min(disk, HASH_BYTES_PER_SECOND)
