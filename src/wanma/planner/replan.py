"""Re-plan decision after a membership change: gain of a new plan against the cost of a change.

    decision = replan(problem, running, available_cluster, remaining_steps)

A change of plan costs a restart and the transfer of the state to the new ranks, and gains time on every step
that is left. Where the running plan can continue it does, unless a change gains twice its cost: forecasts err
by a tenth (`StepTime.uncertainty`), and the restart time is no better known. Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, StepTime
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.cost.offload import master_weight_bytes
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningInputs, PlanningProblem, select_device_type
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.job_planner import PlanResult, plan_for_job
from wanma.planner.memory.model_states import optimizer_state_elements, weight_bytes
from wanma.planner.plan_search import time_search_unavailable_reason

RESTART_SECONDS = {"cpu": 0.5, "cuda": 10.0}
"""Restart time, in seconds, from the last step of one plan to the first of the next, by device.

The transfer of the state is not included. CPUs: a failure costs 0.42 s to the end of the next new step
(docs/results/recovery.md). GPUs: an assumption, for drivers and the connections of NCCL. A supervisor
that has measured its own restart time passes that.
"""

STATE_BYTES_PER_SECOND = 0.9e9
"""Rate, in bytes/s, at which a node reads its part of the state from disk and checks its hashes.

It is taken to be that of writing: 0.40 GB in 0.455 s on two cores (docs/results/performance.md).
"""

DATA_PARALLEL_KEYS = frozenset(
    {"dp_replicate", "dp_shard", "micro_batch", "batch_shares", "batch_share_schedule"}
)
"""Keys of [parallel] that a change of the number of devices may override even where the job sets them."""


@dataclass(frozen=True)
class ReplanCost:
    """Cost of a change to another plan, in seconds and bytes."""

    state_bytes: float
    """Parameters and optimizer state that the ranks must get, in bytes, all replicas counted."""
    state_seconds: float
    """Seconds until the slowest node has its part of the state."""
    restart_seconds: float
    lost_work_seconds: float
    """Seconds of work that is done again."""

    @property
    def seconds(self) -> float:
        return self.state_seconds + self.restart_seconds + self.lost_work_seconds


@dataclass(frozen=True)
class ReplanResult:
    """Re-plan decision and the reason for it."""

    is_change: bool
    plan: Plan
    """Plan to continue with: the running one where nothing changes."""
    forecast: Forecast
    cost: ReplanCost | None
    """Cost of the change; None where nothing changes."""
    net_gain_seconds: float
    """Seconds gained until the job's end, less the cost; infinite where the running plan cannot continue."""
    reason: str


def replan(
    problem: PlanningProblem,
    current_plan: Plan,
    available_cluster: Cluster,
    remaining_steps: int,
    *,
    calibration: Calibration | None = None,
    lost_work_seconds: float = 0.0,
    restart_seconds: float | None = None,
    state_bytes_per_second: float = STATE_BYTES_PER_SECOND,
    step_seconds: float | None = None,
) -> ReplanResult:
    """Decide on the plan to continue with on the nodes that are there now.

    A job that fixes its layout keeps it except for its data-parallel sizes, which absorb the change of
    devices; with as many ranks as its sizes give, nothing of it changes.

    Args:
        problem: planning problem of the run.
        current_plan: its plan.
        available_cluster: all nodes that are there, more or fewer than before.
        remaining_steps: steps left of the job.
        calibration: measurements of the devices.
        lost_work_seconds: work since the last in-memory checkpoint, in seconds, which a change does again.
        restart_seconds: restart time of a change; None: the device's of `RESTART_SECONDS`.
        state_bytes_per_second: rate at which one node gets its part of the state: the disk's, or the
            network's where the nodes that are left hold it in memory.
        step_seconds: measured time of a step under `current_plan`; forecasts are corrected by it.

    Raises:
        JobError: nothing fits on what is left.
        ValueError: no step is left.
    """
    if remaining_steps < 1:
        raise ValueError(f"steps_left = {remaining_steps}: no step is left to plan for")
    machines = available_cluster.node_count
    # A run that continues keeps its number of ranks per node.
    ranks_per_node = max(math.ceil(current_plan.world_size / problem.cluster.node_count), 1)
    has_sites = current_plan.synchronization is not None  # searches have no sites: use all nodes
    is_as_written = _fills_job_layout(problem.job.parallel, ranks_per_node * machines)
    job = (
        _job_on_nodes(problem.job, machines)
        if has_sites or is_as_written
        else _job_with_open_layout(problem.job, current_plan, machines, ranks_per_node)
    )
    inputs = PlanningInputs(job, available_cluster, problem.workload, problem.dimensions, calibration)
    now = inputs.problem(ranks=ranks_per_node)
    obstacle = _infeasible_reason(now, current_plan, ranks_per_node)
    worlds = None if problem.job.parallel.auto else [ranks_per_node * machines]
    try:
        is_untimed = worlds and time_search_unavailable_reason(inputs)
        if (has_sites or is_untimed) and not is_as_written:
            job = _job_with_max_replicas(problem.job, current_plan, machines, ranks_per_node)
        planned = plan_for_job(replace(inputs, job=job), world_sizes=worlds)
    except JobError:
        if obstacle is not None:
            raise
        return _keep_plan(now, current_plan, "no other plan fits")
    best, expected = planned.plan, planned.forecast
    assert expected is not None, "the problem has a workload"
    cost = replan_cost(
        problem,
        best,
        machines,
        restart_seconds=restart_seconds,
        lost_work_seconds=lost_work_seconds,
        state_bytes_per_second=state_bytes_per_second,
    )
    if obstacle is not None:
        reason = f"re-plan to {best}: {obstacle}; {_cost_text(cost)}"
        return ReplanResult(True, best, expected, cost, math.inf, reason)
    return _change_if_faster(now, current_plan, planned, cost, remaining_steps, step_seconds)


def _change_if_faster(
    problem: PlanningProblem,
    current_plan: Plan,
    planned: PlanResult,
    cost: ReplanCost,
    remaining_steps: int,
    step_seconds: float | None,
) -> ReplanResult:
    """Return the change to the planned plan if it saves twice its cost, else the current plan."""
    best, expected = planned.plan, planned.forecast
    assert expected is not None, "the problem has a workload"
    times = _step_times(
        forecast_plan(problem, current_plan).step, expected.step, step_seconds, current_plan, best
    )
    if times is None:
        reason = "no step-time forecast for these nodes, so the gain is unknown"
        return _keep_plan(problem, current_plan, reason)
    old, new, reservation = times
    saved = remaining_steps * (old - new)
    comparison = f"{duration_text(old)} per step now, {duration_text(new)}{reservation} under {best}"
    if saved <= 0:
        return _keep_plan(problem, current_plan, f"no plan is faster ({comparison})")
    comparison = f"{comparison}: {remaining_steps:,} steps save {duration_text(saved)}; {_cost_text(cost)}"
    if saved < 2 * cost.seconds:
        return _keep_plan(problem, current_plan, comparison)
    return ReplanResult(True, best, expected, cost, saved - cost.seconds, f"re-plan: {comparison}")


def _step_times(
    current: StepTime | None,
    expected: StepTime | None,
    step_seconds: float | None,
    current_plan: Plan,
    best: Plan,
) -> tuple[float, float, str] | None:
    """Return a step's seconds under the running plan and the best one, and a reservation; None: unknown."""
    if current is not None and expected is not None:
        old, new, reservation = current.seconds, expected.seconds, ""
        if step_seconds is not None:
            old, new = step_seconds, step_seconds * new / old
    elif step_seconds is not None:
        # Rates are unknown, but the job asks for all nodes: assume linear scaling.
        old, new = step_seconds, step_seconds * current_plan.world_size / best.world_size
        reservation = " at best"
    else:
        return None
    return old, new, reservation


def replan_cost(
    problem: PlanningProblem,
    plan: Plan,
    node_count: int,
    *,
    restart_seconds: float | None = None,
    lost_work_seconds: float = 0.0,
    state_bytes_per_second: float = STATE_BYTES_PER_SECOND,
) -> ReplanCost:
    """Return the cost of a change to `plan`.

    Every replica gets a copy of the state; all nodes get their parts at once.
    """
    weights = weight_bytes(
        problem.workload, plan, casts_frozen_weights=problem.framework.casts_frozen_weights
    )
    optimizer = master_weight_bytes(plan) * optimizer_state_elements(problem.workload, problem.job.train)
    state_bytes = (weights + optimizer) * plan.replicate_group_size * plan.sites
    restart = RESTART_SECONDS[plan.device] if restart_seconds is None else restart_seconds
    return ReplanCost(
        state_bytes, state_bytes / node_count / state_bytes_per_second, restart, lost_work_seconds
    )


def _fills_job_layout(parallel: ParallelSection, ranks: int) -> bool:
    """Return True if the sizes that the job sets give exactly so many ranks: then nothing of it changes."""
    sizes = (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)
    return not parallel.auto and math.prod(sizes) == ranks


def _job_with_open_layout(job: Job, current_plan: Plan, node_count: int, ranks_per_node: int) -> Job:
    """Return the job with the settings open that a re-plan on `node_count` nodes may change."""
    parallel = job.parallel
    fields = parallel.model_dump(exclude_unset=parallel.auto, exclude=set(DATA_PARALLEL_KEYS) | {"auto"})
    if not parallel.auto:
        # One rank has all of the state, whatever the job says; several may shard what one had.
        shares_state = ranks_per_node * node_count > parallel.pp * parallel.tp
        keeps_shard = parallel.shard != "none" or current_plan.shard != "none"
        fields["shard"] = parallel.shard if shares_state and keeps_shard else None
        fields["virtual_stages"] = current_plan.virtual_stages
    # The choice for the former nodes need not suit these.
    fields |= {"all_reduce": _reopened_all_reduce(parallel), "bucket_bytes": None}
    section = ParallelSection.model_validate({**fields, "auto": True})
    return _job_on_nodes(job, node_count).model_copy(update={"parallel": section})


def _job_on_nodes(job: Job, node_count: int) -> Job:
    """Return the job on `node_count` nodes."""
    section = job.cluster.model_copy(
        update={"nodes": node_count, "rendezvous": job.cluster.rendezvous or "replanned:1", "node_rank": None}
    )
    return job.model_copy(update={"cluster": section})


def _job_with_max_replicas(job: Job, current_plan: Plan, node_count: int, ranks_per_node: int) -> Job:
    """Return the job with as many data ranks as there is room for, without a forecast of the best layout.

    Args:
        node_count: nodes that are there.
        ranks_per_node: ranks per node.

    Raises:
        JobError: the ranks that compute one sample together do not divide those that there is room for.
    """
    ranks, ranks_per_sample = ranks_per_node * node_count, current_plan.pp * current_plan.cp * current_plan.tp
    if ranks % ranks_per_sample:
        raise JobError(
            f"{ranks} ranks on {node_count} nodes are not a multiple of the {ranks_per_sample} ranks of one "
            f"replica (pp {current_plan.pp} × cp {current_plan.cp} × tp {current_plan.tp})",
            "choose smaller sizes in [parallel], or parallel = 'auto' after `wanma bench machine --save`",
        )
    data = ranks // ranks_per_sample
    layout = current_plan if current_plan.dp_shard > 1 else job.parallel  # one rank shards nothing
    replicas = _replicas_of_layout(layout.dp_replicate, layout.dp_shard, data)
    if current_plan.synchronization is not None:
        replicas = _replicas_of_sites(current_plan, data)
    sizes: dict[str, Any] = {"dp_replicate": replicas, "dp_shard": data // replicas}
    sizes |= {"batch_shares": [], "batch_share_schedule": []}
    if current_plan.synchronization is not None and job.parallel.sites is not None:
        sizes["sites"] = data * current_plan.sites // current_plan.data_parallel_size
    if data // replicas * current_plan.cp == 1:
        sizes["shard"] = "none"
    open_again = {
        "micro_batch": None,
        "bucket_bytes": None,
        "all_reduce": _reopened_all_reduce(job.parallel),
    }
    section = job.parallel.model_copy(update={**sizes, **open_again})
    return _job_on_nodes(job, node_count).model_copy(update={"parallel": section})


def _replicas_of_layout(dp_replicate: int, dp_shard: int, data_ranks: int) -> int:
    """Return the number of replicas for `data_ranks` data ranks, where shards are kept rather than replicas.

    What was sharded may be too large for one rank.
    """
    if dp_shard == 1:
        return data_ranks
    replicas = math.gcd(dp_replicate, data_ranks)
    if replicas < data_ranks:
        return replicas
    shards = math.gcd(dp_shard, data_ranks)
    return data_ranks // shards if shards > 1 else 1


def _replicas_of_sites(current_plan: Plan, data_ranks: int) -> int:
    """Return the number of replicas for `data_ranks` data ranks, where only whole sites come and go.

    Raises:
        JobError: the data ranks do not make whole sites.
    """
    ranks_per_site = current_plan.data_parallel_size // current_plan.sites
    if data_ranks % ranks_per_site:
        raise JobError(
            f"{data_ranks} data ranks do not form complete sites of {ranks_per_site} data ranks each "
            "(parallel.synchronize)",
            "restore the missing nodes, or choose smaller sizes in [parallel]",
        )
    return data_ranks // current_plan.dp_shard


def _reopened_all_reduce(parallel: ParallelSection) -> Literal["auto", "backend"]:
    return "backend" if parallel.all_reduce == "backend" else "auto"


def _infeasible_reason(problem: PlanningProblem, current_plan: Plan, ranks_per_node: int) -> str | None:
    """Return the reason why the run cannot continue under its plan, or None."""
    (node,) = problem.cluster.nodes
    max_ranks = node.count * (min(len(node.devices), ranks_per_node) if node.devices else ranks_per_node)
    if current_plan.device != select_device_type(problem.job, problem.cluster):
        device = select_device_type(problem.job, problem.cluster)
        return f"the plan is for {current_plan.device}, and these nodes compute on {device}"
    if current_plan.world_size > max_ranks:
        return f"the plan has {current_plan.world_size} ranks, and there is room for {max_ranks}"
    memory = forecast_plan(problem, current_plan).memory_bytes
    if memory > problem.memory_limit_bytes:
        return (
            f"a rank needs {bytes_text(memory)} there, the limit is {bytes_text(problem.memory_limit_bytes)}"
        )
    return None


def _keep_plan(problem: PlanningProblem, current_plan: Plan, reason: str) -> ReplanResult:
    return ReplanResult(
        False, current_plan, forecast_plan(problem, current_plan), None, 0.0, f"keep the plan: {reason}"
    )


def _cost_text(cost: ReplanCost) -> str:
    parts = [
        f"transfer of {bytes_text(cost.state_bytes)} of state {duration_text(cost.state_seconds)}",
        f"restart {duration_text(cost.restart_seconds)}",
    ]
    if cost.lost_work_seconds:
        parts.append(f"lost work {duration_text(cost.lost_work_seconds)}")
    return f"the change costs {duration_text(cost.seconds)} ({', '.join(parts)})"
