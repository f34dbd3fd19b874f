"""`wanma plan`: what a job would run as, on these machines or on imagined ones, down to a single rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.api.explain import explain, ranks_text
from wanma.api.machines import imagined
from wanma.api.planning import Prepared, by_time, job_dimensions, job_workload
from wanma.api.show import describe_plan
from wanma.data.tokenizer import load_tokenizer
from wanma.hardware.discover import discover
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan import AXES, Plan
from wanma.job.sections import Job
from wanma.models.build import model_spec
from wanma.models.described import model_kind
from wanma.observe.units import bytes_text
from wanma.planner.calibration import load_calibration
from wanma.planner.capabilities import not_runnable
from wanma.planner.choose import complete, layout
from wanma.planner.explain import group_of
from wanma.planner.problem import equal_machines
from wanma.planner.space import usable_devices

if TYPE_CHECKING:
    from wanma.parallel.recording import Collective


def plan_job(
    job: Job,
    *,
    device: str | None = None,
    cluster: str | None = None,
    explained: bool = False,
    rank: int | None = None,
) -> RenderableType:
    """A job's plan and its memory, without reading its data.

    Args:
        device: plan for as many of this device of the catalogue as the job has ranks, or for a cluster in
            one line; default: for `cluster`.
        cluster: plan for the machines of a cluster file, or of one line; default: the job's `cluster.file`,
            else this machine.
        explained: show which rank holds what.
        rank: build this one with tensors that hold nothing, and show what it keeps and communicates.

    Raises:
        JobError: the job or the cluster is wrong, no such device or rank, or the plan fits nowhere.
    """
    job, machines, is_here = _machines(job, device, cluster)
    workload, dimensions = job_workload(job), job_dimensions(job)
    planned = None
    if job.parallel.auto:
        # A run takes part with all its machines; what is imagined may leave some of them out.
        worlds = None if is_here else usable_devices(equal_machines(job, machines))
        planned = by_time(job, machines, workload, dimensions, worlds)
    if planned is None:
        start = layout(job, machines)
        planned = complete(job, start, machines, workload, dimensions, load_calibration())
    plan = planned.plan
    if rank is not None and not 0 <= rank < plan.world_size:
        raise JobError(
            f"--rank {rank}: the plan has {plan.world_size} ranks", f"name one of 0 to {plan.world_size - 1}"
        )
    parts: list[RenderableType] = [Text(f"\n{machines}", style="bold")]
    if (reason := not_runnable(job, plan, machines)) is not None:
        parts.append(Text(f"· a forecast only: {reason}", style="dim"))
    parts.append(describe_plan(job, Prepared(machines, planned, workload, None)))
    if explained:
        parts += [Text(), explain(plan, dimensions, rank, job.data.sequence_length)]
    if rank is not None:
        parts += [Text(), _built(job, plan, rank)]
    return Group(*parts)


def _machines(job: Job, device: str | None, cluster: str | None) -> tuple[Job, Cluster, bool]:
    """The job as it would run, the machines, and whether they are here."""
    if device is None and cluster is None:
        cluster = job.cluster.file
    if device is None and cluster is None:
        return job, discover(), True
    return *imagined(job, device=device, cluster=cluster), False


def _built(job: Job, plan: Plan, rank: int) -> RenderableType:
    if model_kind(job.model) != "tokens":
        raise JobError("--rank builds models that take tokens", "leave --rank out for others")
    from wanma.training.dry_run import dry_run

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
    """The axis, or the axes, whose group it runs on."""
    ranks = collective.ranks
    members = set(ranks)
    # Experts' ranks may be just those of another axis; what they alone do is to exchange tokens.
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
