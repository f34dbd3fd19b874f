"""Entry points of planning: the plan of a job, given explicitly or found by search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection
from wanma.models.config.dimensions import DecoderConfig
from wanma.observe.units import count_text
from wanma.planner.all_reduce_choice import all_reduce_reasons, largest_message_bytes, nccl_switch_note
from wanma.planner.batch_share_rules import check_job_shares, check_plan_shares
from wanma.planner.cost.embedding_exchange import table_memory_error
from wanma.planner.embedding_placement import embedding_plan_fields
from wanma.planner.forecast.plan_forecast import (
    forecast_plan,
    forecast_plan_memory,
    with_pipeline_rank_memory,
)
from wanma.planner.forecast.problem import (
    PlanningInputs,
    PlanningProblem,
    host_memory_overflow_reason,
    select_device_type,
)
from wanma.planner.forecast.server_forecast import server_memory_error, step_plan
from wanma.planner.gradient_reduction import check_buckets, with_gradient_reduction
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.infeasibility import no_plan_error, plan_too_large_error
from wanma.planner.pipeline.schedules import (
    DEFAULT_VIRTUAL_STAGES,
    SPLIT_BACKWARD,
    plan_stage_cuts,
    recompute_forwards,
)
from wanma.planner.plan_search import (
    run_world_sizes,
    search_plans,
    selection_reasons,
    time_search_unavailable_reason,
)
from wanma.planner.rules.compression import compression_plan_fields
from wanma.planner.rules.mesh import (
    check_mesh,
    check_micro_batches,
    check_model_dimensions,
    check_schedule,
    check_stage_cuts,
    global_batches,
    valid_micro_batch_sizes,
)
from wanma.planner.rules.predicates import candidate_micro_batch_sizes
from wanma.planner.rules.synchronization import build_synchronization, check_synchronization
from wanma.planner.sample_groups import SampleGroup, sample_group_of
from wanma.planner.search.branch_and_bound import search
from wanma.planner.search.result import SearchResult
from wanma.planner.search.space import SearchSpace

MAX_CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens per micro-batch on a CPU at most: larger micro-batches leave the caches and gain nothing."""


@dataclass(frozen=True)
class PlanResult:
    """Plan with its forecast; the forecast is None for a model that cannot be read before its data."""

    plan: Plan
    forecast: Forecast | None
    search_result: SearchResult | None = None
    """Result of the search, if a search chose the plan."""


def plan_for_job(
    inputs: PlanningInputs,
    *,
    world_sizes: Sequence[int] | None = None,
) -> PlanResult:
    """Plan a job: complete the layout that it fixes, or search for the fastest plan if it leaves that open.

    Args:
        world_sizes: world sizes to search where the layout is open, in ranks; default: those that a run on
            the cluster can have.

    Raises:
        JobError: the job contradicts itself, the model or the nodes, or nothing fits; names a remedy.
    """
    job, cluster = inputs.job, inputs.cluster
    if job.parallel.auto and time_search_unavailable_reason(inputs) is None:
        return search_job_plan(inputs, world_sizes=world_sizes)
    layout = build_layout(job, cluster)
    return complete_plan(job, layout, cluster, inputs.workload, inputs.dimensions, inputs.calibration)


def search_job_plan(
    inputs: PlanningInputs,
    *,
    world_sizes: Sequence[int] | None = None,
    allow_unsupported: bool = False,
) -> PlanResult:
    """Search for the fastest plan, by forecast, of a job with an open layout (`parallel = "auto"`).

    Args:
        world_sizes: world sizes to search, in ranks; default: those that a run on the cluster can have.
        allow_unsupported: accept the fastest forecast-only plan where no plan is runnable.

    Raises:
        JobError: the job's settings leave no plan, or none that fits; names a remedy.
    """
    job = inputs.job
    build_synchronization(job.parallel)  # only for its checks: the search has no sites
    if world_sizes is None:
        world_sizes = run_world_sizes(job, inputs.cluster)
    search_result = search_plans(inputs, world_sizes=world_sizes)
    best = search_result.best_or_unsupported if allow_unsupported else search_result.best
    if best is None:
        raise no_plan_error(
            job, inputs.cluster, inputs.workload, inputs.dimensions, search_result, world_sizes
        )
    problem = inputs.problem(ranks=max(best.plan.world_size // job.cluster.nodes, 1))
    plan, forecast = best.plan, best.forecast
    plan = with_gradient_reduction(job, plan, problem.hardware, problem.workload)
    check_buckets(job, plan)
    if plan != best.plan or job.servers.count:
        forecast = forecast_plan(problem, plan)
        if (error := server_memory_error(problem, plan, forecast)) is not None:
            raise error
        if forecast.memory_bytes > problem.memory_limit_bytes >= best.forecast.memory_bytes:
            plan = replace(plan, bucket_bytes=best.plan.bucket_bytes)
            forecast = forecast_plan(problem, plan)
    detailed = with_pipeline_rank_memory(problem, plan, forecast)
    reasons = (
        *selection_reasons(search_result),
        *_gradient_reduction_reasons(problem, plan),
        *detailed.reasons,
    )
    chosen = replace(best, plan=plan, forecast=forecast)
    candidates = tuple(chosen if candidate is best else candidate for candidate in search_result.candidates)
    return PlanResult(plan, replace(detailed, reasons=reasons), replace(search_result, candidates=candidates))


def build_layout(job: Job, cluster: Cluster, world_size: int | None = None) -> Plan:
    """Return the part of a job's plan that does not depend on the model: mesh sizes, device, threads.

    Args:
        world_size: number of ranks of an open layout (`parallel = "auto"`); default: all devices.

    Raises:
        JobError: the sizes contradict each other or the nodes; names the keys.
    """
    parallel = job.parallel
    device = select_device_type(job, cluster)
    if parallel.auto:
        parallel = _default_layout(job, cluster, device, world_size)
    shard = parallel.shard or ("parameters" if parallel.dp_shard > 1 else "none")
    check_job_shares(job)
    synchronization = build_synchronization(parallel)
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
        virtual_stages=parallel.virtual_stages or DEFAULT_VIRTUAL_STAGES[parallel.schedule],
        stage_cuts=tuple(parallel.stage_cuts),
        recompute="none" if parallel.recompute == "auto" else parallel.recompute,
        recompute_share=parallel.recompute_share,
        offload_parameters=parallel.offload_parameters,
        offload_optimizer=parallel.offload_optimizer,
        offload_activations=parallel.offload_activations,
        compile=parallel.compile,
        overlap=parallel.overlap,
        bucket_bytes=parallel.bucket_bytes or DEFAULT_BUCKET_BYTES,
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=device,
        **compression_plan_fields(job),
        **embedding_plan_fields(job),
        batch_shares=tuple(parallel.batch_shares),
        synchronization=synchronization,
    )
    check_synchronization(job, plan)
    check_mesh(job, plan, cluster)
    check_buckets(job, plan)
    plan = with_gradient_reduction(job, plan, None)
    node = cluster.nodes[0]
    ranks_per_node = plan.world_size // job.cluster.nodes
    threads = job.cluster.threads_per_rank or max(node.cores // ranks_per_node, 1)
    return replace(plan, threads_per_rank=threads)


def complete_plan(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    workload: Workload | None,
    dimensions: DecoderConfig | None = None,
    calibration: Calibration | None = None,
) -> PlanResult:
    """Choose what a layout leaves open, micro-batch and recompute, and forecast the plan.

    By step time where the rates of the devices are known; else the largest micro-batch and the least
    recompute that fit.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        calibration: measurements of the devices.

    Raises:
        JobError: the plan splits what this model cannot, or not even one sample per micro-batch fits.
    """
    rows = plan.max_rows_per_data_rank(min(global_batches(job)))
    if dimensions is not None:
        check_model_dimensions(plan, dimensions)
    if dimensions is not None and plan.pp > 1:
        plan = _with_stage_cuts(job, plan, workload, dimensions.layers)
    if workload is None:
        if job.parallel.recompute == "auto":
            raise JobError(
                "parallel.recompute = 'auto' needs a memory forecast, which is not available for a "
                "custom module",
                "set parallel.recompute = 'none', 'selective' or 'full'",
            )
        sizes = valid_micro_batch_sizes(job, plan, max(rows // plan.pp, 1)) or [1]
        plan = replace(plan, micro_batch=job.parallel.micro_batch or sizes[0])
        check_micro_batches(job, plan)
        check_plan_shares(job, plan, sample_group_of(job, dimensions))
        return PlanResult(plan, None)

    inputs = PlanningInputs(job, cluster, workload, dimensions, calibration)
    problem = inputs.problem(ranks=plan.world_size // job.cluster.nodes)
    chosen = None
    untimed = time_search_unavailable_reason(inputs)
    if untimed is None:
        chosen = _search_open_settings(problem, plan)
    if chosen is None:
        rows = step_plan(problem, plan).max_rows_per_data_rank(min(global_batches(job)))
        chosen = _choose_by_rule(problem, plan, rows)
    plan, reasons = chosen
    plan = with_gradient_reduction(job, plan, problem.hardware, workload)
    if (error := table_memory_error(workload, plan)) is not None:
        raise error
    check_plan_shares(job, plan, sample_group_of(job, dimensions, workload))
    forecast = with_pipeline_rank_memory(problem, plan, forecast_plan(problem, plan))
    if (error := server_memory_error(problem, plan, forecast)) is not None:
        raise error
    if (overflow := host_memory_overflow_reason(problem, plan, forecast)) is not None:
        raise JobError(
            f"the plan does not fit: {overflow}",
            "offload less to 'host' (parallel.offload_*), offload to 'disk', or set "
            "checkpoint.in_memory_every_steps = 'auto'",
        )
    if forecast.memory_bytes > problem.memory_limit_bytes:
        raise plan_too_large_error(problem, plan, forecast, untimed if job.parallel.auto else None)
    reasons = [
        _layout_reason(job, plan),
        *reasons,
        *_gradient_reduction_reasons(problem, plan),
        *forecast.reasons,
    ]
    return PlanResult(plan, replace(forecast, reasons=tuple(reasons)))


def _search_open_settings(problem: PlanningProblem, plan: Plan) -> tuple[Plan, list[str]] | None:
    """Return `plan` with the fastest micro-batch and recompute policy where the job leaves them open.

    Returns:
        the plan with the reasons for the choice; None where nothing is open, or nothing fits.
    """
    parallel = problem.job.parallel
    is_open = {"micro_batch": parallel.micro_batch is None, "recompute": parallel.recompute == "auto"}
    if not any(is_open.values()) or plan.batch_shares or plan.placement or plan.synchronization:
        return None
    space = SearchSpace.from_job(
        problem.job,
        problem.cluster,
        problem.dimensions,
        base_plan=plan,
        world_sizes=[plan.world_size],
        workload=problem.workload,
    )
    step_rows = step_plan(problem, plan).max_rows_per_data_rank(max(space.global_batches))
    narrow = replace(
        space,
        micro_batch=space.micro_batch or tuple(candidate_micro_batch_sizes(step_rows)),
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
    reasons = [
        f"{key} {getattr(best.plan, key)}: the fastest forecast that fits" for key in is_open if is_open[key]
    ]
    return best.plan, reasons


def _choose_by_rule(problem: PlanningProblem, plan: Plan, samples_per_rank: int) -> tuple[Plan, list[str]]:
    """Return `plan` with the largest micro-batch and the least recompute that fit, where the job allows.

    Raises:
        JobError: no micro-batch holds whole sample groups on every rank, or the schedule cannot run them.
    """
    job, workload = problem.job, problem.workload
    group = sample_group_of(job, problem.dimensions, workload)
    reasons: list[str] = []

    def fits(sized: Plan) -> bool:
        return forecast_plan_memory(problem, sized).memory_bytes <= problem.memory_limit_bytes

    if job.parallel.micro_batch is not None:
        micro_batch = job.parallel.micro_batch
        if not group.is_kept_by(job, replace(plan, micro_batch=micro_batch)):
            raise group.split_error(job, plan)
    else:
        largest = samples_per_rank if plan.pp == 1 else max(samples_per_rank // (2 * plan.pp), 1)
        if plan.device == "cpu":
            largest = min(largest, max(MAX_CPU_MICRO_BATCH_TOKENS // workload.tokens_per_sample, 1))
        sizes = _micro_batch_sizes(job, plan, group, largest)
        largest = sizes[0]
        fitting = (size for size in sizes if fits(replace(plan, micro_batch=size)))
        micro_batch = next(fitting, sizes[-1])
        reasons.append(
            f"micro_batch {micro_batch}: the largest that fits, at most {largest} "
            f"({count_text(samples_per_rank, 'sample')} per rank and step)"
        )
    plan = replace(plan, micro_batch=micro_batch)
    check_micro_batches(job, plan)
    if job.parallel.recompute == "auto":
        plan, reason = choose_recompute(plan, workload, fits)
        reasons.append(reason)
        if plan.pp > 1:
            check_schedule(plan)
    return plan, reasons


def _with_stage_cuts(job: Job, plan: Plan, workload: Workload | None, blocks: int) -> Plan:
    """Return the plan with the job's stage boundaries, or with stages of equal cost.

    Raises:
        JobError: the job's cuts, or the number of stages, do not fit the model.
    """
    if not plan.stage_cuts:
        plan = replace(plan, stage_cuts=plan_stage_cuts(workload, plan, blocks))
    check_stage_cuts(job, plan, blocks)
    return plan


def _default_layout(job: Job, cluster: Cluster, device: str, world_size: int | None) -> ParallelSection:
    """Return the parallel sizes of `auto` without a search; sizes that the job gives stay.

    All GPUs become one sharded replica; on CPUs one process per node uses all cores. One process was the
    faster on the CPUs measured, for the same cores: two ranks pay for communication what threads share for
    nothing (docs/results/performance.md).

    Raises:
        JobError: the sizes that the job gives do not make `world_size`.
    """
    parallel = job.parallel
    if world_size is not None:
        others = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
        dp_shard = parallel.dp_shard if parallel.dp_shard > 1 else max(world_size // others, 1)
        if dp_shard * others != world_size:
            raise JobError(
                f"{world_size} ranks were started, and the sizes in [parallel] make {dp_shard * others}",
                f"unset the sizes, or start {dp_shard * others} processes",
            )
        return parallel.model_copy(update={"dp_shard": dp_shard})
    if parallel.dp_shard > 1:
        return parallel
    # Remote nodes are assumed to have as many devices as those described.
    devices_per_node = min(len(node.devices) for node in cluster.nodes) if device == "cuda" else 1
    other_ranks = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    return parallel.model_copy(
        update={"dp_shard": max(devices_per_node * job.cluster.nodes // other_ranks, 1)}
    )


def _gradient_reduction_reasons(problem: PlanningProblem, plan: Plan) -> list[str]:
    """Return sentences on the algorithm of the gradients' all-reduce; none where the transport's own runs."""
    message_bytes = largest_message_bytes(problem.job, plan, problem.workload)
    reasons = all_reduce_reasons(plan, problem.hardware, problem.job.cluster.nodes, message_bytes)
    note = nccl_switch_note(plan)
    return reasons if note is None else [*reasons, note]


def _layout_reason(job: Job, plan: Plan) -> str:
    if not job.parallel.auto:
        return f"{plan.world_size} {('rank' if plan.world_size == 1 else 'ranks')}, as set in the job"
    if plan.device == "cuda":
        return f"{plan.world_size} GPUs found; {plan.shard} sharded over {plan.dp_shard} of them"
    if plan.world_size > job.cluster.nodes:
        return f"{plan.world_size} ranks, as started or as set in the job"
    return (
        "one process per node with all its cores: on CPUs, threads are faster than ranks "
        "(docs/results/performance.md)"
    )


def _micro_batch_sizes(job: Job, plan: Plan, group: SampleGroup, largest: int) -> list[int]:
    """List the micro-batch sizes to try, in samples, largest first.

    Raises:
        JobError: no size holds whole sample groups on every rank.
    """
    if plan.pp > 1:
        sizes = valid_micro_batch_sizes(job, plan, largest) or [1]  # size 1 is then refused with the reason
    elif group.size == 1:
        return [largest >> halvings for halvings in range(largest.bit_length())]
    else:
        sizes = list(range(max(largest // group.size, 1) * group.size, 0, -group.size))
    group_multiples = [size for size in sizes if group.is_kept_by(job, replace(plan, micro_batch=size))]
    if not group_multiples:
        raise group.split_error(job, plan)
    return group_multiples


def choose_recompute(plan: Plan, workload: Workload, fits: Callable[[Plan], bool]) -> tuple[Plan, str]:
    """Return `plan` with the cheapest recompute under which it fits, or the most thorough if none does.

    Returns:
        the plan, and the reason in words.
    """
    if plan.schedule in SPLIT_BACKWARD:
        return plan, (
            f"recompute none: schedule {plan.schedule} would recompute a block once for each gradient"
        )
    blocks = sum(layer.count for layer in workload.layers if layer.count > 1 or layer.is_block)
    in_stage = max(-(-blocks // plan.stage_count), 1)
    options = [replace(plan, recompute="none", recompute_share=1.0)]
    for number in range(1, in_stage + 1):
        share = number / in_stage
        options.append(replace(plan, recompute="selective", recompute_share=share))
        options.append(replace(plan, recompute="full", recompute_share=share))
    chosen = next((option for option in sorted(options, key=recompute_forwards) if fits(option)), options[-1])
    if chosen.recompute == "none":
        return chosen, "recompute none: all activations fit"
    count = len(chosen.recomputed_blocks(in_stage))
    return chosen, f"recompute {chosen.recompute} of {count} of {in_stage} blocks: the least that fits"
