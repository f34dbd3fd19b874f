"""`wanma plan`: what a job would run as, on these machines or on imagined ones, down to a single rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanma.api.explain import explain, ranks_text
from wanma.api.planning import Prepared, job_workload
from wanma.api.show import describe_plan
from wanma.data.tokenizer import load_tokenizer
from wanma.hardware.catalogue import CATALOGUE, DeviceKind
from wanma.hardware.discover import discover
from wanma.job.cluster import Cluster, Device, Node
from wanma.job.errors import JobError, did_you_mean
from wanma.job.plan import AXES, Plan
from wanma.job.sections import Job
from wanma.models.build import model_spec
from wanma.models.described import model_kind
from wanma.models.workload import section_dimensions
from wanma.observe.units import bytes_text
from wanma.planner.choose import complete, layout
from wanma.planner.explain import group_of

if TYPE_CHECKING:
    from wanma.parallel.recording import Collective

DEVICES_PER_NODE = 8
"""Of imagined machines."""


def plan_job(
    job: Job, *, device: str | None = None, explained: bool = False, rank: int | None = None
) -> RenderableType:
    """A job's plan and its memory, without reading its data.

    Args:
        device: plan for as many of this device of the catalogue as the job has ranks, in nodes of eight;
            default: for this machine.
        explained: show which rank holds what.
        rank: build this one with tensors that hold nothing, and show what it keeps and communicates.

    Raises:
        JobError: the job is wrong, no such device or rank, or the plan fits nowhere.
    """
    if device is not None:
        job, cluster = _imagine(job, _find(device))
    else:
        cluster = discover()
    start = layout(job, cluster)
    workload = job_workload(job)
    dimensions = None
    if model_kind(job.model) == "tokens":
        dimensions = section_dimensions(job.model, load_tokenizer(job.data.tokenizer).vocabulary)
    planned = complete(job, start, cluster, workload, dimensions)
    plan = planned.plan
    if rank is not None and not 0 <= rank < plan.world_size:
        raise JobError(
            f"--rank {rank}: the plan has {plan.world_size} ranks", f"name one of 0 to {plan.world_size - 1}"
        )
    parts: list[RenderableType] = [describe_plan(job, Prepared(cluster, planned, workload, None))]
    if explained:
        parts += [Text(), explain(plan, dimensions, rank, job.data.sequence_length)]
    if rank is not None:
        parts += [Text(), _built(job, plan, rank)]
    return Group(*parts)


def _find(name: str) -> DeviceKind:
    for kind in CATALOGUE:
        if kind.name.casefold() == name.casefold():
            return kind
    names = [kind.name for kind in CATALOGUE]
    raise JobError(
        f"--device '{name}' is not in the catalogue.{did_you_mean(name, names)}", f"known: {', '.join(names)}"
    )


def _imagine(job: Job, kind: DeviceKind) -> tuple[Job, Cluster]:
    """As many nodes of `kind` as the job's ranks fill, and the job as it would run there."""
    parallel = job.parallel
    world = math.prod(getattr(parallel, axis) for axis in AXES)
    on_each = math.gcd(world, DEVICES_PER_NODE)
    one = Device("cuda", kind.name, kind.memory_bytes, dict(kind.peak_flops_per_second))
    here = discover().nodes[0]
    node = Node("imagined", here.cores, here.memory_bytes, (one,) * on_each)
    section = job.cluster.model_copy(
        update={"nodes": world // on_each, "rendezvous": "imagined:1", "device": "cuda", "node_rank": None}
    )
    return job.model_copy(update={"cluster": section}), Cluster((node,) * (world // on_each))


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
