"""Plan of a job on this or a hypothetical cluster, down to a single rank (`wanma plan`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import JobError
from wanma.job.plan.plan import AXES, Plan
from wanma.job.sections.job import Job
from wanma.models.config.resolution import model_kind
from wanma.observe.units import bytes_text, count_text
from wanma.planner.explain.rank_layout import group_of
from wanma.planner.presentation.layout_tables import explain, ranks_text
from wanma.planner.presentation.plan_analysis import Answers, Questions, answer
from wanma.planner.presentation.terminal_tables import answers_text

if TYPE_CHECKING:
    from wanma.parallel.profiling.collective_counter import Collective


def plan_job(
    job: Job,
    *,
    device: str | None = None,
    cluster: str | None = None,
    explained: bool = False,
    rank: int | None = None,
    questions: Questions | None = None,
) -> tuple[Answers, RenderableType]:
    """Return a job's plan and its forecast, as data and as terminal output, without reading the job's data.

    Args:
        device: device of the catalogue, as many as the job has ranks, or a cluster in one line; default: the
            devices of `cluster`.
        cluster: cluster file, or a cluster in one line; default: the job's `cluster.file`, else this node.
        explained: show the layout: the part of the model on each rank.
        rank: rank to build without memory for its tensors, to show its sizes and communication.
        questions: further questions to answer.

    Raises:
        JobError: the job, the cluster or a question is wrong, no such device or rank, or the plan fits
            nowhere.
    """
    answers = answer(job, device=device, cluster=cluster, questions=questions or Questions())
    study = answers.study
    plan = study.planned.plan
    if rank is not None and not 0 <= rank < plan.world_size:
        raise JobError(
            f"--rank {rank}: the plan has {count_text(plan.world_size, 'rank')}",
            f"name one of 0 to {plan.world_size - 1}",
        )
    parts: list[RenderableType] = [answers_text(answers)]
    if explained:
        parts += [Text(), explain(plan, study.dimensions, rank, job.data.sequence_length)]
    if rank is not None:
        parts += [Text(), _built(study.job, plan, rank)]
    return answers, Group(*parts)


def _built(job: Job, plan: Plan, rank: int) -> RenderableType:
    if model_kind(job.model) != "tokens":
        raise JobError("--rank builds models that take tokens", "leave --rank out for others")
    from wanma.models.model_spec import model_spec
    from wanma.training.loop.dry_run import dry_run

    vocabulary = load_tokenizer(job.data.tokenizer).vocabulary
    length = job.data.sequence_length
    spec = model_spec(
        job.model, vocabulary=vocabulary, sequence_length=length, image_shape=None, classes=None
    )
    built = dry_run(spec, plan, rank, length, plan.accumulation(job.train.global_batch))
    sizes = Table.grid(padding=(0, 2))
    sizes.add_column()
    sizes.add_column(justify="right")
    sizes.add_row("parameters kept", f"{built.parameters:,}")
    sizes.add_row("their bytes", bytes_text(built.parameter_bytes))
    sizes.add_row("gradients", bytes_text(built.gradient_bytes))
    sizes.add_row("saved for backward, per micro-batch", bytes_text(built.saved_bytes))
    moved = Table(
        "collective",
        "over",
        "ranks",
        "times per step",
        "tensor",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for collective, count in built.collectives:
        moved.add_row(
            collective.kind,
            _axis_of(collective, plan, rank),
            ranks_text(collective.ranks),
            f"{count:,}",
            bytes_text(collective.tensor_bytes),
        )
    head = f"Rank {rank} as built in {built.seconds:.1f} s, for a step of {built.micro_batches} micro-batches"
    return Group(Text(head, style="bold"), sizes, Text(), moved)


def _axis_of(collective: Collective, plan: Plan, rank: int) -> str:
    """Return the mesh dimension, or dimensions, on whose group a collective runs."""
    ranks = collective.ranks
    members = set(ranks)
    # The expert group may equal that of another dimension; only experts exchange tokens.
    order = ("ep", *AXES) if collective.kind == "all-to-all" and plan.ep > 1 else (*AXES, "ep")
    for axis in order:
        group = set(group_of(plan, axis, rank))
        if members == group or (axis == "pp" and members < group):
            return axis
    if len(ranks) == plan.world_size:
        return "all"
    here = plan.coordinates(rank)
    varying = {axis for other in ranks for axis, at in plan.coordinates(other).items() if at != here[axis]}
    return " × ".join(axis for axis in AXES if axis in varying)
