"""Entry points of planning: the plan of a job, given explicitly or found by search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import REDUCED_TOGETHER_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection
from wanma.models.config.dimensions import DecoderDimensions
from wanma.observe.units import count_text
from wanma.planner.batch_share_rules import check_batch_shares, check_shares
from wanma.planner.forecast.plan_forecast import forecast, memory, with_pipeline_ranks
from wanma.planner.forecast.problem import Problem, device_of, host_overflow, problem_of
from wanma.planner.gradient_reduction import check_buckets, exchange_reasons, with_exchange
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.infeasibility import does_not_fit, no_plan
from wanma.planner.pipeline.schedules import VIRTUAL_STAGES, planned_cuts
from wanma.planner.plan_search import find_plans, reasons, run_worlds, why_not_by_time
from wanma.planner.recompute_policy import least_recompute
from wanma.planner.rules.compression import plan_fields
from wanma.planner.rules.mesh import (
    admitted_micro_batches,
    check_axes,
    check_dimensions,
    check_micro_batches,
    check_schedule,
    check_stage_cuts,
    global_batches,
)
from wanma.planner.rules.synchronization import check_sites, synchronization_of
from wanma.planner.sample_groups import Group, group_of
from wanma.planner.search.branch_and_bound import search
from wanma.planner.search.result import Found
from wanma.planner.search.space import Space

CPU_TOKENS = 4096
"""Tokens per micro-batch on a CPU at most: larger micro-batches leave the caches and gain nothing."""


@dataclass(frozen=True)
class Planned:
    """Plan with its forecast; the forecast is None for a model that cannot be read before its data."""

    plan: Plan
    forecast: Forecast | None
    found: Found | None = None
    """Result of the search, if a search chose the plan."""


def plan_for(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
    *,
    worlds: Sequence[int] | None = None,
) -> Planned:
    """Plan a job: complete the layout that it fixes, or search for the fastest plan if it leaves that open.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        calibration: measurements of the devices.
        worlds: world sizes to search where the layout is open, in ranks; default: those that a run on the
            cluster can have.

    Raises:
        JobError: the job contradicts itself, the model or the nodes, or nothing fits; names a remedy.
    """
    if job.parallel.auto and why_not_by_time(job, cluster, workload, dimensions, calibration) is None:
        return automatic(job, cluster, workload, dimensions, calibration, worlds=worlds)
    return complete(job, layout(job, cluster), cluster, workload, dimensions, calibration)


def automatic(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
    *,
    worlds: Sequence[int] | None = None,
    or_forecast_only: bool = False,
) -> Planned:
    """Search for the fastest plan, by forecast, of a job with an open layout (`parallel = "auto"`).

    Args:
        worlds: world sizes to search, in ranks; default: those that a run on the cluster can have.
        or_forecast_only: accept the fastest forecast-only plan where no plan is runnable.

    Raises:
        JobError: the job's settings leave no plan, or none that fits; names a remedy.
    """
    synchronization_of(job.parallel)  # only for its checks: the search has no sites
    worlds = run_worlds(job, cluster) if worlds is None else worlds
    found = find_plans(job, cluster, workload, dimensions, calibration, worlds=worlds)
    best = found.shown if or_forecast_only else found.best
    if best is None:
        raise no_plan(job, cluster, workload, dimensions, found, worlds)
    ranks = max(best.plan.world_size // job.cluster.nodes, 1)
    problem = problem_of(job, cluster, workload, dimensions, calibration, ranks=ranks)
    plan, needed = with_exchange(job, best.plan, problem.machine), best.forecast
    check_buckets(job, plan)
    if plan != best.plan:
        needed = forecast(problem, plan)
        if needed.memory_bytes > problem.memory_bytes >= best.forecast.memory_bytes:
            plan = replace(plan, bucket_bytes=best.plan.bucket_bytes)
            needed = forecast(problem, plan)
    whole = with_pipeline_ranks(problem, plan, needed)
    told = (*reasons(found), *exchange_reasons(plan, problem.machine), *whole.reasons)
    taken = replace(best, plan=plan, forecast=needed)
    candidates = tuple(taken if one is best else one for one in found.candidates)
    return Planned(plan, replace(whole, reasons=told), replace(found, candidates=candidates))


def layout(job: Job, cluster: Cluster) -> Plan:
    """Return the part of a job's plan that does not depend on the model: mesh sizes, device, threads.

    Raises:
        JobError: the sizes contradict each other or the nodes; names the keys.
    """
    parallel = job.parallel
    device = device_of(job, cluster)
    if parallel.auto:
        parallel = _automatic(job, cluster, device)
    shard = parallel.shard or ("parameters" if parallel.dp_shard > 1 else "none")
    check_batch_shares(job)
    synchronization = synchronization_of(parallel)
    plan = Plan(
        pp=parallel.pp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        shard=shard,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        cp_method=parallel.cp_method,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages or VIRTUAL_STAGES[parallel.schedule],
        stage_cuts=tuple(parallel.stage_cuts),
        recompute="none" if parallel.recompute == "auto" else parallel.recompute,
        recompute_share=parallel.recompute_share,
        offload_parameters=parallel.offload_parameters,
        offload_optimizer=parallel.offload_optimizer,
        offload_activations=parallel.offload_activations,
        compile=parallel.compile,
        overlap=parallel.overlap,
        bucket_bytes=parallel.bucket_bytes or REDUCED_TOGETHER_BYTES,
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=device,
        **plan_fields(job),
        batch_shares=tuple(parallel.batch_shares),
        synchronization=synchronization,
    )
    check_sites(job, plan)
    check_axes(job, plan, cluster)
    check_buckets(job, plan)
    plan = with_exchange(job, plan, None)
    node = cluster.nodes[0]
    ranks_here = plan.world_size // job.cluster.nodes
    threads = job.cluster.threads_per_rank or max(node.cores // ranks_here, 1)
    return replace(plan, threads_per_rank=threads)


def complete(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    workload: Workload | None,
    dimensions: DecoderDimensions | None = None,
    calibration: Calibration | None = None,
) -> Planned:
    """Choose what a layout leaves open, micro-batch and recompute, and forecast the plan.

    By step time where the rates of the devices are known; else the largest micro-batch and the least
    recompute that fit.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        calibration: measurements of the devices.

    Raises:
        JobError: the plan splits what this model cannot, or not even one sample per micro-batch fits.
    """
    rows = plan.most_rows(min(global_batches(job)))
    if dimensions is not None:
        check_dimensions(plan, dimensions)
    if dimensions is not None and plan.pp > 1:
        plan = _cut(job, plan, workload, dimensions.layers)
    if workload is None:
        if job.parallel.recompute == "auto":
            raise JobError(
                "parallel.recompute = 'auto' needs a forecast, which a model of one's own does not have",
                "say parallel.recompute = 'none', 'selective' or 'full'",
            )
        sizes = admitted_micro_batches(job, plan, max(rows // plan.pp, 1)) or [1]
        plan = replace(plan, micro_batch=job.parallel.micro_batch or sizes[0])
        check_micro_batches(job, plan)
        check_shares(job, plan, group_of(job, dimensions))
        return Planned(plan, None)

    ranks = plan.world_size // job.cluster.nodes
    problem = problem_of(job, cluster, workload, dimensions, calibration, ranks=ranks)
    chosen = None
    untimed = why_not_by_time(job, cluster, workload, dimensions, calibration)
    if untimed is None:
        chosen = _fastest(problem, plan)
    if chosen is None:
        plan, told = _by_rule(problem, plan, rows)
    else:
        plan, told = chosen
    plan = with_exchange(job, plan, problem.machine)
    check_shares(job, plan, group_of(job, dimensions, workload))
    needed = with_pipeline_ranks(problem, plan, forecast(problem, plan))
    if (overflow := host_overflow(problem, plan, needed)) is not None:
        raise JobError(
            f"the plan does not fit: {overflow}",
            "offload less to 'host' (parallel.offload_*), or to 'disk'; or set "
            "checkpoint.in_memory_every_steps = 'auto'",
        )
    if needed.memory_bytes > problem.memory_bytes:
        raise does_not_fit(problem, plan, needed, untimed if job.parallel.auto else None)
    told += exchange_reasons(plan, problem.machine)
    told = [_layout_reason(job, plan), *told, *needed.reasons]
    return Planned(plan, replace(needed, reasons=tuple(told)))


def _fastest(problem: Problem, plan: Plan) -> tuple[Plan, list[str]] | None:
    """Return `plan` with the fastest micro-batch and recompute policy where the job leaves them open.

    Returns:
        the plan with the reasons for the choice; None where nothing is open, or nothing fits.
    """
    parallel = problem.job.parallel
    is_open = {"micro_batch": parallel.micro_batch is None, "recompute": parallel.recompute == "auto"}
    if not any(is_open.values()) or plan.batch_shares or plan.placement or plan.synchronization:
        return None
    space = Space.of_job(
        problem.job,
        problem.cluster,
        problem.dimensions,
        start=plan,
        devices=[plan.world_size],
        workload=problem.workload,
    )
    narrow = replace(
        space,
        pp=(plan.pp,),
        dp_replicate=(plan.dp_replicate,),
        dp_shard=(plan.dp_shard,),
        cp=(plan.cp,),
        tp=(plan.tp,),
        ep=(plan.ep,),
        shard=(plan.shard,),
        sequence_parallel=(plan.sequence_parallel,),
        cp_method=(plan.cp_method,),
        schedules=((plan.schedule, plan.virtual_stages),),
        stage_cuts=plan.stage_cuts or None,
        recompute=space.recompute if is_open["recompute"] else ((plan.recompute, plan.recompute_share),),
        compile=(plan.compile,),
    )
    best = search(problem, narrow, keep=1).best
    if best is None:
        return None
    told = [
        f"{key} {getattr(best.plan, key)}: the fastest that fits, by forecast"
        for key in is_open
        if is_open[key]
    ]
    return best.plan, told


def _by_rule(problem: Problem, plan: Plan, rows: int) -> tuple[Plan, list[str]]:
    """Return `plan` with the largest micro-batch and the least recompute that fit, where the job allows.

    Raises:
        JobError: no micro-batch holds whole sample groups on every rank, or the schedule cannot run them.
    """
    job, workload = problem.job, problem.workload
    group = group_of(job, problem.dimensions, workload)
    told: list[str] = []

    def fits(sized: Plan) -> bool:
        return memory(problem, sized).memory_bytes <= problem.memory_bytes

    if job.parallel.micro_batch is not None:
        micro_batch = job.parallel.micro_batch
        if not group.are_whole(job, replace(plan, micro_batch=micro_batch)):
            raise group.refusal(job, plan)
    else:
        largest = rows if plan.pp == 1 else max(rows // (2 * plan.pp), 1)
        if plan.device == "cpu":
            largest = min(largest, max(CPU_TOKENS // workload.tokens_per_sample, 1))
        sizes = _micro_batches(job, plan, group, largest)
        largest = sizes[0]
        fitting = (size for size in sizes if fits(replace(plan, micro_batch=size)))
        micro_batch = next(fitting, sizes[-1])
        told.append(
            f"micro_batch {micro_batch}: the largest that fits, at most {largest} "
            f"({count_text(rows, 'sample')} per rank and step)"
        )
    plan = replace(plan, micro_batch=micro_batch)
    check_micro_batches(job, plan)
    if job.parallel.recompute == "auto":
        plan, reason = least_recompute(plan, workload, fits)
        told.append(reason)
        if plan.pp > 1:
            check_schedule(plan)
    return plan, told


def _cut(job: Job, plan: Plan, workload: Workload | None, blocks: int) -> Plan:
    """Return the plan with the job's stage boundaries, or with stages of equal cost.

    Raises:
        JobError: the job's cuts, or the number of stages, do not fit the model.
    """
    if not plan.stage_cuts:
        plan = replace(plan, stage_cuts=planned_cuts(workload, plan, blocks))
    check_stage_cuts(job, plan, blocks)
    return plan


def _automatic(job: Job, cluster: Cluster, device: str) -> ParallelSection:
    """Return the parallel sizes of `auto` without a search; sizes that the job gives stay.

    All GPUs become one sharded replica; on CPUs one process per node uses all cores. One process was the
    faster on the CPUs measured, for the same cores: two ranks pay for communication what threads share for
    nothing (docs/performance.md).
    """
    parallel = job.parallel
    if parallel.dp_shard > 1:
        return parallel
    # Remote nodes are assumed to have as many devices as those described.
    on_each = min(len(node.devices) for node in cluster.nodes) if device == "cuda" else 1
    others = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    return parallel.model_copy(update={"dp_shard": max(on_each * job.cluster.nodes // others, 1)})


def _layout_reason(job: Job, plan: Plan) -> str:
    if not job.parallel.auto:
        return f"{plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'} as the job says"
    if plan.device == "cuda":
        return f"{plan.world_size} GPUs found; {plan.shard} sharded over {plan.dp_shard} of them"
    return "one process per machine with all its cores: on CPUs threads beat ranks (docs/performance.md)"


def _micro_batches(job: Job, plan: Plan, group: Group, largest: int) -> list[int]:
    """List the micro-batch sizes to try, in samples, largest first.

    Raises:
        JobError: no size holds whole sample groups on every rank.
    """
    if plan.pp > 1:
        sizes = admitted_micro_batches(job, plan, largest) or [1]  # size 1 is then refused with the reason
    elif group.size == 1:
        return [largest >> halvings for halvings in range(largest.bit_length())]
    else:
        sizes = list(range(max(largest // group.size, 1) * group.size, 0, -group.size))
    whole = [size for size in sizes if group.are_whole(job, replace(plan, micro_batch=size))]
    if not whole:
        raise group.refusal(job, plan)
    return whole
