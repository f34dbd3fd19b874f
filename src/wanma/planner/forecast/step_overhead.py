"""What comes around a step's computing: waiting for its data before, saving the state after.

Loader threads read ahead while the model trains, and a thread writes what a save has copied (`data.loader`,
`checkpoint.writer`): what they do costs a step only where it takes longer than all the rest of it. The rates
are of the runtime's own code on one core, measured on a server's processor of 2023; what a run took
stands in its report. Pure functions, without torch.
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
"""Of one micro-batch in a loader thread, whatever it holds: finding where its samples are."""
TOKEN_SECONDS = 8e-9
"""Of one of its tokens: read from a mapped file, widened to 64 bits, and copied as input and as target."""
VALUE_SECONDS = 2.5e-9
"""Of one number of an image likewise: cast to 32 bits, shifted and scaled."""
STORED_BYTES = {"tokens": 4.0, "images": 1.0}
"""Of a token or a pixel in its file, which is read from disk as if nothing of it were in memory."""
HANDED_SECONDS = 100e-6
"""Of taking a step that is ready from the loader, and asking for the next one."""

SNAPSHOT_BYTES_PER_SECOND = 6.5e9
"""At which a rank on a CPU copies its part of the state aside while training waits: 0.2 GB in 0.030 s,
measured (docs/performance.md)."""
HASH_BYTES_PER_SECOND = 0.65e9
"""Of SHA-256 on one core, beside the writing."""


@dataclass(frozen=True)
class Around:
    """Of a step under one plan, whatever the step itself takes."""

    load_seconds: float
    """Of reading a step's samples in the background; steps that are loaded at once share it."""
    handed_seconds: float
    """Of taking them, while training waits."""
    copy_seconds: float
    """Of one save, while training waits."""
    write_seconds: float
    """Of one save, in the background."""
    disturbing_seconds: float
    """Of one save, that its hash takes from computing: on a CPU, all of whose cores compute."""
    every: int
    """Steps from one save to the next; 0: only at the end."""
    is_last_due: bool
    """Whether the last step saves anyway."""

    def loading(self, step_seconds: float) -> float:
        """Waiting for data, in a step that takes so long without."""
        return self.handed_seconds + max(0.0, self.load_seconds - step_seconds)

    def saving(self, step_seconds: float) -> float:
        """A step's share of saves, where it takes so long without: of the copy, of what the hash disturbs,
        and of waiting for the save before it, whose buffer it needs."""
        if not self.every:
            return 0.0
        own = self.copy_seconds + self.disturbing_seconds
        return own / self.every + max(0.0, self.write_seconds / self.every - step_seconds)

    def with_both(self, step_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of steps with both; never less for a longer one."""
        seconds = np.maximum(step_seconds, self.load_seconds) + self.handed_seconds
        if self.every:
            own = self.copy_seconds + self.disturbing_seconds
            seconds = np.maximum(seconds, self.write_seconds / self.every) + own / self.every
        return seconds

    @property
    def at_end_seconds(self) -> float:
        """Once a run: of the last save, whose writing is waited for."""
        return self.write_seconds + (0.0 if self.is_last_due else self.copy_seconds)


def around(problem: Problem, plan: Plan) -> Around:
    """Of `plan`'s steps."""
    train, every = problem.job.train, problem.job.checkpoint.every_steps
    size = _saved_bytes(problem, plan)
    copied, written = _save_seconds(problem, plan, size)
    hashed = size / HASH_BYTES_PER_SECOND / plan.threads_per_rank if plan.device == "cpu" else 0.0
    due = every if every <= train.steps else 0
    is_last_due = due > 0 and train.steps % due == 0
    load = _load_seconds(problem, plan)
    return Around(load, HANDED_SECONDS, copied, written, hashed, due, is_last_due)


def _load_seconds(problem: Problem, plan: Plan) -> float:
    """All ranks of a data rank load the same; of one's own data set nobody knows what a sample takes."""
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
    """Of a rank's part of a save; replicas of a part share it."""
    workload, train = problem.workload, problem.job.train
    rounds = problem.software.rounds_frozen
    average = workload.parameters * (workload.trained_share if rounds else 1.0)
    elements = state_elements(workload, train) + (average if train.weight_average > 0 else 0.0)
    saved = weight_bytes(workload, plan, rounds_frozen=rounds) + master_bytes(plan) * elements
    whole = workload.parameters / plan.tp / plan.pp
    kept = error_bytes(plan, whole, whole / plan.shard_ranks)
    return saved / plan.world_size + kept


def _save_seconds(problem: Problem, plan: Plan, size: float) -> tuple[float, float]:
    """(copy, write) of `size` bytes on each rank."""
    host = problem.machine.host
    if "disk" in (plan.offload_parameters, plan.offload_optimizer):
        # What memory has no room for is copied into files too (`trainer.Trainer`).
        copied = size / host.read_rate + size / host.write_rate
    elif plan.device == "cpu" or plan.offload_parameters == plan.offload_optimizer == "host":
        copied = size / SNAPSHOT_BYTES_PER_SECOND
    else:
        copied = size / host.link_bytes_per_second
    here = max(problem.machine.devices // problem.cluster.node_count, 1)
    disk = host.disk_bytes_per_second * here / min(plan.world_size, here)  # those that there are share it
    return copied, size / min(disk, HASH_BYTES_PER_SECOND)
