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
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import REDUCED_TOGETHER_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.cost.gradient_collectives import LOOKED_AT
from wanma.planner.forecast.plan_forecast import unknown_rates
from wanma.planner.forecast.problem import (
    MEMORY_SHARE,
    Problem,
    device_of,
    equal_machines,
    host_overflow,
    problem_of,
)
from wanma.planner.gradient_reduction import bucket_of, why_not_hierarchical
from wanma.planner.hardware_model.builder import is_measured
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.heterogeneous.mesh_plans import gridded, search_grids
from wanma.planner.heterogeneous.node_pools import Fleet, fleet_of
from wanma.planner.heterogeneous.placement_search import search_mixed
from wanma.planner.rules.capabilities import allowed_approximations, not_runnable
from wanma.planner.rules.compression import plan_fields
from wanma.planner.rules.predicates import divisors
from wanma.planner.search.branch_and_bound import rank_of, search
from wanma.planner.search.result import Candidate, Found, pareto_front
from wanma.planner.search.space import Space, grid_count
from wanma.planner.search_process import SearchTask, run_searches


def find_plans(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
    *,
    worlds: Sequence[int] | None = None,
    keep: int = 10,
) -> Found:
    """Search for the best plans of a job on a cluster; mark those that the runtime does not run.

    On CPUs each number of ranks per node is a problem of its own, for the ranks share it. On heterogeneous
    devices there are plans that treat all nodes alike, and, where the job leaves all open, plans with uneven
    shares of the batch for equal ranks, or with different replicas on different node pools.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        calibration: measurements of the devices.
        worlds: world sizes to search, in ranks; default: `space.usable_devices`.
        keep: largest number of candidates.

    Raises:
        JobError: a GPU is asked for and none is there.
    """
    began = time.perf_counter()
    tasks = [
        SearchTask(partial(_search_alike, problem, space, keep), grid_count(space))
        for problem, space in _searches(job, cluster, workload, dimensions, calibration, worlds)
    ]
    on_gpus = is_mixed(cluster) and device_of(job, cluster) == "cuda"
    if on_gpus and dimensions is not None and not said_keys(job):
        problem = problem_of(job, cluster, workload, dimensions, calibration)
        fleet = fleet_of(cluster, MEMORY_SHARE, calibration)
        start = replace(_exact(job, problem.cluster), compile=True)
        # An elastic run cannot know in advance which node groups are left.
        is_elastic = job.cluster.min_nodes not in (None, job.cluster.nodes)
        placed = partial(_search_placed, problem, fleet, start, keep, as_meshes=not is_elastic)
        tasks.append(SearchTask(placed, GRIDS_PER_LAYER * dimensions.layers))
        if not is_elastic:
            unlike = partial(_search_unlike, problem, fleet, start, keep)
            tasks.append(SearchTask(unlike, GRIDS_PER_PAIR * math.comb(len(fleet.kinds), 2)))
    found = merged(run_searches(tasks), keep)
    return replace(found, seconds=time.perf_counter() - began)


def why_not_by_time(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
) -> str | None:
    """Return the reason why forecasts of time cannot choose a job's plan, or None."""
    problem = problem_of(job, cluster, workload, dimensions, calibration)
    unknown = unknown_rates(problem, _exact(job, problem.cluster))
    if unknown is not None:
        return unknown
    if device_of(job, cluster) == "cpu" and not is_measured(problem.cluster, calibration):
        return "this processor was never measured: after `wanma cluster --calibrate` forecasts choose"
    return None


def is_mixed(cluster: Cluster) -> bool:
    """Return whether the cluster has several kinds of accelerators."""
    return len(cluster.nodes) > 1 and all(node.devices for node in cluster.nodes)


def said_keys(job: Job) -> list[str]:
    """List the keys of [parallel] by which the job narrows the choice of plans."""
    return sorted(job.parallel.model_fields_set - {"auto", "allow"})


def run_worlds(job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Return the world sizes that a run of the job can have, in ranks: equally many on each of its nodes."""
    (node,) = equal_machines(job, cluster).nodes
    return tuple(size * job.cluster.nodes for size in divisors(len(node.devices) or node.cores))


GRIDS_PER_LAYER = 5
"""Mesh shapes whose search takes as long as the search of placed plans takes for one layer of the model."""
GRIDS_PER_PAIR = 35
"""Mesh shapes whose search takes as long as the search of mesh plans on two kinds of devices."""
MOST_UNRUN = 3
"""Number of forecast-only plans at most that are listed beside runnable ones."""


def merged(found: Sequence[Found], keep: int) -> Found:
    """Merge several search results into one: runnable plans first, then a few forecast-only ones."""
    candidates = sorted((one for each in found for one in each.candidates), key=rank_of)
    runnable = [one for one in candidates if one.forecast_only is None]
    others = [one for one in candidates if one.forecast_only is not None]
    runnable = runnable[: max(keep - min(len(others), MOST_UNRUN), 1)]
    front = [one for each in found for one in each.pareto]
    nearest = [each.nearest for each in found if each.nearest is not None]
    pruned: Counter[str] = Counter()
    for each in found:
        pruned.update(each.pruned)
    return Found(
        (*runnable, *others)[:keep],
        pareto_front([one for one in front if one.forecast_only is None] or front),
        None if candidates else min(nearest, key=lambda one: one.memory_bytes, default=None),
        sum(each.considered for each in found),
        dict(pruned),
        sum(each.seconds for each in found),
    )


def reasons(found: Found) -> tuple[str, ...]:
    """Return sentences that explain the choice of the best plan."""
    best = found.best
    if best is None:
        return ()
    faster = next((one for one in found.forecasts_only if one.seconds < best.seconds), None)
    of = f"{found.considered:,} plans" + (" that wanma runs" if faster is not None else "")
    told = [f"the fastest of {of}, by forecast: {best.seconds:.3g} s a step"]
    for runner_up in found.runnable[1:2]:
        told.append(f"next: {runner_up.plan}, {runner_up.seconds / best.seconds - 1:+.1%} time")
    if faster is not None:
        told.append(f"{faster.plan} would take {faster.seconds:.3g} s; {faster.forecast_only}")
    return tuple(told)


def _search_alike(problem: Problem, space: Space, keep: int) -> Found:
    """Return the best plans that treat all nodes alike."""
    return _marked(problem, search(problem, space, keep=keep))


def _search_placed(problem: Problem, fleet: Fleet, start: Plan, keep: int, *, as_meshes: bool) -> Found:
    """Return the best placed plans; with `as_meshes`, converted to mesh plans where possible."""
    found = search_mixed(problem, fleet, start, keep=keep)
    return _marked(problem, gridded(found, fleet) if as_meshes else found)


def _search_unlike(problem: Problem, fleet: Fleet, start: Plan, keep: int) -> Found:
    """Return the best mesh plans on unlike devices."""
    return _marked(problem, search_grids(problem, fleet, start, keep=keep))


def _searches(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None,
    calibration: Calibration | None,
    worlds: Sequence[int] | None,
) -> Iterator[tuple[Problem, Space]]:
    machines = equal_machines(job, cluster)
    (node,) = machines.nodes
    if node.devices:
        problem = problem_of(job, cluster, workload, dimensions, calibration)
        for start in _starts(problem, machines):
            yield (
                problem,
                Space.of_job(job, machines, dimensions, start=start, devices=worlds, workload=workload),
            )
        return
    for ranks in divisors(node.cores):
        world = ranks * node.count
        if worlds is None or world in worlds:
            problem = problem_of(job, cluster, workload, dimensions, calibration, ranks=ranks)
            threads = job.cluster.threads_per_rank or max(node.cores // ranks, 1)
            for start in _starts(problem, machines):
                # Bucket size of the largest number of replicas: it decides their memory.
                buckets = bucket_of(job, replace(start, dp_replicate=world), problem.machine)
                start = replace(start, threads_per_rank=threads, bucket_bytes=buckets)
                yield (
                    problem,
                    Space.of_job(job, machines, dimensions, start=start, devices=[world], workload=workload),
                )


def _exact(job: Job, machines: Cluster) -> Plan:
    """Return the plan settings that a search leaves as they are, without approximations."""
    return Plan(
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=device_of(job, machines),
        **plan_fields(job),
        overlap=job.parallel.overlap,
        bucket_bytes=job.parallel.bucket_bytes or REDUCED_TOGETHER_BYTES,
        # Plans without use for it ignore it, and `job_planner` removes it.
        hierarchical=job.parallel.hierarchical is not False and job.cluster.nodes > 1,
    )


def _starts(problem: Problem, machines: Cluster) -> list[Plan]:
    """List the plans from which searches start: exact, and with approximations that job and devices allow."""
    job = problem.job
    exact, allowed = _exact(job, machines), allowed_approximations(job)
    found = [exact]
    # Other models were traced in the job's precision, and may compute parts in another.
    if "bf16" in allowed and exact.precision == "fp32" and problem.dimensions is not None:
        half = replace(exact, precision="bf16", approximate=(*exact.approximate, "bf16"))
        if unknown_rates(problem, half) is None:
            found.append(half)
    wide = tuple(found)
    for start in wide:
        low = replace(start, fp8=True, approximate=(*start.approximate, "fp8"))
        if "fp8" in allowed and not start.fp8 and not_runnable(job, low, machines) is None:
            found.append(low)
    if "compression" in job.parallel.allow and not exact.compressions and exact.precision != "fp64":
        found += [
            replace(start, compression=kind, approximate=(*start.approximate, "compression"))
            for start in wide
            for kind in LOOKED_AT
        ]
    return found


def _marked(problem: Problem, found: Found) -> Found:
    """Fill in forecast-only reasons, threads per rank and hierarchical all-reduce of a search result."""
    (node,) = problem.cluster.nodes

    def mark(one: Candidate) -> Candidate:
        plan = one.plan
        if plan.device == "cuda":
            here = min(len(node.devices), plan.world_size)
            threads = problem.job.cluster.threads_per_rank or max(node.cores // here, 1)
            plan = replace(plan, threads_per_rank=threads)
        if plan.hierarchical and why_not_hierarchical(plan, problem.job.cluster.nodes) is not None:
            plan = replace(plan, hierarchical=False)
        reason = not_runnable(problem.job, plan, problem.cluster)
        return replace(one, plan=plan, forecast_only=reason or host_overflow(problem, plan, one.forecast))

    return replace(
        found,
        candidates=tuple(map(mark, found.candidates)),
        pareto=tuple(map(mark, found.pareto)),
        nearest=mark(found.nearest) if found.nearest is not None else None,
    )
