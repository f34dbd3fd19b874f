"""Search over all planning problems of a job (`parallel = "auto"`) and merge of their results.

Settings of the job are kept; the rest is searched by forecast. Where the rates of the devices are unknown,
`job_planner` plans by rule instead. Long searches run in two processes (`search_process`). Without torch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from wanma.job.cluster import Cluster
from wanma.job.node_range import is_elastic
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.planner.all_reduce_choice import all_reduce_unavailable_reason, search_algorithm
from wanma.planner.cost.compression_cost import SEARCHED_COMPRESSIONS
from wanma.planner.cost.embedding_exchange import table_memory_error
from wanma.planner.embedding_placement import embedding_plan_fields
from wanma.planner.forecast.plan_forecast import time_unavailable_reason
from wanma.planner.forecast.problem import (
    USABLE_DEVICE_MEMORY_SHARE,
    PlanningInputs,
    PlanningProblem,
    homogeneous_cluster,
    host_memory_overflow_reason,
    select_device_type,
)
from wanma.planner.gradient_reduction import choose_bucket_bytes
from wanma.planner.hardware_model.builder import is_calibrated
from wanma.planner.heterogeneous.mesh_plans import search_mesh_plans, with_mesh_plans
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware, build_heterogeneous_hardware
from wanma.planner.heterogeneous.placement_search import search_placements
from wanma.planner.rules.capabilities import allowed_approximations, unsupported_reason
from wanma.planner.rules.compression import compression_plan_fields
from wanma.planner.rules.predicates import divisors
from wanma.planner.search.branch_and_bound import candidate_order, search
from wanma.planner.search.result import Candidate, SearchResult, build_pareto_front
from wanma.planner.search.space import SearchSpace, grid_count
from wanma.planner.search_process import SearchTask, run_searches


def search_plans(
    inputs: PlanningInputs,
    *,
    world_sizes: Sequence[int] | None = None,
    keep: int = 10,
) -> SearchResult:
    """Search for the best plans of a job on a cluster; mark those that the runtime does not run.

    On CPUs each number of ranks per node is a problem of its own, for the ranks share it. On heterogeneous
    devices there are plans that treat all nodes alike, and, where the job leaves all open, plans with uneven
    shares of the batch for equal ranks, or with different replicas on different node pools.

    Args:
        world_sizes: world sizes to search, in ranks; default: `space.candidate_world_sizes`.
        keep: largest number of candidates.

    Raises:
        JobError: a GPU is asked for and none is there.
    """
    began = time.perf_counter()
    job, cluster, dimensions = inputs.job, inputs.cluster, inputs.dimensions
    tasks = [
        SearchTask(partial(_search_homogeneous, problem, space, keep), grid_count(space))
        for problem, space in _search_problems(inputs, world_sizes)
    ]
    on_gpus = is_heterogeneous(cluster) and select_device_type(job, cluster) == "cuda"
    if on_gpus and dimensions is not None and not fixed_parallel_keys(job):
        problem = inputs.problem()
        fleet = build_heterogeneous_hardware(cluster, USABLE_DEVICE_MEMORY_SHARE, inputs.calibration)
        base_plan = replace(_base_plan(job, problem.cluster), compile=True)
        # An elastic run cannot know in advance which node groups are left.
        placements = partial(
            _search_placements, problem, fleet, base_plan, keep, as_meshes=not is_elastic(job)
        )
        tasks.append(SearchTask(placements, GRIDS_PER_LAYER * dimensions.layers))
        if not is_elastic(job):
            meshes = partial(_search_heterogeneous_meshes, problem, fleet, base_plan, keep)
            tasks.append(SearchTask(meshes, GRIDS_PER_PAIR * math.comb(len(fleet.pools), 2)))
    merged = merge_results(run_searches(tasks), keep)
    return replace(merged, seconds=time.perf_counter() - began)


def time_search_unavailable_reason(inputs: PlanningInputs) -> str | None:
    """Return the reason why forecasts of time cannot choose a job's plan, or None."""
    problem = inputs.problem()
    reason = time_unavailable_reason(problem, _base_plan(inputs.job, problem.cluster))
    if reason is not None:
        return reason
    device = select_device_type(inputs.job, inputs.cluster)
    if device == "cpu" and not is_calibrated(problem.cluster, inputs.calibration):
        return "this CPU is not calibrated; run `wanma bench machine --save` to search plans by forecast"
    return None


def is_heterogeneous(cluster: Cluster) -> bool:
    """Return whether the cluster has several kinds of accelerators."""
    return len(cluster.nodes) > 1 and all(node.devices for node in cluster.nodes)


def fixed_parallel_keys(job: Job) -> list[str]:
    """List the keys of [parallel] by which the job narrows the choice of plans."""
    open_keys = {"auto", "allow", "embedding", "embedding_tables", "embedding_memory_bytes"}
    return sorted(job.parallel.model_fields_set - open_keys)


def run_world_sizes(job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Return the world sizes that a run of the job can have, in ranks: equally many on each of its nodes."""
    (node,) = homogeneous_cluster(job, cluster).nodes
    return tuple(size * job.cluster.nodes for size in divisors(len(node.devices) or node.cores))


GRIDS_PER_LAYER = 5
"""Mesh shapes whose search takes as long as the search of placed plans takes for one layer of the model."""
GRIDS_PER_PAIR = 35
"""Mesh shapes whose search takes as long as the search of mesh plans on two kinds of devices."""
MAX_UNSUPPORTED_PLANS = 3
"""Number of forecast-only plans at most that are listed beside runnable ones."""


def merge_results(results: Sequence[SearchResult], keep: int) -> SearchResult:
    """Merge several search results into one: runnable plans first, then a few forecast-only ones."""
    candidates = sorted((one for each in results for one in each.candidates), key=candidate_order)
    runnable = [one for one in candidates if one.unsupported_reason is None]
    forecast_only = [one for one in candidates if one.unsupported_reason is not None]
    runnable = runnable[: max(keep - min(len(forecast_only), MAX_UNSUPPORTED_PLANS), 1)]
    front = [one for each in results for one in each.pareto_front]
    nearest = [each.smallest for each in results if each.smallest is not None]
    pruned: Counter[str] = Counter()
    for each in results:
        pruned.update(each.pruned)
    return SearchResult(
        (*runnable, *forecast_only)[:keep],
        build_pareto_front([one for one in front if one.unsupported_reason is None] or front),
        None if candidates else min(nearest, key=lambda one: one.memory_bytes, default=None),
        sum(each.plan_count for each in results),
        dict(pruned),
        sum(each.seconds for each in results),
    )


def selection_reasons(search_result: SearchResult) -> tuple[str, ...]:
    """Return sentences that explain the choice of the best plan."""
    best = search_result.best
    if best is None:
        return ()
    faster = next((one for one in search_result.unsupported if one.seconds < best.seconds), None)
    searched = f"{search_result.plan_count:,} plans" + (" that wanma supports" if faster is not None else "")
    reasons = [f"the fastest of {searched}, by forecast: {best.seconds:.3g} s per step"]
    for runner_up in search_result.supported[1:2]:
        reasons.append(f"next: {runner_up.plan}, {runner_up.seconds / best.seconds - 1:+.1%} time")
    if faster is not None:
        reasons.append(
            f"{faster.plan} would take {faster.seconds:.3g} s per step, but is not supported: "
            f"{faster.unsupported_reason}"
        )
    return tuple(reasons)


def _search_homogeneous(problem: PlanningProblem, space: SearchSpace, keep: int) -> SearchResult:
    """Return the best plans that treat all nodes alike."""
    return _with_support(problem, search(problem, space, keep=keep))


def _search_placements(
    problem: PlanningProblem, fleet: HeterogeneousHardware, base_plan: Plan, keep: int, *, as_meshes: bool
) -> SearchResult:
    """Return the best placed plans; with `as_meshes`, converted to mesh plans where possible."""
    placed = search_placements(problem, fleet, base_plan, keep=keep)
    return _with_support(problem, with_mesh_plans(placed, fleet) if as_meshes else placed)


def _search_heterogeneous_meshes(
    problem: PlanningProblem, fleet: HeterogeneousHardware, base_plan: Plan, keep: int
) -> SearchResult:
    """Return the best mesh plans on several kinds of devices."""
    return _with_support(problem, search_mesh_plans(problem, fleet, base_plan, keep=keep))


def _search_problems(
    inputs: PlanningInputs, world_sizes: Sequence[int] | None
) -> Iterator[tuple[PlanningProblem, SearchSpace]]:
    """Yield the planning problems and search spaces of a job, per base plan and, on CPUs, ranks per node."""
    job = inputs.job
    cluster = homogeneous_cluster(job, inputs.cluster)
    (node,) = cluster.nodes

    def search_space(base_plan: Plan, world_sizes: Sequence[int] | None) -> SearchSpace:
        return SearchSpace.from_job(
            job,
            cluster,
            inputs.dimensions,
            base_plan=base_plan,
            world_sizes=world_sizes,
            workload=inputs.workload,
        )

    if node.devices:
        problem = inputs.problem()
        for base_plan in _base_plans(problem, cluster):
            yield problem, search_space(base_plan, world_sizes)
        return
    for ranks in divisors(node.cores):
        world_size = ranks * node.count
        if world_sizes is None or world_size in world_sizes:
            problem = inputs.problem(ranks=ranks)
            threads = job.cluster.threads_per_rank or max(node.cores // ranks, 1)
            for base_plan in _base_plans(problem, cluster):
                # Bucket size of the largest number of replicas: it decides their memory.
                replicated = replace(base_plan, dp_replicate=world_size)
                bucket_bytes = choose_bucket_bytes(job, replicated, problem.hardware)
                base_plan = replace(base_plan, threads_per_rank=threads, bucket_bytes=bucket_bytes)
                yield problem, search_space(base_plan, [world_size])


def _base_plan(job: Job, cluster: Cluster) -> Plan:
    """Return the plan settings that a search leaves as they are, without approximations."""
    return Plan(
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=select_device_type(job, cluster),
        **compression_plan_fields(job),
        **embedding_plan_fields(job),
        overlap=job.parallel.overlap,
        bucket_bytes=job.parallel.bucket_bytes or DEFAULT_BUCKET_BYTES,
        # Plans without use for it ignore it, and `job_planner` removes it.
        all_reduce=search_algorithm(job),
    )


def _base_plans(problem: PlanningProblem, cluster: Cluster) -> list[Plan]:
    """List the plans from which searches start: exact, and with approximations that job and devices allow."""
    job = problem.job
    exact, allowed = _base_plan(job, cluster), allowed_approximations(job)
    plans = [exact]
    # Other models were traced in the job's precision, and may compute parts in another.
    if "bf16" in allowed and exact.precision == "fp32" and problem.dimensions is not None:
        bf16_plan = replace(exact, precision="bf16", approximate=(*exact.approximate, "bf16"))
        if time_unavailable_reason(problem, bf16_plan) is None:
            plans.append(bf16_plan)
    unscaled = tuple(plans)
    for plan in unscaled:
        fp8_plan = replace(plan, fp8=True, approximate=(*plan.approximate, "fp8"))
        if "fp8" in allowed and not plan.fp8 and unsupported_reason(job, fp8_plan, cluster) is None:
            plans.append(fp8_plan)
    if "compression" in job.parallel.allow and not exact.compression_methods and exact.precision != "fp64":
        plans += [
            replace(plan, compression=kind, approximate=(*plan.approximate, "compression"))
            for plan in unscaled
            for kind in SEARCHED_COMPRESSIONS
        ]
    return plans


def _with_support(problem: PlanningProblem, search_result: SearchResult) -> SearchResult:
    """Fill in forecast-only reasons, threads per rank and all-reduce of a search result."""
    (node,) = problem.cluster.nodes

    def with_support(candidate: Candidate) -> Candidate:
        plan = candidate.plan
        if plan.device == "cuda":
            ranks_per_node = min(len(node.devices), plan.world_size)
            threads = problem.job.cluster.threads_per_rank or max(node.cores // ranks_per_node, 1)
            plan = replace(plan, threads_per_rank=threads)
        if all_reduce_unavailable_reason(plan, plan.all_reduce, problem.job.cluster.nodes) is not None:
            plan = replace(plan, all_reduce="backend")
        reason = unsupported_reason(problem.job, plan, problem.cluster)
        if (no_room := table_memory_error(problem.workload, plan)) is not None:
            reason = reason or no_room.message
        return replace(
            candidate,
            plan=plan,
            unsupported_reason=reason or host_memory_overflow_reason(problem, plan, candidate.forecast),
        )

    return replace(
        search_result,
        candidates=tuple(map(with_support, search_result.candidates)),
        pareto_front=tuple(map(with_support, search_result.pareto_front)),
        smallest=with_support(search_result.smallest) if search_result.smallest is not None else None,
    )
