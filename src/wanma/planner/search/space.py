"""Search space of plans and its enumeration.

Settings of the job are kept, all others are free. The rules that refuse a job's own plan (`rules.mesh`) hold
here too, by the same predicates (`rules.predicates`), without an error; and no two plans of a space run the
same. Pure functions, without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Layer, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ContextKind, Recompute, Schedule, Shard
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.pipeline.schedules import VIRTUAL_STAGES, planned_cuts, run_again, wrong_cuts, wrong_stages
from wanma.planner.rules.capabilities import can_compile_again, installed_torch
from wanma.planner.rules.compression import plan_fields
from wanma.planner.rules.mesh import global_batches
from wanma.planner.rules.predicates import (
    divisors,
    experts_fit,
    groups_are_whole,
    heads_fit,
    micro_batch_sizes,
    micro_batches_fit,
    sequence_fits,
    shard_fits,
    takes_backward_apart,
    tensor_fits,
)
from wanma.planner.search.recompute_options import Recomputes

Sizes = tuple[int, ...] | range | None
"""Sizes of a mesh dimension, in ranks; None: every size that divides the devices."""

Share = tuple[int, int, Shard]
"""State sharding: (dp_replicate, dp_shard, shard level)."""

SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")
VIRTUAL: Mapping[Schedule, tuple[int, ...]] = MappingProxyType(
    {"interleaved_1f1b": (2, 3, 4, 6, 8, 12), "interleaved_zero_bubble": (1, 2)}
)
"""Virtual stages per rank with which interleaved schedules are tried.

A zero-bubble schedule gains little by more.
"""
LEAST_TOKENS = 2048
"""Fewest tokens of a sequence that context parallelism leaves each rank, where the job sets no size.

Shorter pieces gain less than the uncertainty of forecasts: of GPT-3 on 1,024 A100s, 2 % from pieces of 1,024
tokens (`benchmarks.planner.speed --context`).
"""


@dataclass(frozen=True)
class Space:
    """Values of every plan setting; a plan of the space has one of each, and `plans` lists them."""

    start: Plan
    """Plan with the settings that the space does not vary: precision, device, threads."""
    devices: tuple[int, ...]
    """World sizes, in ranks."""
    batches: tuple[int, ...]
    """Global batch sizes of the job's steps, in samples, all of which a plan must be able to run."""
    dimensions: DecoderDimensions | None
    length: int | None
    """Tokens of every sample; None where unknown."""
    group: int = 1
    """Samples that one micro-batch must hold together."""
    pp: Sizes = None
    dp_replicate: Sizes = None
    dp_shard: Sizes = None
    cp: Sizes = None
    tp: Sizes = None
    ep: Sizes = None
    shard: tuple[Shard, ...] = SHARDS
    sequence_parallel: tuple[bool, ...] = (True, False)
    cp_method: tuple[ContextKind, ...] = ("ring", "all_to_all")
    micro_batch: Sizes = None
    """Micro-batch sizes, in samples; None: the smallest for each number of micro-batches."""
    schedules: tuple[tuple[Schedule, int], ...] = ()
    """Pairs of schedule and virtual stages per rank."""
    stage_cuts: tuple[int, ...] | None = None
    """Stage boundaries of the job, in blocks; None: by cost."""
    recompute: tuple[tuple[Recompute, float | None], ...] = (
        ("none", 1.0),
        ("selective", None),
        ("full", None),
    )
    """Pairs of recompute policy and share of a stage's blocks; share None: each number of blocks."""
    compile: tuple[bool, ...] = (False,)

    @classmethod
    def of_job(
        cls,
        job: Job,
        cluster: Cluster,
        dimensions: DecoderDimensions | None,
        *,
        start: Plan | None = None,
        devices: Sequence[int] | None = None,
        workload: Workload | None = None,
    ) -> Space:
        """Build the search space that a job leaves open on a cluster.

        Args:
            job: the job.
            cluster: equal nodes.
            dimensions: the decoder's dimensions; other models are split over samples unless the job says.
            start: settings that the space does not vary; default: the job's precision on the cluster.
            devices: world sizes, in ranks; default: `usable_devices`.
            workload: traced workload of a user's own module, with the samples that it needs together.
        """
        parallel = job.parallel
        said = parallel.model_fields_set
        kind = "cuda" if all(node.devices for node in cluster.nodes) else "cpu"
        start = start or Plan(
            precision=job.train.precision,
            fp8=job.train.fp8,
            device="cpu" if job.cluster.device == "cpu" else kind,
            **plan_fields(job),
        )

        def sizes(axis: str, otherwise: Sizes) -> Sizes:
            return (getattr(parallel, axis),) if axis in said else otherwise

        def kept(key: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
            return (getattr(parallel, key),) if key in said else otherwise

        is_decoder = dimensions is not None
        alone: Sizes = None if is_decoder else (1,)
        has_text = bool(job.data.text or job.data.sources)
        start = start.but(
            offload_parameters=parallel.offload_parameters,
            offload_optimizer=parallel.offload_optimizer,
            offload_activations=parallel.offload_activations,
        )
        return cls(
            start=start,
            devices=tuple(devices) if devices is not None else usable_devices(cluster),
            batches=tuple(global_batches(job)),
            dimensions=dimensions,
            length=job.data.sequence_length if has_text else None,
            group=samples_together(job, dimensions, workload),
            pp=sizes("pp", (1,) if job.model.loss is not None else alone),
            dp_replicate=sizes("dp_replicate", None),
            dp_shard=sizes("dp_shard", None),
            cp=sizes("cp", _context_sizes(job) if is_decoder else (1,)),
            tp=sizes("tp", alone),
            ep=sizes("ep", alone if dimensions is not None and dimensions.experts else (1,)),
            shard=(parallel.shard,) if parallel.shard is not None else SHARDS,
            sequence_parallel=kept("sequence_parallel", (True, False)),
            cp_method=kept("cp_method", ("ring", "all_to_all")),
            micro_batch=(parallel.micro_batch,) if parallel.micro_batch is not None else None,
            schedules=_schedules(job),
            stage_cuts=tuple(parallel.stage_cuts) or None,
            recompute=_recompute(job),
            compile=kept("compile", (False, True) if is_decoder and start.device == "cuda" else (False,)),
        )

    @classmethod
    def everything(
        cls, job: Job, cluster: Cluster, dimensions: DecoderDimensions | None, **choices: Any
    ) -> Space:
        """Build the space of a job without its [parallel] section; `choices` replace fields of the space."""
        free = job.model_copy(update={"parallel": type(job.parallel)()})
        space = cls.of_job(free, cluster, dimensions)
        return replace(space, **{"cp": None, "compile": (False, True), **choices})

    @property
    def layers(self) -> int:
        return self.dimensions.layers if self.dimensions is not None else 0


@dataclass(frozen=True)
class Grid:
    """Mesh shape: sizes of the mesh dimensions before the data ranks are divided into replicas and shards."""

    pp: int
    cp: int
    tp: int
    ep: int
    data_ranks: int

    @property
    def devices(self) -> int:
        return self.pp * self.cp * self.tp * self.data_ranks


def plans(space: Space, workload: Workload | None) -> Iterator[Plan]:
    """Yield all plans of the space, each once, in a fixed order."""
    for grid in grids(space):
        ways = states(space, grid)
        for plan in cores(space, grid, workload):
            for recompute, share in recomputes(space, plan):
                again = replace(plan, recompute=recompute, recompute_share=share)
                for way in ways:
                    yield replace(
                        again, dp_replicate=way.dp_replicate, dp_shard=way.dp_shard, shard=way.shard
                    )


def grids(space: Space) -> Iterator[Grid]:
    """Yield the mesh shapes that fill the devices and that model and batch can be split into."""
    for devices in space.devices:
        for tp in _sizes(space.tp, devices):
            if space.dimensions is not None and not tensor_fits(space.dimensions, tp):
                continue
            for cp in _sizes(space.cp, devices // tp):
                if space.length is not None and space.length % cp:
                    continue
                for pp in _sizes(space.pp, devices // tp // cp):
                    data_ranks = devices // (tp * cp * pp)
                    if data_ranks > min(space.batches) or (pp > 1 and pp > space.layers + 2):
                        continue
                    for ep in _sizes(space.ep, data_ranks * cp):
                        if ep == 1 or (space.dimensions and space.dimensions.experts % ep == 0):
                            yield Grid(pp, cp, tp, ep, data_ranks)


def grid_count(space: Space) -> int:
    """Return the number of mesh shapes of the space: a coarse measure of the duration of its search."""
    return sum(1 for _ in grids(space))


def states(space: Space, grid: Grid) -> list[Plan]:
    """List the plans of a mesh shape with each state sharding; all other settings are `space.start`'s."""
    plain = space.start.but(pp=grid.pp, cp=grid.cp, tp=grid.tp, ep=grid.ep)
    return [
        plain.but(dp_replicate=dp_replicate, dp_shard=dp_shard, shard=shard)
        for dp_replicate, dp_shard, shard in shares(space, grid)
    ]


def shares(space: Space, grid: Grid) -> Iterator[Share]:
    """Yield the state shardings of a mesh shape, as in `states`."""
    for dp_shard in _sizes(space.dp_shard, grid.data_ranks):
        dp_replicate = grid.data_ranks // dp_shard
        if space.dp_replicate is not None and dp_replicate not in space.dp_replicate:
            continue
        for shard in space.shard:
            if not shard_fits(shard, dp_shard, grid.cp):
                continue
            if grid.ep > 1:
                way = Plan(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=grid.cp, ep=grid.ep, shard=shard)
                if not experts_fit(space.dimensions, way):
                    continue
            yield dp_replicate, dp_shard, shard


def cores(space: Space, grid: Grid, workload: Workload | None) -> Iterator[Plan]:
    """Yield the plans of a mesh shape without recompute and state sharding; all data ranks are replicas."""
    sizes = micro_batches(space, grid)
    for split in splits(space, grid):
        for plan in staged(space, split, workload):
            for size in sizes:
                sized = replace(plan, micro_batch=size)
                if micro_batches_fit(sized, space.batches):
                    yield sized


def splits(space: Space, grid: Grid) -> Iterator[Plan]:
    """Yield the splits of samples and matrices of a mesh shape, one stage, one-sample micro-batches."""
    plain = space.start.but(
        pp=grid.pp,
        dp_replicate=grid.data_ranks,
        dp_shard=1,
        cp=grid.cp,
        tp=grid.tp,
        ep=grid.ep,
        shard="none",
        micro_batch=1,
        virtual_stages=1,
        stage_cuts=(),
        recompute="none" if len(space.recompute) > 1 else space.recompute[0][0],
        recompute_share=1.0 if len(space.recompute) > 1 else space.recompute[0][1] or 1.0,
    )
    contexts = space.cp_method if grid.cp > 1 else space.cp_method[:1]
    sequences = space.sequence_parallel if grid.tp > 1 else (False,)
    for sequence, context in itertools.product(sequences, contexts):
        split = plain.but(sequence_parallel=sequence, cp_method=context)
        if space.length is not None and not sequence_fits(split, space.length):
            continue
        if space.dimensions is not None and not heads_fit(space.dimensions, split):
            continue
        for compiled in space.compile:
            yield split.but(compile=compiled)


def micro_batches(space: Space, grid: Grid) -> list[int]:
    """List the micro-batch sizes of a mesh shape, in samples, with whole sample groups on every data rank."""
    rows = math.ceil(max(space.batches) / grid.data_ranks)
    sizes = micro_batch_sizes(rows) if space.micro_batch is None else space.micro_batch
    if space.group == 1:
        return list(sizes)
    plain = Plan(dp_replicate=grid.data_ranks)
    return [
        size
        for size in sizes
        if groups_are_whole(replace(plain, micro_batch=size), space.batches, space.group)
    ]


def staged(space: Space, split: Plan, workload: Workload | None) -> Iterator[Plan]:
    """Yield `split` with each pipeline schedule and its stages."""
    if split.pp == 1:
        yield split
        return
    for schedule, virtual in space.schedules:
        if split.pp * virtual > space.layers + 2:
            continue
        plan = split.but(schedule=schedule, virtual_stages=virtual)
        if takes_backward_apart(plan) is not None:
            continue
        cuts = space.stage_cuts
        if cuts is None:
            cuts = stage_cuts(workload, plan, space.layers)
        elif wrong_cuts(cuts, space.layers, plan.stages, first=True, last=True) is not None:
            continue
        if len(cuts) == plan.stages - 1:
            yield plan.but(stage_cuts=cuts)


def recomputes(space: Space, plan: Plan) -> Recomputes:
    """Return the recompute options that differ for the plan's stages."""
    largest = max(stage_sizes(plan, space.layers), default=0)
    found: list[tuple[Recompute, float]] = []
    for kind, share in space.recompute:
        again = plan.but(recompute=kind)
        if takes_backward_apart(again) is not None or not can_compile_again(again, installed_torch()):
            continue
        if kind == "none":
            found.append((kind, 1.0))
        elif share is not None or not largest:
            found.append((kind, share if share is not None else 1.0))
        else:
            found += [(kind, count / largest) for count in range(1, largest + 1)]
    return Recomputes(found)


def stage_sizes(plan: Plan, layers: int) -> list[int]:
    """Return the number of blocks of each stage."""
    bounds = (0, *plan.stage_cuts, layers)
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def usable_devices(cluster: Cluster) -> tuple[int, ...]:
    """Return the world sizes to try on a cluster, in ranks: all devices first, then in falling order.

    Beside all devices, numbers of whole nodes that many sizes divide, and even parts of one node. Where more
    devices do not help, fewer are best.
    """
    per_node = min((len(node.devices) or 1) for node in cluster.nodes)
    machines = cluster.node_count
    counts = {machines} | {
        count
        for count in (2**twos * 3**threes for twos in range(machines.bit_length()) for threes in (0, 1, 2))
        if count <= machines and (count > machines // 2 or count & (count - 1) == 0)
    }
    within = [size for size in range(1, per_node) if per_node % size == 0]
    sizes = sorted({count * per_node for count in counts} | set(within), reverse=True)
    return (cluster.device_count or machines, *[size for size in sizes if size != cluster.device_count])


def samples_together(job: Job, dimensions: DecoderDimensions | None, workload: Workload | None = None) -> int:
    """Return the number of samples that one micro-batch must hold together; 1 for independent samples."""
    if workload is not None and workload.samples_together > 1:
        return workload.samples_together
    if (job.model.preset or job.model.family or "").startswith("resnet"):
        return job.model.batch_norm_group
    if dimensions is not None and dimensions.couples_samples:
        return dimensions.balance_group
    return 1


def _schedules(job: Job) -> tuple[tuple[Schedule, int], ...]:
    parallel, said = job.parallel, job.parallel.model_fields_set
    kinds: tuple[Schedule, ...] = (
        (parallel.schedule,) if "schedule" in said else tuple(VIRTUAL_STAGES)  # every schedule
    )
    found = []
    for kind in kinds:
        if parallel.virtual_stages is not None:
            numbers: tuple[int, ...] = (parallel.virtual_stages,)
        else:
            numbers = VIRTUAL.get(kind, (VIRTUAL_STAGES[kind],))
        found += [(kind, number) for number in numbers if wrong_stages(kind, number) is None]
    return tuple(found)


def _context_sizes(job: Job) -> Sizes:
    """Return the sizes of `cp` that leave each rank at least `LEAST_TOKENS` of a sequence."""
    most = max(job.data.sequence_length // LEAST_TOKENS, 1)
    return range(1, most + 1)


def _recompute(job: Job) -> tuple[tuple[Recompute, float | None], ...]:
    parallel, said = job.parallel, job.parallel.model_fields_set
    if "recompute" not in said or parallel.recompute == "auto":
        return (("none", 1.0), ("selective", None), ("full", None))
    if parallel.recompute == "none":
        return (("none", 1.0),)
    return ((parallel.recompute, parallel.recompute_share),)


def _sizes(allowed: Sizes, devices: int) -> Sequence[int]:
    if allowed is None:
        return divisors(devices)
    if isinstance(allowed, range):  # may have far more members than divisors exist
        return [size for size in divisors(devices) if size in allowed]
    return [size for size in allowed if devices % size == 0]


def stage_cuts(workload: Workload | None, plan: Plan, layers: int) -> tuple[int, ...]:
    """Return the stage boundaries of `planned_cuts`, computed once for all plans with as many stages."""
    again = run_again(plan)
    costs = None
    if workload is not None:
        costs = tuple((layer.count, layer.flops_per_sample) for layer in workload.layers)
    return _cuts(costs, plan.stages, again, layers)


@lru_cache(maxsize=4096)
def _cuts(
    costs: tuple[tuple[int, float], ...] | None, stages: int, again: float, layers: int
) -> tuple[int, ...]:
    workload = None
    if costs is not None:
        workload = Workload(tuple(Layer("", count, 0, flops, 0.0) for count, flops in costs), 1)
    # Any policy with the recomputed share `again` gives the same boundaries.
    plan = Plan(pp=stages, recompute="full", recompute_share=again)
    return planned_cuts(workload, plan, layers)
