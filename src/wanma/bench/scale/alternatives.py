"""Changes of a layout, batch or network that move the knee of a scaling to more ranks.

Each change is forecast from the knee on, by the same rule and relative to the same reference as the layout:
its knee is the smallest number of ranks, from the layout's knee on, at which its efficiency is below the
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from wanma.bench.scale.forecasts import PointForecast, ScaledJob
from wanma.bench.scale.growth import Growth
from wanma.bench.scale.knee import Knee, efficiency_of
from wanma.bench.scale.targets import Target
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.explain.what_if import apply_changes
from wanma.planner.search.space import MIN_CONTEXT_TOKENS, SHARD_LEVELS

SIZES = (2, 4, 8)
"""Sizes of a mesh dimension that are tried, and factors of the batch and of the loader threads."""
RARER_CHECKPOINTS = 8
"""Factor of the steps between two checkpoints that is tried."""
FASTER_NETWORKS = (2, 4)
"""Factors of the network between nodes that are tried."""
SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Change:
    """Change of a job, or of the hardware that it runs on."""

    text: str
    growth: Growth
    target: Target
    note: str = ""
    """Remark on what the change is; empty: another layout of the same training."""


@dataclass(frozen=True)
class Alternative:
    """Change that moves the knee, with its forecasts."""

    change: Change
    knee: int | None
    """Number of ranks at its knee; None: efficiency stays above the limit to the end."""
    last: int
    """Largest number of ranks with efficiency above the limit."""
    efficiency: float
    """Efficiency on as many ranks as the layout's knee has."""
    points: tuple[PointForecast, ...] = field(repr=False)


def find_alternatives(
    scaled: ScaledJob,
    target: Target,
    growth: Growth,
    knee: Knee,
    counts: Sequence[int],
    limit: float,
    *,
    is_best: bool = False,
) -> tuple[Alternative, ...]:
    """Return the changes whose knee is later, the latest first; the more efficient first among equals.

    Args:
        scaled: the job.
        target: the hardware.
        growth: the layout.
        knee: its knee.
        counts: numbers of ranks of the curve.
        limit: efficiency below which a curve has its knee.
        is_best: the curve is one of best plans, whose layout is free: all else is changed.
    """
    found = []
    beyond = [count for count in counts if count >= knee.ranks]
    forecast = scaled.forecast_best if is_best else scaled.forecast_layout
    job = scaled.job(growth.settings_of(knee.last.ranks))
    changes = [
        *_runtime_changes(job, target, growth),
        *_batch_changes(target, growth),
        *_network_changes(target, growth),
    ]
    if not is_best:
        changes = [*_changes_of_layout(job, scaled, target, growth, knee.last.plan), *changes]
    for change in changes:
        points: list[PointForecast] = []
        later = None
        for count in beyond:
            point = forecast(change.target, change.growth, count)
            efficiency = efficiency_of(point, knee.reference)
            points.append(point)
            if efficiency is None or efficiency < limit:
                later = count
                break
        if later == knee.ranks:
            continue
        last = points[-1] if later is None else points[-2]
        efficiency = efficiency_of(points[0], knee.reference)
        assert efficiency is not None  # it is above the limit
        found.append(Alternative(change, later, last.ranks, efficiency, tuple(points)))
    return tuple(sorted(found, key=lambda one: (-(one.knee or math.inf), -one.efficiency)))


def _changes_of_layout(
    job: Job, scaled: ScaledJob, target: Target, growth: Growth, plan: Plan | None
) -> Iterator[Change]:
    """Yield the changes that may help a layout; those that the planner refuses have no forecast later.

    Args:
        job: the job on the largest number of ranks before the knee.
        scaled: its model.
        target: the hardware.
        growth: the layout.
        plan: its plan there.
    """
    for changed in (
        *_mesh_changes(job, scaled, growth),
        *_sharding_changes(job, target, growth, plan),
        *_other_changes(job, growth),
    ):
        settings = {
            key: value for key, value in changed.settings.items() if growth.settings.get(key) != value
        }
        text = ", ".join(f"{key} = {value}" for key, value in settings.items())
        if changed.axis != growth.axis:
            text += f" ({changed.axis} grows instead)"
        yield Change(text, changed, target, "approximate" if "parallel.compression" in settings else "")


def _runtime_changes(job: Job, target: Target, growth: Growth) -> Iterator[Change]:
    """Yield more loader threads, and rarer checkpoints."""
    changes = [{"data.workers": str(factor * job.data.workers)} for factor in SIZES]
    if job.checkpoint.every_steps:
        changes.append({"checkpoint.every_steps": str(RARER_CHECKPOINTS * job.checkpoint.every_steps)})
    for settings in changes:
        text = ", ".join(f"{key} = {value}" for key, value in settings.items())
        yield Change(text, growth.with_settings(settings), target)


def _batch_changes(target: Target, growth: Growth) -> Iterator[Change]:
    """Yield larger batches, where the batch does not grow anyway."""
    for factor in () if growth.is_weak else SIZES:
        batch = growth.global_batch * factor
        grown = replace(growth, global_batch=batch).with_settings({"train.global_batch": str(batch)})
        yield Change(f"train.global_batch = {batch:,}", grown, target, "it changes the training")


def _network_changes(target: Target, growth: Growth) -> Iterator[Change]:
    """Yield faster networks between the nodes."""
    for factor in FASTER_NETWORKS:
        if (faster := _with_faster_network(target, factor)) is not None:
            node = faster.cluster.nodes[0]
            yield Change(f"a network of {node.network_text} per node", growth, faster, "other hardware")


def _mesh_changes(job: Job, scaled: ScaledJob, growth: Growth) -> Iterator[Growth]:
    """Yield larger sizes of the dimensions that do not grow, where the model can be split along them."""
    if scaled.dimensions is None:
        return
    for name in ("tp", "cp", "pp"):
        size = getattr(job.parallel, name)
        for larger in SIZES:
            has_context = name != "cp" or scaled.workload.tokens_per_sample // larger >= MIN_CONTEXT_TOKENS
            if name != growth.axis and larger > size and larger % size == 0 and has_context:
                others = growth.others // size * larger
                yield growth.with_settings({f"parallel.{name}": str(larger)}, others)


def _sharding_changes(job: Job, target: Target, growth: Growth, plan: Plan | None) -> Iterator[Growth]:
    """Yield other ZeRO stages, and shards over one or a few nodes that the other ranks replicate."""
    parallel = job.parallel
    if growth.axis not in ("dp_shard", "dp_replicate"):
        return
    shard = (plan.shard if plan is not None else parallel.shard) or "none"
    if growth.axis == "dp_shard" or parallel.dp_shard > 1:
        for level in SHARD_LEVELS[1:]:
            if level != shard:
                yield replace(
                    growth.with_settings({"parallel.shard": level}), shards_axis_alone=parallel.cp == 1
                )
    if growth.axis == "dp_shard" and parallel.dp_replicate > 1:
        return
    for nodes in (1, 8):
        size = nodes * target.ranks_per_node // math.gcd(nodes * target.ranks_per_node, growth.others)
        if size < 2 or size == parallel.dp_shard:
            continue
        others = (
            growth.others * size if growth.axis == "dp_shard" else growth.others // parallel.dp_shard * size
        )
        hybrid = growth.with_settings({"parallel.dp_shard": str(size)}, others)
        yield replace(hybrid, axis="dp_replicate", shards_axis_alone=False)


def _other_changes(job: Job, growth: Growth) -> Iterator[Growth]:
    """Yield other schedules, overlap, compression where the job allows it, and a free micro-batch."""
    parallel = job.parallel
    if parallel.pp > 1:
        for schedule in SCHEDULES:
            if schedule != parallel.schedule:
                yield growth.with_settings({"parallel.schedule": schedule})
    if not parallel.overlap:
        yield growth.with_settings({"parallel.overlap": "true"})
    if "compression" in parallel.allow and parallel.compression == "none":
        yield growth.with_settings({"parallel.compression": "bf16"})
    if parallel.recompute != "auto":
        yield growth.with_settings({"parallel.recompute": "auto"})


def _with_faster_network(target: Target, factor: int) -> Target | None:
    """Return the hardware with a faster network between its nodes; None where its cards are unknown."""
    node = target.cluster.nodes[0]
    if not node.nics or node.nic_bytes_per_second is None:
        return None
    gigabits = factor * node.nic_bytes_per_second * 8 / 1e9
    try:
        cluster = apply_changes(target.cluster, f"link.inter_node={node.nics}x{gigabits:.12g}G")
    except JobError:  # faster than any card may be described
        return None
    return replace(target, cluster=cluster)
