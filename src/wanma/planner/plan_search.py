"""`parallel = "auto"`: from a job that leaves its layout open to the fastest plan that wanma can run.

What the job says is kept; all else is searched by forecast. Where nobody knows the machine's rates there is
nothing to search by, and `choose` plans by its rule. Pure functions, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from wanma.planner.heterogeneous.node_pools import fleet_of
from wanma.planner.heterogeneous.placement_search import search_mixed
from wanma.planner.rules.capabilities import allowed_approximations, not_runnable
from wanma.planner.rules.compression import plan_fields
from wanma.planner.rules.predicates import divisors
from wanma.planner.search.branch_and_bound import rank_of, search
from wanma.planner.search.result import Candidate, Found, pareto_front
from wanma.planner.search.space import Space


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
    """The best plans of a job on a cluster, those that are a forecast only marked as such.

    On processors each number of ranks of a machine is a problem of its own, for the ranks share it. On unlike
    devices there are plans that treat all alike, and, where the job leaves all open, such as give equal ranks
    unlike shares of the batch, or place unlike replicas on them.

    Args:
        dimensions: of a decoder, where the model is one.
        calibration: what was measured of the devices.
        worlds: numbers of ranks to look at; default: `space.usable_devices`.
        keep: most candidates.

    Raises:
        JobError: a GPU is asked for and none is there.
    """
    searches = _searches(job, cluster, workload, dimensions, calibration, worlds)
    found = [_marked(problem, search(problem, space, keep=keep)) for problem, space in searches]
    on_gpus = is_mixed(cluster) and device_of(job, cluster) == "cuda"
    # A run that goes on with fewer machines does not know which of unlike ones are left.
    is_elastic = job.cluster.min_nodes not in (None, job.cluster.nodes)
    if on_gpus and dimensions is not None and not said_keys(job):
        problem = problem_of(job, cluster, workload, dimensions, calibration)
        fleet = fleet_of(cluster, MEMORY_SHARE, calibration)
        start = replace(_exact(job, problem.cluster), compile=True)
        placed = [search_mixed(problem, fleet, start, keep=keep)]
        if not is_elastic:
            placed = [gridded(placed[0], fleet), search_grids(problem, fleet, start, keep=keep)]
        found += [_marked(problem, one) for one in placed]
    return merged(found, keep)


def why_not_by_time(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
) -> str | None:
    """Why forecasts of time cannot choose a job's plan; None where they can."""
    problem = problem_of(job, cluster, workload, dimensions, calibration)
    unknown = unknown_rates(problem, _exact(job, problem.cluster))
    if unknown is not None:
        return unknown
    if device_of(job, cluster) == "cpu" and not is_measured(problem.cluster, calibration):
        return "this processor was never measured: after `wanma cluster --calibrate` forecasts choose"
    return None


def is_mixed(cluster: Cluster) -> bool:
    """Whether there are accelerators of several kinds."""
    return len(cluster.nodes) > 1 and all(node.devices for node in cluster.nodes)


def said_keys(job: Job) -> list[str]:
    """Keys of [parallel] that narrow what may be chosen."""
    return sorted(job.parallel.model_fields_set - {"auto", "allow"})


def run_worlds(job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Numbers of ranks that a run of the job can have: as many on each of its machines."""
    (node,) = equal_machines(job, cluster).nodes
    return tuple(size * job.cluster.nodes for size in divisors(len(node.devices) or node.cores))


MOST_UNRUN = 3
"""Plans that are a forecast only, where there are others that wanma runs."""


def merged(found: Sequence[Found], keep: int) -> Found:
    """Several searches as one: plans that wanma runs first, and a few of those that it does not run."""
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
    """Why the best plan is the best, in sentences."""
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
                # As in the end of the most replicas there can be: the size decides what memory they share.
                buckets = bucket_of(job, replace(start, dp_replicate=world), problem.machine)
                start = replace(start, threads_per_rank=threads, bucket_bytes=buckets)
                yield (
                    problem,
                    Space.of_job(job, machines, dimensions, start=start, devices=[world], workload=workload),
                )


def _exact(job: Job, machines: Cluster) -> Plan:
    """All that a search leaves as it is."""
    return Plan(
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=device_of(job, machines),
        **plan_fields(job),
        overlap=job.parallel.overlap,
        bucket_bytes=job.parallel.bucket_bytes or REDUCED_TOGETHER_BYTES,
        # Where a plan has no use for it, it is as if it were not so, and `choose` takes it away.
        hierarchical=job.parallel.hierarchical is not False and job.cluster.nodes > 1,
    )


def _starts(problem: Problem, machines: Cluster) -> list[Plan]:
    """The exact plans, and the approximate ones that the job allows and the devices can compute."""
    job = problem.job
    exact, allowed = _exact(job, machines), allowed_approximations(job)
    found = [exact]
    # Any other model was read in the job's precision, and may compute parts of itself in another.
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
    """With the reason beside each plan that is a forecast only, and each rank's share of the cores."""
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
