"""Re-plan decision after a membership change: gain of a new plan against the cost of a change.

    decision = replan(problem, running, cluster_now, steps_left)

A change of plan costs a restart and the transfer of the state to the new ranks, and gains time on every step
that is left. Where the running plan can continue it does, unless a change gains twice its cost: forecasts err
by a tenth (`StepTime.uncertainty`), and the restart time is no better known. Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, StepTime
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.forecast.plan_forecast import forecast
from wanma.planner.forecast.problem import Problem, device_of, problem_of
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.job_planner import plan_for
from wanma.planner.memory.model_states import state_elements, weight_bytes
from wanma.planner.plan_search import why_not_by_time

RESTART_SECONDS = {"cpu": 0.5, "cuda": 10.0}
"""Restart time, in seconds, from the last step of one plan to the first of the next, by device.

The transfer of the state is not included. CPUs: a failure costs 0.42 s to the end of the next new step
(benchmarks/results/recovery.md). GPUs: an assumption, for drivers and the connections of NCCL. A supervisor
that has measured its own restart time passes that.
"""

STATE_BYTES_PER_SECOND = 0.9e9
"""Rate, in bytes/s, at which a node reads its part of the state from disk and checks its hashes.

It is taken to be that of writing: 0.40 GB in 0.455 s on two cores (docs/performance.md).
"""

DATA_KEYS = frozenset({"dp_replicate", "dp_shard", "micro_batch", "batch_shares", "batch_share_schedule"})
"""Keys of [parallel] that a change of the number of devices may override even where the job sets them."""


@dataclass(frozen=True)
class ChangeCost:
    """Cost of a change to another plan, in seconds and bytes."""

    state_bytes: float
    """Parameters and optimizer state that the ranks must get, in bytes, all replicas counted."""
    state_seconds: float
    """Seconds until the slowest node has its part of the state."""
    restart_seconds: float
    lost_seconds: float
    """Seconds of work that is done again."""

    @property
    def seconds(self) -> float:
        return self.state_seconds + self.restart_seconds + self.lost_seconds


@dataclass(frozen=True)
class Replanned:
    """Re-plan decision and the reason for it."""

    changes: bool
    plan: Plan
    """Plan to continue with: the running one where nothing changes."""
    forecast: Forecast
    cost: ChangeCost | None
    """Cost of the change; None where nothing changes."""
    gained_seconds: float
    """Seconds gained until the job's end, less the cost; infinite where the running plan cannot continue."""
    reason: str


def replan(
    problem: Problem,
    running: Plan,
    cluster_now: Cluster,
    steps_left: int,
    *,
    calibration: Calibration | None = None,
    lost_seconds: float = 0.0,
    restart_seconds: float | None = None,
    state_bytes_per_second: float = STATE_BYTES_PER_SECOND,
    step_seconds: float | None = None,
) -> Replanned:
    """Decide on the plan to continue with on the nodes that are there now.

    A job that fixes its layout keeps it except for its data-parallel sizes, which absorb the change of
    devices.

    Args:
        problem: planning problem of the run.
        running: its plan.
        cluster_now: all nodes that are there, more or fewer than before.
        steps_left: steps left of the job.
        calibration: measurements of the devices.
        lost_seconds: work since the last in-memory checkpoint, in seconds, which a change does again.
        restart_seconds: restart time of a change; None: the device's of `RESTART_SECONDS`.
        state_bytes_per_second: rate at which one node gets its part of the state: the disk's, or the
            network's where the nodes that are left hold it in memory.
        step_seconds: measured time of a step under `running`; forecasts are corrected by it.

    Raises:
        JobError: nothing fits on what is left.
        ValueError: no step is left.
    """
    if steps_left < 1:
        raise ValueError(f"steps_left = {steps_left}: there is nothing to plan for")
    machines = cluster_now.node_count
    seldom = running.synchronization is not None  # searches have no sites: use all nodes
    job = _on(problem.job, machines) if seldom else _opened(problem.job, running, machines)
    # A run that continues keeps its number of ranks per node.
    each = max(math.ceil(running.world_size / problem.cluster.node_count), 1)
    now = problem_of(job, cluster_now, problem.workload, problem.dimensions, calibration, ranks=each)
    obstacle = _obstacle(now, running, each)
    worlds = None if problem.job.parallel.auto else [each * machines]
    try:
        is_untimed = worlds and why_not_by_time(
            job, cluster_now, problem.workload, problem.dimensions, calibration
        )
        if seldom or is_untimed:
            job = _filled(problem.job, running, machines, each)
        planned = plan_for(job, cluster_now, problem.workload, problem.dimensions, calibration, worlds=worlds)
    except JobError:
        if obstacle is not None:
            raise
        return _stays(now, running, "no other plan fits")
    best, expected = planned.plan, planned.forecast
    assert expected is not None, "the problem has a workload"
    cost = change_cost(
        problem,
        best,
        machines,
        restart_seconds=restart_seconds,
        lost_seconds=lost_seconds,
        state_bytes_per_second=state_bytes_per_second,
    )
    if obstacle is not None:
        told = f"change to {best}: {obstacle}; {_cost_text(cost)}"
        return Replanned(True, best, expected, cost, math.inf, told)
    before = forecast(now, running).step
    if (times := _step_times(before, expected.step, step_seconds, running, best)) is None:
        reason = "nobody knows how fast the machines are, so nothing says that it would gain"
        return _stays(now, running, reason)
    old, new, sure = times
    saved = steps_left * (old - new)
    told = f"{duration_text(old)} a step, under {best} {duration_text(new)}{sure}"
    if saved <= 0:
        return _stays(now, running, f"no plan is faster ({told})")
    told = f"{told}: {steps_left:,} steps save {duration_text(saved)}; {_cost_text(cost)}"
    if saved < 2 * cost.seconds:
        return _stays(now, running, told)
    return Replanned(True, best, expected, cost, saved - cost.seconds, f"change: {told}")


def _step_times(
    before: StepTime | None, expected: StepTime | None, step_seconds: float | None, running: Plan, best: Plan
) -> tuple[float, float, str] | None:
    """Return a step's seconds under the running plan and the best one, and a reservation; None: unknown."""
    if before is not None and expected is not None:
        old, new, sure = before.seconds, expected.seconds, ""
        if step_seconds is not None:
            old, new = step_seconds, step_seconds * new / old
    elif step_seconds is not None:
        # Rates are unknown, but the job asks for all nodes: assume linear scaling.
        old, new = step_seconds, step_seconds * running.world_size / best.world_size
        sure = " at best"
    else:
        return None
    return old, new, sure


def change_cost(
    problem: Problem,
    plan: Plan,
    machines: int,
    *,
    restart_seconds: float | None = None,
    lost_seconds: float = 0.0,
    state_bytes_per_second: float = STATE_BYTES_PER_SECOND,
) -> ChangeCost:
    """Return the cost of a change to `plan`.

    Every replica gets a copy of the state; all nodes get their parts at once.
    """
    master = 8 if plan.precision == "fp64" else 4
    weights = weight_bytes(problem.workload, plan, rounds_frozen=problem.software.rounds_frozen)
    optimizer = master * state_elements(problem.workload, problem.job.train)
    state_bytes = (weights + optimizer) * plan.replicas * plan.sites
    restart = RESTART_SECONDS[plan.device] if restart_seconds is None else restart_seconds
    return ChangeCost(state_bytes, state_bytes / machines / state_bytes_per_second, restart, lost_seconds)


def _opened(job: Job, running: Plan, machines: int) -> Job:
    """Return the job with the settings open that a re-plan on `machines` nodes may change."""
    parallel = job.parallel
    kept = parallel.model_dump(exclude_unset=parallel.auto, exclude=set(DATA_KEYS) | {"auto"})
    if not parallel.auto:
        # The state may now be sharded where one rank had all of it, and conversely.
        kept["shard"] = parallel.shard if running.shard != "none" else None
        kept["virtual_stages"] = running.virtual_stages
    # The choice for the former nodes need not suit these.
    kept |= {"hierarchical": _reconsidered(parallel), "bucket_bytes": None}
    section = ParallelSection.model_validate({**kept, "auto": True})
    return _on(job, machines).model_copy(update={"parallel": section})


def _on(job: Job, machines: int) -> Job:
    """Return the job on `machines` nodes."""
    where = job.cluster.model_copy(
        update={"nodes": machines, "rendezvous": job.cluster.rendezvous or "replanned:1", "node_rank": None}
    )
    return job.model_copy(update={"cluster": where})


def _filled(job: Job, running: Plan, machines: int, each: int) -> Job:
    """Return the job with as many data ranks as there is room for, without a forecast of the best layout.

    Args:
        machines: nodes that are there.
        each: ranks per node.

    Raises:
        JobError: the ranks that compute one sample together do not divide those that there is room for.
    """
    ranks, together = each * machines, running.pp * running.cp * running.tp
    if ranks % together:
        raise JobError(
            f"{ranks} ranks on {machines} machines are no multiple of the {together} that compute together "
            f"(pp {running.pp} × cp {running.cp} × tp {running.tp})",
            "choose smaller sizes in [parallel], or parallel = 'auto' after `wanma cluster --calibrate`",
        )
    data = ranks // together
    replicas = data if running.dp_shard == 1 else math.gcd(running.dp_replicate, data)
    if running.synchronization is not None:
        replicas = _replicas_of_sites(running, data)
    sizes: dict[str, Any] = {"dp_replicate": replicas, "dp_shard": data // replicas}
    sizes |= {"batch_shares": [], "batch_share_schedule": []}
    if running.synchronization is not None and job.parallel.sites is not None:
        sizes["sites"] = data * running.sites // running.data_ranks
    if data // replicas * running.cp == 1:
        sizes["shard"] = "none"
    open_again = {"micro_batch": None, "bucket_bytes": None, "hierarchical": _reconsidered(job.parallel)}
    section = job.parallel.model_copy(update={**sizes, **open_again})
    return _on(job, machines).model_copy(update={"parallel": section})


def _replicas_of_sites(running: Plan, data: int) -> int:
    """Return the number of replicas for `data` data ranks, where only whole sites come and go.

    Raises:
        JobError: the data ranks do not make whole sites.
    """
    of_site = running.data_ranks // running.sites
    if data % of_site:
        raise JobError(
            f"{data} data ranks are no whole sites of {of_site} each (parallel.synchronize)",
            "bring back the machines that are missing, or choose smaller sizes in [parallel]",
        )
    return data // running.dp_shard


def _reconsidered(parallel: ParallelSection) -> Literal["auto", False]:
    return False if parallel.hierarchical is False else "auto"


def _obstacle(now: Problem, running: Plan, each: int) -> str | None:
    """Return the reason why the run cannot continue under its plan, or None."""
    (node,) = now.cluster.nodes
    most = node.count * (min(len(node.devices), each) if node.devices else each)
    if running.device != device_of(now.job, now.cluster):
        return f"it runs on {running.device}, and these machines compute on {device_of(now.job, now.cluster)}"
    if running.world_size > most:
        return f"{running.world_size} ranks run now, and there is room for {most}"
    needed = forecast(now, running).memory_bytes
    if needed > now.memory_bytes:
        return f"a rank needs {bytes_text(needed)} of {bytes_text(now.memory_bytes)} there"
    return None


def _stays(now: Problem, running: Plan, why: str) -> Replanned:
    return Replanned(False, running, forecast(now, running), None, 0.0, f"stay: {why}")


def _cost_text(cost: ChangeCost) -> str:
    parts = [
        f"{bytes_text(cost.state_bytes)} of state {duration_text(cost.state_seconds)}",
        f"restart {duration_text(cost.restart_seconds)}",
    ]
    if cost.lost_seconds:
        parts.append(f"lost work {duration_text(cost.lost_seconds)}")
    return f"a change costs {duration_text(cost.seconds)} ({', '.join(parts)})"
