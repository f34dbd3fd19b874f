"""Summary of a dry run for the terminal: the job, its plan, and the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from wanma.job.file.serialization import job_to_toml
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text
from wanma.planner.preparation.job_planning import PreparedJob, plan_notes
from wanma.planner.preparation.loader_workers import workers_text
from wanma.planner.presentation.formatting import (
    gradient_reduction_text,
    in_memory_checkpoint_text,
    memory_parts,
    pipeline_memory_text,
    share_lines,
)
from wanma.planner.presentation.step_breakdown import data_feed_table, step_table


def render_dry_run(job: Job, prepared: PreparedJob, notes: Sequence[str] = ()) -> RenderableType:
    """Render the validated job, the plan, the memory of the largest rank and the model's sizes.

    Args:
        job: the validated job.
        prepared: its cluster, plan and workload.
        notes: notes of the checks before the start.
    """
    parts = [
        heading("Job"),
        Syntax(job_to_toml(job).rstrip(), "toml", background_color="default"),
        render_plan_summary(job, prepared),
    ]
    return Group(*parts, *(Text(f"· {note}", style="dim") for note in notes))


def render_plan_summary(job: Job, prepared: PreparedJob) -> RenderableType:
    """Render the summary without the job."""
    parts: list[RenderableType] = [heading("Plan"), _plan_table(job, prepared)]
    if shares := share_lines(prepared.plan, prepared.cluster):
        parts += [heading("Placement and batch shares"), *map(Text, shares)]
    forecast, workload = prepared.plan_result.forecast, prepared.workload
    if workload is None or forecast is None:
        parts += [Text(f"· {note}", style="dim") for note in plan_notes(job, prepared.plan_result)]
        module_note = "The sizes of a custom module are known only after it has run."
        parts.append(
            Text(
                f"· {prepared.workload_unavailable_reason}"
                if prepared.workload_unavailable_reason
                else module_note,
                style="dim",
            )
        )
        return Group(*parts)
    if forecast.step is not None:
        parts += [heading("Step time, forecast"), step_table(forecast, workload)]
    if (feed := forecast.data_feed) is not None and (workload.loading is not None or feed.share < 1):
        parts += [heading("Data feed, forecast"), data_feed_table(feed)]
    parts += [heading("Memory per rank, forecast"), _memory_table(forecast, prepared)]
    parts += [heading("Model"), _size_table(workload)]
    notes = dict.fromkeys([*forecast.reasons, *plan_notes(job, prepared.plan_result)])
    parts += [Text(f"· {note}", style="dim") for note in notes]
    return Group(*parts)


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _plan_table(job: Job, prepared: PreparedJob) -> Table:
    plan = prepared.plan
    table = Table.grid(padding=(0, 2))
    sizes = ", ".join(f"{axis} {getattr(plan, axis)}" for axis in MESH_DIMS if getattr(plan, axis) > 1)
    batch = job.train.global_batch
    rows = [
        ("ranks", f"{plan.world_size} ({sizes or 'one process'}), {plan.threads_per_rank} threads each"),
        ("sharded", plan.shard),
        ("precision", f"{plan.precision} on {_device(prepared)}"),
        ("global batch", f"{batch} samples"),
        (
            "micro-batches",
            f"{plan.gradient_accumulation_steps(batch)} per step, of at most {plan.micro_batch} samples per "
            "rank",
        ),
        ("recompute", _recompute(plan)),
        ("compile", "each block" if plan.compile else "no"),
    ]
    if prepared.workers is not None:
        rows.append(("data loading", workers_text(job, prepared.workers)))
    if offloaded := _offloaded(plan):
        rows.append(("offloaded", offloaded))
    if gradients := gradient_reduction_text(plan):
        rows.append(("gradients", gradients))
    if plan.approximate:
        rows.append(("approximate", ", ".join(plan.approximate)))
    if plan.synchronization is not None:
        rows.append(("between sites", str(plan.synchronization)))
    if plan.pp > 1:
        cuts = "by parameter count, when the model is built"
        if plan.stage_cuts:
            blocks = "blocks" if len(plan.stage_cuts) > 1 else "block"
            cuts = f"before {blocks} {', '.join(map(str, plan.stage_cuts))}"
        rows.insert(1, ("pipeline", f"{plan.schedule}, {plan.stage_count} stages, split {cuts}"))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _device(prepared: PreparedJob) -> str:
    """Return the device's name in torch, or its own where torch has none."""
    devices = prepared.cluster.nodes[0].devices
    is_foreign = prepared.plan.device == "cuda" and bool(devices) and devices[0].kind == "other"
    return devices[0].name if is_foreign else prepared.plan.device


def _recompute(plan: Plan) -> str:
    share = "" if plan.recompute_share == 1 else f", {plan.recompute_share:.0%} of the blocks"
    return f"{plan.recompute}{share}"


def _offloaded(plan: Plan) -> str:
    kinds = ("parameters", "optimizer", "activations")
    targets = {kind: getattr(plan, f"offload_{kind}") for kind in kinds}
    return ", ".join(f"{kind} to {target}" for kind, target in targets.items() if target != "none")


def _memory_table(forecast: Forecast, prepared: PreparedJob) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for _, name, size in memory_parts(forecast):
        table.add_row(name, bytes_text(size))
    table.add_row(Text("total", style="bold"), Text(bytes_text(forecast.memory_bytes), style="bold"))
    for target in ("host", "disk"):
        if size := getattr(forecast, f"{target}_bytes"):
            table.add_row(f"offloaded to {target}", bytes_text(size))
    if copies := in_memory_checkpoint_text(forecast, prepared.plan, prepared.cluster):
        table.add_row("in-memory checkpoints", bytes_text(forecast.snapshots_bytes), copies)
    if pipeline_text := pipeline_memory_text(forecast):
        return Group(table, Text(f"memory by pipeline rank: {pipeline_text}"))
    return table


def _size_table(workload: Workload) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "count", "parameters each", "parameters", "forward FLOPs per sample"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer in workload.layers:
        table.add_row(
            layer.name,
            str(layer.count),
            f"{layer.parameters:,}",
            f"{layer.count * layer.parameters:,}",
            f"{layer.count * layer.flops_per_sample:.3g}",
        )
    flops = sum(layer.count * layer.flops_per_sample for layer in workload.layers)
    table.add_row("total", "", "", f"{workload.parameters:,}", f"{flops:.3g}", style="bold")
    return table
