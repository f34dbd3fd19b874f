"""Forecast of a plan: memory, step time by kind, throughput, model FLOPs utilization, run cost.

Memory comes from `memory.peak`, time from `cost.decoder` and `cost.traced_module`; here they are combined for
one planning problem. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from typing import TypeVar

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, PipelineRank, StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, count_text, duration_text
from wanma.planner.cost.decoder import boundary_seconds as decoder_boundary_seconds
from wanma.planner.cost.decoder import decoder_blocks, decoder_pieces
from wanma.planner.cost.decoder_layers import Software, product_precision
from wanma.planner.cost.frozen import trained_blocks, trained_pieces
from wanma.planner.cost.model_cost import Blocks, Pieces, stages_of
from wanma.planner.cost.offload import is_moving, updates_on_host
from wanma.planner.cost.site_synchronization import sent_bytes
from wanma.planner.cost.step import Anatomy, anatomy_of_stages, step_of
from wanma.planner.cost.traced_module import (
    knows_operators,
    module_boundary_seconds,
    module_pieces,
    told_of_tables,
)
from wanma.planner.forecast.goodput import useful_time
from wanma.planner.forecast.node_crossing import crossing, crossing_reasons, on_one_machine
from wanma.planner.forecast.offloaded_activations import with_kept
from wanma.planner.forecast.problem import Problem
from wanma.planner.forecast.run_cost import LEAST_SHARE, run_cost
from wanma.planner.forecast.step_overhead import around
from wanma.planner.memory.in_memory_checkpoints import snapshot_bytes
from wanma.planner.memory.memory_table import tabulate
from wanma.planner.memory.model_states import rule_of
from wanma.planner.memory.peak import Setting, forecast_memory, memory_of_ranks
from wanma.planner.pipeline.simulation import Play, pipeline_seconds
from wanma.planner.rules.compression import compression_reason
from wanma.planner.rules.mesh import global_batches

Memory = TypeVar("Memory")


def forecast(problem: Problem, plan: Plan, play: Play = pipeline_seconds) -> Forecast:
    """Forecast `plan`, whether or not it fits into memory; `step` is None where rates are unknown.

    Args:
        problem: the planning problem.
        plan: the plan to forecast.
        play: simulation of a pipeline schedule.

    Raises:
        JobError: the plan has more ranks than there are devices.
    """
    if plan.world_size > problem.machine.devices:
        raise JobError(
            f"the plan has {count_text(plan.world_size, 'rank')}, and the machines have "
            f"{count_text(problem.machine.devices, 'device')}",
            "lower the sizes in [parallel], or plan for more machines",
        )
    return with_time(problem, plan, memory(problem, plan), time(problem, plan, play))


def memory(problem: Problem, plan: Plan) -> Forecast:
    """Forecast the memory of `plan` alone."""
    needed = _calculated(forecast_memory, problem, plan)
    kept = snapshot_bytes(problem.job, problem.workload, plan)
    return replace(
        needed,
        snapshots_bytes=kept,
        reasons=(*needed.reasons, *told_of_optimizer(problem.job.train.optimizer_factory)),
    )


def told_of_optimizer(name: str | None) -> tuple[str, ...]:
    """Return the reason that a user's own optimizer is counted as AdamW; empty where `name` is None."""
    if name is None:
        return ()
    return (
        f"the state and the update of {name} are taken to be as large as AdamW's: two "
        "numbers in fp32 for each trained parameter",
    )


def with_pipeline_ranks(problem: Problem, plan: Plan, found: Forecast) -> Forecast:
    """Return `found`, a forecast of `plan`, with the memory of each pipeline rank."""
    if plan.pp == 1 or plan.placement:
        return found
    held = (rank.forecast for rank in _calculated(memory_of_ranks, problem, plan))
    told = tuple(PipelineRank(one.memory_bytes, one.tensor_bytes) for one in held)
    return replace(found, pipeline_ranks=told)


def _calculated(calculate: Callable[..., Memory], problem: Problem, plan: Plan) -> Memory:
    """Return a memory forecast by one of the two functions of `memory.peak`."""
    setting = memory_setting(problem, plan)
    return calculate(
        problem.workload,
        plan,
        setting.optimizer,
        micro_batches=setting.micro_batches,
        weight_average=setting.weight_average,
        dimensions=problem.dimensions,
        software=setting.software,
    )


def memory_setting(problem: Problem, plan: Plan) -> Setting:
    """Return the inputs of a memory forecast beside model and plan."""
    train = problem.job.train
    count = plan.accumulation(max(global_batches(problem.job)))
    if problem.job.parallel.load_balancing == "on" and plan.data_ranks > 1:
        count = max(count, 2)  # a rank with a larger share may need several micro-batches, and accumulates
    return Setting(
        rule_of(train),
        count,
        train.weight_average > 0,
        software(problem, plan),
        None,
    )


def software(problem: Problem, plan: Plan) -> Software:
    """Return the framework traits under `plan`."""
    if problem.software.fused or not plan.compile:
        return problem.software
    return _fused(problem.software)


@lru_cache(maxsize=64)
def _fused(habits: Software) -> Software:
    return replace(habits, fused=True)


def unknown_rates(problem: Problem, plan: Plan) -> str | None:
    """Return the reason why there is no forecast of time, or None."""
    if problem.dimensions is None and not knows_operators(problem.workload):
        return "step time unknown: the model's operators are not known one by one"
    if problem.machine.unknown:
        return f"step time unknown: {problem.machine.unknown}"
    chip, habits = problem.machine.chip, software(problem, plan)
    if habits.optimizer_flops and updates_on_host(plan):
        return "step time unknown: nobody measured Muon's products on the processors beside a GPU"
    for precision in (product_precision(plan, habits), plan.precision):
        if precision not in chip.products:
            known = ", ".join(sorted(chip.products)) or "none"
            return f"step time unknown: {chip.name} has no rate for {precision} products (known: {known})"
    return None


def time(problem: Problem, plan: Plan, play: Play = pipeline_seconds) -> StepTime | None:
    """Forecast the time of one step, with its wait for data and its share of saving.

    Returns:
        the step's time by kind; None where rates are unknown.
    """
    if unknown_rates(problem, plan) is not None:
        return None
    step, beside = step_of(anatomy(problem, plan), play), around(problem, plan)
    loading = beside.loading(step.seconds)
    saving = beside.saving(step.seconds + loading)
    return replace(step, seconds=step.seconds + loading + saving, loading=loading, checkpoint=saving)


def anatomy(problem: Problem, plan: Plan) -> Anatomy:
    """Return the components from which a step's time is assembled.

    Raises:
        ValueError: the devices' rates, or the model's operators, are not known (`unknown_rates`).
    """
    return anatomy_of_stages(
        stages_of(pieces_of(problem, plan), plan),
        plan,
        plan.accumulation(problem.global_batch),
        problem.machine,
        software(problem, plan),
        boundary_seconds=boundary_seconds(problem, plan),
        trained_share=trained_share(problem),
    )


def pieces_of(problem: Problem, plan: Plan) -> Pieces:
    """Return the layer costs of the problem's model: blocks, and the layers before and after them."""
    machine, habits = problem.machine, software(problem, plan)
    if problem.dimensions is None:
        pieces = module_pieces(problem.workload, plan, machine, habits)
    else:
        pieces = decoder_pieces(problem.dimensions, problem.sequence, plan, machine, habits)
        pieces = trained_pieces(pieces, problem.workload, plan, machine, habits)
    if not is_moving(plan):
        return pieces
    table = tabulate(problem.workload, plan, problem.dimensions, habits)
    return with_kept(pieces, table, problem.workload, habits.logits_copies)


def blocks_of(problem: Problem, plan: Plan) -> tuple[Blocks, ...]:
    """Return the block groups of `pieces_of`, computed without the other layers where possible."""
    if problem.dimensions is None or is_moving(plan):
        return pieces_of(problem, plan).blocks
    habits = software(problem, plan)
    blocks = decoder_blocks(problem.dimensions, problem.sequence, plan, problem.machine, habits)
    return trained_blocks(blocks, problem.workload, plan, problem.machine, habits)


def boundary_seconds(problem: Problem, plan: Plan) -> float:
    """Return the seconds to send a stage's output to the next rank."""
    if problem.dimensions is None:
        return module_boundary_seconds(problem.workload, plan, problem.machine)
    return decoder_boundary_seconds(problem.dimensions, problem.sequence, plan, problem.machine)


def trained_share(problem: Problem) -> float:
    """Return the share of the parameters that is trained: reduced and updated."""
    return problem.workload.trained_share


def with_time(problem: Problem, plan: Plan, needed: Forecast, step: StepTime | None) -> Forecast:
    """Return `needed`, a forecast of memory, with a step time and the figures that follow from it."""
    if step is None:
        crosses = crossing_reasons(problem, plan, None, None)
        told = (*crosses, *told_of_sites(problem, plan, None), unknown_rates(problem, plan) or "")
        return replace(needed, reasons=(*needed.reasons, *told))
    flops = problem.workload.flops_per_sample * problem.global_batch
    peak = problem.peak_flops_per_second("fp8" if plan.fp8 else plan.precision)
    run = run_cost(problem, plan, step)
    return replace(
        needed,
        step=step,
        samples_per_second=problem.global_batch / step.seconds,
        model_flops_utilisation=flops / step.seconds / (plan.world_size * peak),
        run=run,
        reasons=(
            *needed.reasons,
            where_time_goes(step),
            *_crossing(problem, plan, step),
            *compression_reason(plan, problem.workload.parameters * trained_share(problem)),
            *told_of_sites(problem, plan, step),
            *told_of_tables(problem.workload, step),
            *(() if run is not None else (never_ends(problem, plan, step),)),
            *problem.machine.assumed,
        ),
    )


def _crossing(problem: Problem, plan: Plan, step: StepTime) -> list[str]:
    """Return the reason that tensor-parallel groups span nodes, with its cost; empty where none does."""
    if crossing(plan, problem.job.cluster.nodes) is None:
        return []
    return crossing_reasons(problem, plan, step, time(on_one_machine(problem), plan))


def never_ends(problem: Problem, plan: Plan, step: StepTime) -> str:
    """Return the reason why there is no forecast of the whole run."""
    found = useful_time(problem, plan, step)
    return (
        f"the whole run: with a failure every {duration_text(found.seconds_between_failures)} less than "
        f"{LEAST_SHARE:.0%} of its time would be useful; save more often (checkpoint.every_steps), and keep "
        "copies in memory (checkpoint.in_memory_every_steps)"
    )


def told_of_sites(problem: Problem, plan: Plan, step: StepTime | None) -> tuple[str, ...]:
    """Describe the exchange between sites: volume, interval and exposed time; empty without sites.

    Args:
        problem: the planning problem.
        plan: the plan.
        step: forecast of the step; None where rates are unknown.
    """
    seldom = plan.synchronization
    if seldom is None:
        return ()
    often = "at every step"
    if seldom.is_local:
        apart = f"{seldom.every / seldom.fragments:.3g} steps"
        often = f"every {apart} instead of its gradients at every step"
    between = anatomy(problem, plan).between if step is not None else None
    if step is None or between is None:
        parameters = problem.workload.parameters / plan.pp
        sent = sent_bytes(plan, software(problem, plan), parameters, trained_share(problem))
        return (f"between {seldom.sites} sites each rank sends about {bytes_text(int(sent))} {often}",)
    return (
        f"between {seldom.sites} sites each rank sends {bytes_text(int(between.sent_bytes))} {often}: "
        f"{duration_text(between.exchange_seconds)} each; of all that is between them "
        f"{duration_text(between.seconds(step.seconds))} a step are waited for",
    )


def where_time_goes(step: StepTime) -> str:
    """Describe the kinds of a step's time by share.

    Example: 'a step: compute 71 %, bubble 14 %, tensor 9 %, others below 5 %'.
    """
    kinds = [one.name for one in fields(StepTime) if one.name not in ("seconds", "uncertainty")]
    shares = sorted(((getattr(step, kind) / step.seconds, kind) for kind in kinds), reverse=True)
    named = [f"{kind} {share:.0%}" for share, kind in shares if share >= 0.05]
    return "a step: " + ", ".join(named) + ("" if len(named) == len(kinds) else ", others below 5%")
