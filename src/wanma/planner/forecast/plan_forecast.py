"""Forecast of a plan: memory, step time by kind, throughput, model FLOPs utilization, run cost.

Memory comes from `memory.peak`, time from `cost.decoder` and `cost.traced_module`; here they are combined for
one planning problem. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import STEP_TIME_KINDS, Forecast, PipelineRankMemory, StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, count_text, duration_text
from wanma.planner.cost.decoder import decoder_block_groups, decoder_model_cost, decoder_stage_send_seconds
from wanma.planner.cost.decoder_layers import FrameworkTraits, matmul_precision
from wanma.planner.cost.embedding_exchange import embedding_reasons, row_cache_reasons
from wanma.planner.cost.frozen import block_groups_with_frozen_parts, model_cost_with_frozen_parts
from wanma.planner.cost.model_cost import BlockGroup, ModelCost, build_stages
from wanma.planner.cost.offload import updates_on_cpu, uses_offload
from wanma.planner.cost.site_synchronization import site_sent_bytes
from wanma.planner.cost.step import StepComponents, assemble_step_time, build_step_components
from wanma.planner.cost.traced_module import (
    embedding_table_reasons,
    has_operators,
    module_model_cost,
    module_stage_send_seconds,
)
from wanma.planner.forecast.data_feed import (
    data_feed_reasons,
    data_parts_reasons,
    forecast_data_feed,
    store_download_reasons,
)
from wanma.planner.forecast.goodput import forecast_goodput
from wanma.planner.forecast.node_crossing import (
    node_crossing_reason,
    node_crossing_reasons,
    with_single_node_links,
)
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.run_cost import MIN_GOODPUT, run_cost
from wanma.planner.forecast.server_forecast import (
    chief_memory,
    pause_seconds,
    server_reasons,
    step_plan,
    with_server_time,
    worker_plan,
)
from wanma.planner.forecast.step_overhead import step_overhead
from wanma.planner.forecast.text_preparation import forecast_preparation, preparation_reasons
from wanma.planner.memory.in_memory_checkpoints import in_memory_checkpoint_bytes
from wanma.planner.memory.memory_table import MemoryTable, build_memory_table
from wanma.planner.memory.model_states import MemoryInputs, optimizer_rule
from wanma.planner.memory.peak import forecast_memory, pipeline_rank_memory
from wanma.planner.pipeline.simulation import PipelineSimulator, simulate_pipeline
from wanma.planner.rules.compression import compression_reason
from wanma.planner.rules.mesh import global_batches

Memory = TypeVar("Memory")


def forecast_plan(
    problem: PlanningProblem, plan: Plan, simulate: PipelineSimulator = simulate_pipeline
) -> Forecast:
    """Forecast `plan`, whether or not it fits into memory; `step` is None where rates are unknown.

    Args:
        problem: the planning problem.
        plan: the plan to forecast.
        simulate: simulation of a pipeline schedule.

    Raises:
        JobError: the plan has more ranks than there are devices.
    """
    if plan.world_size > problem.hardware.device_count:
        raise JobError(
            f"the plan has {count_text(plan.world_size, 'rank')}, and the cluster has "
            f"{count_text(problem.hardware.device_count, 'device')}",
            "lower the sizes in [parallel], or plan for more nodes",
        )
    return with_step_time(
        problem, plan, forecast_plan_memory(problem, plan), forecast_step_time(problem, plan, simulate)
    )


def forecast_plan_memory(problem: PlanningProblem, plan: Plan) -> Forecast:
    """Forecast the memory of `plan` alone."""
    memory = _calculate_memory(forecast_memory, problem, plan)
    if problem.job.servers.count:
        return chief_memory(problem, plan, memory)
    snapshots = in_memory_checkpoint_bytes(problem.job, problem.workload, plan)
    return replace(
        memory,
        snapshots_bytes=snapshots,
        reasons=(*memory.reasons, *custom_optimizer_reasons(problem.job.train.optimizer_factory)),
    )


def custom_optimizer_reasons(name: str | None) -> tuple[str, ...]:
    """Return the reason that a user's own optimizer is counted as AdamW; empty where `name` is None."""
    if name is None:
        return ()
    return (
        f"the optimizer state and update of {name} are assumed to be as large as AdamW's: two fp32 "
        "numbers per trained parameter",
    )


def with_pipeline_rank_memory(problem: PlanningProblem, plan: Plan, forecast: Forecast) -> Forecast:
    """Return `forecast`, a forecast of `plan`, with the memory of each pipeline rank."""
    if plan.pp == 1 or plan.placement:
        return forecast
    forecasts = (rank.forecast for rank in _calculate_memory(pipeline_rank_memory, problem, plan))
    rank_memory = tuple(PipelineRankMemory(rank.memory_bytes, rank.tensor_bytes) for rank in forecasts)
    return replace(forecast, pipeline_ranks=rank_memory)


def _calculate_memory(calculate: Callable[..., Memory], problem: PlanningProblem, plan: Plan) -> Memory:
    """Return a memory forecast by one of the two functions of `memory.peak`."""
    setting = memory_inputs(problem, plan)
    return calculate(
        problem.workload,
        worker_plan(problem, plan),
        setting.optimizer,
        micro_batches=setting.micro_batches,
        weight_average=setting.weight_average,
        dimensions=problem.dimensions,
        framework=setting.framework,
    )


def memory_inputs(problem: PlanningProblem, plan: Plan) -> MemoryInputs:
    """Return the inputs of a memory forecast beside model and plan."""
    train = problem.job.train
    count = step_plan(problem, plan).gradient_accumulation_steps(max(global_batches(problem.job)))
    if problem.job.parallel.load_balancing == "on" and plan.data_parallel_size > 1:
        count = max(count, 2)  # a rank with a larger share may need several micro-batches, and accumulates
    return MemoryInputs(
        optimizer_rule(train),
        count,
        train.weight_average > 0,
        framework_traits_of(problem, plan),
    )


def framework_traits_of(problem: PlanningProblem, plan: Plan) -> FrameworkTraits:
    """Return the framework traits under `plan`."""
    if problem.framework.fuses_pointwise or not plan.compile:
        return problem.framework
    return _with_fused_pointwise(problem.framework)


@lru_cache(maxsize=64)
def _with_fused_pointwise(framework: FrameworkTraits) -> FrameworkTraits:
    return replace(framework, fuses_pointwise=True)


def time_unavailable_reason(problem: PlanningProblem, plan: Plan) -> str | None:
    """Return the reason why there is no forecast of time, or None."""
    if problem.dimensions is None and not has_operators(problem.workload):
        return "step time unknown: the model's operators are not known"
    if problem.hardware.unknown:
        return f"step time unknown: {problem.hardware.unknown}"
    chip, traits = problem.hardware.chip, framework_traits_of(problem, plan)
    if traits.optimizer_flops and updates_on_cpu(plan):
        return "step time unknown: Muon on the CPUs beside a GPU has not been measured"
    for precision in (matmul_precision(plan, traits), plan.precision):
        if precision not in chip.products:
            known = ", ".join(sorted(chip.products)) or "none"
            return f"step time unknown: {chip.name} has no rate for {precision} products (known: {known})"
    return None


def forecast_step_time(
    problem: PlanningProblem, plan: Plan, simulate: PipelineSimulator = simulate_pipeline
) -> StepTime | None:
    """Forecast the time of one step, with its wait for data and its share of saving.

    Returns:
        the step's time by kind; None where rates are unknown.
    """
    if time_unavailable_reason(problem, plan) is not None:
        return None
    step = assemble_step_time(step_components(problem, plan), simulate)
    pause = 0.0
    if problem.job.servers.count:
        step, _ = with_server_time(problem, plan, step)
        pause = pause_seconds(problem, plan)
    overhead = step_overhead(problem, plan)
    loading = overhead.loading_stall(step.seconds)
    saving = pause + overhead.checkpoint_stall(step.seconds + loading)
    return replace(step, seconds=step.seconds + loading + saving, loading=loading, checkpoint=saving)


def step_components(problem: PlanningProblem, plan: Plan) -> StepComponents:
    """Return the components from which a step's time is assembled.

    Raises:
        ValueError: the devices' rates, or the model's operators, are not known (`time_unavailable_reason`).
    """
    micro_batches = step_plan(problem, plan).gradient_accumulation_steps(problem.global_batch)
    traits = framework_traits_of(problem, plan)
    if problem.job.servers.count:  # they exchange and update
        plan, traits = worker_plan(problem, plan), replace(traits, optimizer_bytes=0, optimizer_flops=0.0)
    return build_step_components(
        build_stages(model_cost_of(problem, plan), plan),
        plan,
        micro_batches,
        problem.hardware,
        traits,
        stage_send_seconds=stage_send_seconds(problem, plan),
        trainable_share=problem.workload.trainable_share,
    )


def model_cost_of(problem: PlanningProblem, plan: Plan) -> ModelCost:
    """Return the layer costs of the problem's model: blocks, and the layers before and after them."""
    machine, traits = problem.hardware, framework_traits_of(problem, plan)
    if problem.dimensions is None:
        pieces = module_model_cost(problem.workload, plan, machine, traits)
    else:
        pieces = decoder_model_cost(problem.dimensions, problem.sequence_length, plan, machine, traits)
        pieces = model_cost_with_frozen_parts(pieces, problem.workload, plan, machine, traits)
    if not uses_offload(plan):
        return pieces
    table = build_memory_table(problem.workload, plan, problem.dimensions, traits)
    return with_activation_bytes(pieces, table, problem.workload, traits.logits_copies)


def block_groups_of(problem: PlanningProblem, plan: Plan) -> tuple[BlockGroup, ...]:
    """Return the block groups of `model_cost_of`, computed without the other layers where possible."""
    if problem.dimensions is None or uses_offload(plan):
        return model_cost_of(problem, plan).blocks
    traits = framework_traits_of(problem, plan)
    blocks = decoder_block_groups(problem.dimensions, problem.sequence_length, plan, problem.hardware, traits)
    return block_groups_with_frozen_parts(blocks, problem.workload, plan, problem.hardware, traits)


def stage_send_seconds(problem: PlanningProblem, plan: Plan) -> float:
    """Return the seconds to send a stage's output to the next rank."""
    if problem.dimensions is None:
        return module_stage_send_seconds(problem.workload, plan, problem.hardware)
    return decoder_stage_send_seconds(problem.dimensions, problem.sequence_length, plan, problem.hardware)


def with_step_time(
    problem: PlanningProblem, plan: Plan, memory_forecast: Forecast, step: StepTime | None
) -> Forecast:
    """Return `memory_forecast` with a step time and the figures that follow from it."""
    preparation = forecast_preparation(
        problem.workload.preparation, problem.cluster.nodes[0], plan.world_size
    )
    if step is not None and (servers := memory_forecast.servers) is not None:
        _, bound = with_server_time(problem, plan, assemble_step_time(step_components(problem, plan)))
        memory_forecast = replace(memory_forecast, servers=replace(servers, bound=bound))
    if step is None:
        crosses = node_crossing_reasons(problem, plan, None, None)
        time_reasons = (
            *crosses,
            *synchronization_reasons(problem, plan, None),
            time_unavailable_reason(problem, plan) or "",
        )
        reasons = (
            *memory_forecast.reasons,
            *store_download_reasons(problem, plan),
            *preparation_reasons(problem.workload.preparation, preparation),
            *server_reasons(problem, plan, memory_forecast),
            *time_reasons,
        )
        return replace(memory_forecast, preparation=preparation, reasons=reasons)
    flops = problem.workload.flops_per_sample * problem.global_batch
    peak = problem.peak_flops_per_second("fp8" if plan.fp8 else plan.precision)
    run = run_cost(problem, plan, step)
    feed = forecast_data_feed(problem, plan, step)
    return replace(
        memory_forecast,
        step=step,
        data_feed=feed,
        preparation=preparation,
        samples_per_second=problem.global_batch / step.seconds,
        model_flops_utilisation=flops / step.seconds / (plan.world_size * peak),
        run=run,
        checkpoint=None
        if problem.job.servers.count
        else step_overhead(problem, plan).checkpoint_forecast(step.seconds - step.checkpoint),
        reasons=(
            *memory_forecast.reasons,
            step_time_text(step),
            *data_feed_reasons(feed),
            *data_parts_reasons(problem),
            *store_download_reasons(problem, plan),
            *preparation_reasons(problem.workload.preparation, preparation),
            *_node_crossing_reasons(problem, plan, step),
            *compression_reason(plan, problem.workload.dense_parameters * problem.workload.trainable_share),
            *synchronization_reasons(problem, plan, step),
            *embedding_table_reasons(problem.workload, step),
            *embedding_reasons(problem.workload, plan),
            *row_cache_reasons(problem.workload, plan, problem.global_batch, problem.hardware),
            *server_reasons(problem, plan, memory_forecast),
            *(() if run is not None else (unbounded_run_reason(problem, plan, step),)),
            *problem.hardware.assumed,
        ),
    )


def _node_crossing_reasons(problem: PlanningProblem, plan: Plan, step: StepTime) -> list[str]:
    """Return the reason that tensor-parallel groups span nodes, with its cost; empty where none does."""
    if node_crossing_reason(plan, problem.job.cluster.nodes) is None:
        return []
    has_node_links = problem.hardware.links[0].devices > 1
    single_node_step = forecast_step_time(with_single_node_links(problem), plan) if has_node_links else None
    return node_crossing_reasons(problem, plan, step, single_node_step)


def unbounded_run_reason(problem: PlanningProblem, plan: Plan, step: StepTime) -> str:
    """Return the reason why there is no forecast of the whole run."""
    goodput = forecast_goodput(problem, plan, step)
    return (
        "no forecast of the complete run: with a failure every "
        f"{duration_text(goodput.seconds_between_failures)}, goodput is below {MIN_GOODPUT:.0%}; save "
        "checkpoints more often (checkpoint.every_steps), and use in-memory checkpoints "
        "(checkpoint.in_memory_every_steps)"
    )


def synchronization_reasons(problem: PlanningProblem, plan: Plan, step: StepTime | None) -> tuple[str, ...]:
    """Describe the exchange between sites: volume, interval and exposed time; empty without sites.

    Args:
        problem: the planning problem.
        plan: the plan.
        step: forecast of the step; None where rates are unknown.
    """
    synchronization = plan.synchronization
    if synchronization is None:
        return ()
    frequency = "at every step"
    if synchronization.has_local_weights:
        interval = f"{synchronization.every / synchronization.fragments:.3g} steps"
        frequency = f"every {interval} instead of gradients at every step"
    between = step_components(problem, plan).site_exchange if step is not None else None
    if step is None or between is None:
        parameters = problem.workload.parameters / plan.pp
        sent = site_sent_bytes(
            plan, framework_traits_of(problem, plan), parameters, problem.workload.trainable_share
        )
        return (
            (
                f"synchronization of {synchronization.sites} sites: each rank sends about "
                f"{bytes_text(int(sent))} {frequency}"
            ),
        )
    return (
        f"synchronization of {synchronization.sites} sites: each rank sends "
        f"{bytes_text(int(between.sent_bytes))} {frequency} ({duration_text(between.exchange_seconds)} per "
        f"exchange); exposed time {duration_text(between.exposed_seconds(step.seconds))} per step",
    )


def step_time_text(step: StepTime) -> str:
    """Describe the kinds of a step's time by share.

    Example: 'step time: compute 71 %, pipeline bubble 14 %, others below 5 %'.
    """
    kinds = STEP_TIME_KINDS.items()
    shares = sorted(((getattr(step, field) / step.seconds, name) for field, name in kinds), reverse=True)
    named = [f"{kind} {share:.0%}" for share, kind in shares if share >= 0.05]
    return "step time: " + ", ".join(named) + ("" if len(named) == len(kinds) else ", others below 5%")


def with_activation_bytes(
    model_cost: ModelCost, table: MemoryTable, workload: Workload, logits_copies: float
) -> ModelCost:
    """Return `model_cost` with the bytes of their activations, for plans that offload something.

    Layers of models without repeated blocks get none, since nothing of them would be offloaded.

    Args:
        table: memory table of the same model and plan.
        logits_copies: copies of a micro-batch's logits, as in `FrameworkTraits.logits_copies`.
    """
    repeated = [layer for layer in workload.layers if layer.is_block or layer.count > 1]
    kinds = [kind for layer, kind in zip(repeated, table.kinds, strict=False) if layer.is_block]
    blocks = tuple(
        group._replace(
            cost=replace(
                group.cost,
                activation_bytes=kind.activations.saved,
                recomputed_activation_bytes=kind.activations.inputs,
            )
        )
        for group, kind in zip(model_cost.blocks, kinds, strict=True)
    )
    *earlier, last = model_cost.post_block
    head_bytes = logits_copies * table.logits_bytes + table.head_saved_bytes
    last = last._replace(cost=replace(last.cost, activation_bytes=head_bytes))
    return model_cost._replace(blocks=blocks, post_block=(*earlier, last))
