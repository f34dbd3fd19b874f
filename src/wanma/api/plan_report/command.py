"""Plan of a job on this or a hypothetical cluster, down to a single rank (`wanma plan`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.api.engines.placing import usable_engine
from wanma.api.engines.submission import take_nodes
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind
from wanma.observe.units import bytes_text, count_text
from wanma.planner.explain.rank_layout import ranks_of_group
from wanma.planner.preparation.job_workload import tokenizer_vocabulary_size
from wanma.planner.presentation.layout_tables import ranks_text, render_rank_layout
from wanma.planner.presentation.plan_analysis import PlanAnalysis, Questions, analyze_plan
from wanma.planner.presentation.terminal_tables import render_analysis

if TYPE_CHECKING:
    from wanma.parallel.profiling.collective_counter import CollectiveCall


def plan_job(
    job: Job,
    *,
    device: str | None = None,
    cluster: str | Cluster | None = None,
    show_layout: bool = False,
    rank: int | None = None,
    queries: Questions | None = None,
) -> tuple[PlanAnalysis, RenderableType]:
    """Return a job's plan and its forecast, as data and as terminal output, without reading the job's data.

    Args:
        device: device of the catalogue, as many as the job has ranks, or a cluster in one line; default: the
            devices of `cluster`.
        cluster: cluster file, a cluster in one line, or a cluster; default: the job's `cluster.file`, else
            this node.
        show_layout: show the layout: the part of the model on each rank.
        rank: rank to build without memory for its tensors, to show its sizes and communication.
        queries: further questions to answer.

    Raises:
        JobError: the job, the cluster or a question is wrong, no such device or rank, or the plan fits
            nowhere.
    """
    answers = analyze_plan(job, device=device, cluster=cluster, questions=queries or Questions())
    study = answers.study
    plan = study.plan_result.plan
    if rank is not None and not 0 <= rank < plan.world_size:
        raise JobError(
            f"--rank {rank}: the plan has {count_text(plan.world_size, 'rank')}",
            f"give 0 to {plan.world_size - 1}",
        )
    parts: list[RenderableType] = [render_analysis(answers)]
    if show_layout:
        parts += [Text(), render_rank_layout(plan, study.dimensions, rank, job.data.sequence_length)]
    if rank is not None:
        parts += [Text(), _rank_dry_run(study.job, plan, rank)]
    return answers, Group(*parts)


def engine_cluster(job: Job) -> Cluster | None:
    """Return the nodes that the job's engine has for it; None: those of this machine.

    Raises:
        WanmaError: the engine cannot be used here, or has no suitable nodes.
    """
    found = usable_engine(job.cluster).discover(job.cluster)
    if found is None:
        return None
    count = job.cluster.nodes if job.cluster.nodes > 1 else found.max_nodes
    return take_nodes(found.cluster, min(count, found.max_nodes))


def _rank_dry_run(job: Job, plan: Plan, rank: int) -> RenderableType:
    if input_kind(job.model) != "tokens":
        raise JobError("--rank is supported for models with token inputs only", "remove --rank")
    from wanma.models.model_spec import resolve_model_spec
    from wanma.training.loop.dry_run import dry_run

    length = job.data.sequence_length
    spec = resolve_model_spec(
        job.model,
        vocabulary_size=tokenizer_vocabulary_size(job),
        sequence_length=length,
        image_shape=None,
        classes=None,
    )
    built = dry_run(spec, plan, rank, length, plan.gradient_accumulation_steps(job.train.global_batch))
    sizes = Table.grid(padding=(0, 2))
    sizes.add_column()
    sizes.add_column(justify="right")
    sizes.add_row("parameters of the rank", f"{built.parameter_elements:,}")
    sizes.add_row("bytes of parameters", bytes_text(built.parameter_bytes))
    sizes.add_row("gradients", bytes_text(built.gradient_bytes))
    sizes.add_row("activations per micro-batch", bytes_text(built.activation_bytes))
    collectives = Table(
        "collective",
        "mesh dimension",
        "ranks",
        "calls per step",
        "tensor",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for collective, count in built.collectives:
        collectives.add_row(
            collective.operation,
            _mesh_dim_of(collective, plan, rank),
            ranks_text(collective.group_ranks),
            f"{count:,}",
            bytes_text(collective.tensor_bytes),
        )
    head = f"Rank {rank}, built in {built.seconds:.1f} s; one step of {built.micro_batches} micro-batches"
    return Group(Text(head, style="bold"), sizes, Text(), collectives)


def _mesh_dim_of(collective: CollectiveCall, plan: Plan, rank: int) -> str:
    """Return the mesh dimension, or dimensions, on whose group a collective runs."""
    ranks = collective.group_ranks
    members = set(ranks)
    # The expert group may equal that of another dimension; only experts exchange tokens.
    order = ("ep", *MESH_DIMS) if collective.operation == "all-to-all" and plan.ep > 1 else (*MESH_DIMS, "ep")
    for axis in order:
        group = set(ranks_of_group(plan, axis, rank))
        if members == group or (axis == "pp" and members < group):
            return axis
    if len(ranks) == plan.world_size:
        return "all"
    coordinates = plan.coordinates(rank)
    varying = {
        axis
        for peer in ranks
        for axis, coordinate in plan.coordinates(peer).items()
        if coordinate != coordinates[axis]
    }
    return " × ".join(axis for axis in MESH_DIMS if axis in varying)
