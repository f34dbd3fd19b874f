"""Report of each rank's own work in a step to the supervisor, which compares it with that of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import rank_timing_obstacle
from wanma.job.run.worker import StepWork, SupervisorClient
from wanma.parallel.mesh.parallel_mesh import ParallelMesh


class RankTimingReporter:
    """Reporter of a rank's data and compute seconds, and of its GPU's allocator, after every step.

    It writes them on the page that the supervisor reads anyway: no collective, no system call. Compute
    seconds of forward and backward are those of `ComputeTimer`: on CPUs without any wait in them, in every
    mesh dimension; on GPUs where no rank waits in a forward. Elsewhere a rank is judged by its waiting for
    data alone.
    """

    def __init__(self, plan: Plan, parallel_mesh: ParallelMesh, control: SupervisorClient) -> None:
        self._plan, self._data_rank, self._report = plan, parallel_mesh.data_rank, control.report_work
        self._pipeline_rank = parallel_mesh.coordinate("pp")
        splits_no_sample = plan.tp == plan.cp == 1 and rank_timing_obstacle(plan) is None
        self._reports_compute = plan.device == "cpu" or splits_no_sample
        self._global_batch, self._share = 0, 1.0

    def report_step(
        self, phases: Mapping[str, float], compute_seconds: float, global_batch: int, plan: Plan
    ) -> None:
        """Report a completed step.

        Args:
            phases: seconds by phase, as in the step's record.
            compute_seconds: compute seconds of forward and backward, by `ComputeTimer`.
            global_batch: samples of the step.
            plan: plan with the batch shares of the step.
        """
        if plan is not self._plan:
            self._plan, self._global_batch = plan, 0
        if global_batch != self._global_batch:
            self._global_batch, self._share = global_batch, self._share_of(global_batch)
        compute = compute_seconds / self._share if self._reports_compute else 0.0
        memory = allocator_state(plan.device)
        self._report(
            StepWork(self._pipeline_rank, phases["data"], compute, memory.cached_bytes, memory.retries)
        )

    def _share_of(self, global_batch: int) -> float:
        """Return this rank's samples over the mean of the data ranks, where the batch does not divide evenly.

        It is one where the plan made shares unequal: they are to take equally long, on unequal devices.
        """
        plan = self._plan
        if plan.batch_shares or plan.placement:
            return 1.0
        local_rows = len(plan.batch_rows(global_batch, self._data_rank))
        return local_rows * plan.data_parallel_size / global_batch if local_rows else float("inf")


@dataclass(frozen=True)
class AllocatorState:
    """State of PyTorch's caching allocator on the GPU of this process."""

    cached_bytes: int
    """Memory that it holds beyond the peak of its tensors; it frees this before an allocation fails."""
    retries: int
    """Allocations so far for which the GPU had no room until the cache was freed."""


def allocator_state(device: str) -> AllocatorState:
    """Return the state of the allocator, for which the host waits for no kernel; zeros on the CPU."""
    if device != "cuda":
        return AllocatorState(0, 0)
    # It is read in each step: the nested form spares the flattening and sorting of `memory_stats`.
    statistics = torch.cuda.memory_stats_as_nested_dict()
    reserved = statistics["reserved_bytes"]["all"]["current"]
    cached = reserved - statistics["allocated_bytes"]["all"]["peak"]
    return AllocatorState(max(cached, 0), statistics["num_alloc_retries"])
