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
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ContextParallelMethod, Recompute, Schedule, Shard
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.embedding_placement import embedding_plan_fields
from wanma.planner.pipeline.schedules import (
    DEFAULT_VIRTUAL_STAGES,
    invalid_cuts_reason,
    invalid_virtual_stages_reason,
    plan_stage_cuts,
    recompute_forwards,
)
from wanma.planner.rules.capabilities import supports_compiled_recompute
from wanma.planner.rules.compression import compression_plan_fields
from wanma.planner.rules.mesh import global_batches
from wanma.planner.rules.predicates import (
    candidate_micro_batch_sizes,
    cp_divides_heads,
    divisors,
    ep_divides_experts,
    keeps_sample_groups,
    mesh_divides_sequence,
    schedule_accepts_batches,
    shard_matches_ranks,
    split_backward_conflict,
    tp_divides_model,
)
from wanma.planner.search.recompute_options import RecomputeOptions
from wanma.torch_internals.versions import installed_torch_version

AllowedSizes = tuple[int, ...] | range | None
"""Sizes of a mesh dimension, in ranks; None: every size that divides the devices."""

StateSharding = tuple[int, int, Shard]
"""State sharding: (dp_replicate, dp_shard, shard level)."""

SHARD_LEVELS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")
VIRTUAL_STAGE_OPTIONS: Mapping[Schedule, tuple[int, ...]] = MappingProxyType(
    {"interleaved_1f1b": (2, 3, 4, 6, 8, 12), "interleaved_zero_bubble": (1, 2)}
)
"""Virtual stages per rank with which interleaved schedules are tried.

A zero-bubble schedule gains little by more.
"""
MIN_CONTEXT_TOKENS = 2048
"""Fewest tokens of a sequence that context parallelism leaves each rank, where the job sets no size.

Shorter pieces gain less than the uncertainty of forecasts: of GPT-3 on 1,024 A100s, 2 % from pieces of 1,024
tokens (`benchmarks.planner.speed --context`).
"""


@dataclass(frozen=True)
class SearchSpace:
    """Values of every plan setting; a plan of the space has one of each (`enumerate_plans`)."""

    base_plan: Plan
    """Plan with the settings that the space does not vary: precision, device, threads."""
    world_sizes: tuple[int, ...]
    """World sizes, in ranks."""
    global_batches: tuple[int, ...]
    """Global batch sizes of the job's steps, in samples, all of which a plan must be able to run."""
    dimensions: DecoderConfig | None
    sequence_length: int | None
    """Tokens of every sample; None where unknown."""
    sample_group_size: int = 1
    """Samples that one micro-batch must hold together."""
    pp: AllowedSizes = None
    dp_replicate: AllowedSizes = None
    dp_shard: AllowedSizes = None
    cp: AllowedSizes = None
    tp: AllowedSizes = None
    ep: AllowedSizes = None
    shard: tuple[Shard, ...] = SHARD_LEVELS
    sequence_parallel: tuple[bool, ...] = (True, False)
    cp_method: tuple[ContextParallelMethod, ...] = ("ring", "all_to_all")
    micro_batch: AllowedSizes = None
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
    def from_job(
        cls,
        job: Job,
        cluster: Cluster,
        dimensions: DecoderConfig | None,
        *,
        base_plan: Plan | None = None,
        world_sizes: Sequence[int] | None = None,
        workload: Workload | None = None,
    ) -> SearchSpace:
        """Build the search space that a job leaves open on a cluster.

        Args:
            job: the job.
            cluster: equal nodes.
            dimensions: the decoder's dimensions; other models are split over samples unless the job says.
            base_plan: settings that the space does not vary; default: the job's precision on the cluster.
            world_sizes: world sizes, in ranks; default: `candidate_world_sizes`.
            workload: traced workload of a user's own module, with the samples that it needs together.
        """
        parallel = job.parallel
        set_fields = parallel.model_fields_set
        kind = "cuda" if all(node.devices for node in cluster.nodes) else "cpu"
        base_plan = base_plan or Plan(
            precision=job.train.precision,
            fp8=job.train.fp8,
            device="cpu" if job.cluster.device == "cpu" else kind,
            **compression_plan_fields(job),
            **embedding_plan_fields(job),
        )

        def sizes(axis: str, default: AllowedSizes) -> AllowedSizes:
            return (getattr(parallel, axis),) if axis in set_fields else default

        def allowed(key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
            return (getattr(parallel, key),) if key in set_fields else default

        is_decoder = dimensions is not None
        decoder_only: AllowedSizes = None if is_decoder else (1,)
        has_text = job.data.has_text
        base_plan = base_plan.with_changes(
            offload_parameters=parallel.offload_parameters,
            offload_optimizer=parallel.offload_optimizer,
            offload_activations=parallel.offload_activations,
        )
        return cls(
            base_plan=base_plan,
            world_sizes=tuple(world_sizes) if world_sizes is not None else candidate_world_sizes(cluster),
            global_batches=tuple(global_batches(job)),
            dimensions=dimensions,
            sequence_length=job.data.sequence_length if has_text else None,
            sample_group_size=coupled_samples(job, dimensions, workload),
            pp=sizes("pp", (1,) if job.model.loss is not None else decoder_only),
            dp_replicate=sizes("dp_replicate", None),
            dp_shard=sizes("dp_shard", None),
            cp=sizes("cp", _context_sizes(job) if is_decoder else (1,)),
            tp=sizes("tp", decoder_only),
            ep=sizes("ep", decoder_only if dimensions is not None and dimensions.experts else (1,)),
            shard=(parallel.shard,) if parallel.shard is not None else SHARD_LEVELS,
            sequence_parallel=allowed("sequence_parallel", (True, False)),
            cp_method=allowed("cp_method", ("ring", "all_to_all")),
            micro_batch=(parallel.micro_batch,) if parallel.micro_batch is not None else None,
            schedules=_schedules(job),
            stage_cuts=tuple(parallel.stage_cuts) or None,
            recompute=_recompute(job),
            compile=allowed(
                "compile", (False, True) if is_decoder and base_plan.device == "cuda" else (False,)
            ),
        )

    @classmethod
    def unrestricted(
        cls, job: Job, cluster: Cluster, dimensions: DecoderConfig | None, **choices: Any
    ) -> SearchSpace:
        """Build the space of a job without its [parallel] section; `choices` replace fields of the space."""
        free = job.model_copy(update={"parallel": type(job.parallel)()})
        space = cls.from_job(free, cluster, dimensions)
        return replace(space, **{"cp": None, "compile": (False, True), **choices})

    @property
    def layers(self) -> int:
        return self.dimensions.layers if self.dimensions is not None else 0


@dataclass(frozen=True)
class MeshShape:
    """Mesh shape: sizes of the mesh dimensions before the data ranks are divided into replicas and shards."""

    pp: int
    cp: int
    tp: int
    ep: int
    data_ranks: int

    @property
    def world_size(self) -> int:
        return self.pp * self.cp * self.tp * self.data_ranks


def enumerate_plans(space: SearchSpace, workload: Workload | None) -> Iterator[Plan]:
    """Yield all plans of the space, each once, in a fixed order."""
    for grid in enumerate_mesh_shapes(space):
        shardings = sharding_plans(space, grid)
        for plan in unsharded_plans(space, grid, workload):
            for recompute, share in recompute_options(space, plan):
                recompute_plan = replace(plan, recompute=recompute, recompute_share=share)
                for option in shardings:
                    yield replace(
                        recompute_plan,
                        dp_replicate=option.dp_replicate,
                        dp_shard=option.dp_shard,
                        shard=option.shard,
                    )


def enumerate_mesh_shapes(space: SearchSpace) -> Iterator[MeshShape]:
    """Yield the mesh shapes that fill the devices and that model and batch can be split into."""
    for devices in space.world_sizes:
        for tp in _sizes(space.tp, devices):
            if space.dimensions is not None and not tp_divides_model(space.dimensions, tp):
                continue
            for cp in _sizes(space.cp, devices // tp):
                if space.sequence_length is not None and space.sequence_length % cp:
                    continue
                for pp in _sizes(space.pp, devices // tp // cp):
                    data_ranks = devices // (tp * cp * pp)
                    if data_ranks > min(space.global_batches) or (pp > 1 and pp > space.layers + 2):
                        continue
                    for ep in _sizes(space.ep, data_ranks * cp):
                        if ep == 1 or (space.dimensions and space.dimensions.experts % ep == 0):
                            yield MeshShape(pp, cp, tp, ep, data_ranks)


def grid_count(space: SearchSpace) -> int:
    """Return the number of mesh shapes of the space: a coarse measure of the duration of its search."""
    return sum(1 for _ in enumerate_mesh_shapes(space))


def sharding_plans(space: SearchSpace, mesh_shape: MeshShape) -> list[Plan]:
    """List the plans of a mesh shape with each state sharding; all other settings are `space.base_plan`'s."""
    plain = space.base_plan.with_changes(
        pp=mesh_shape.pp, cp=mesh_shape.cp, tp=mesh_shape.tp, ep=mesh_shape.ep
    )
    return [
        plain.with_changes(dp_replicate=dp_replicate, dp_shard=dp_shard, shard=shard)
        for dp_replicate, dp_shard, shard in state_shardings(space, mesh_shape)
    ]


def state_shardings(space: SearchSpace, mesh_shape: MeshShape) -> Iterator[StateSharding]:
    """Yield the state shardings of a mesh shape, as in `sharding_plans`."""
    for dp_shard in _sizes(space.dp_shard, mesh_shape.data_ranks):
        dp_replicate = mesh_shape.data_ranks // dp_shard
        if space.dp_replicate is not None and dp_replicate not in space.dp_replicate:
            continue
        for shard in space.shard:
            if not shard_matches_ranks(shard, dp_shard, mesh_shape.cp):
                continue
            if mesh_shape.ep > 1:
                sharding = Plan(
                    dp_replicate=dp_replicate,
                    dp_shard=dp_shard,
                    cp=mesh_shape.cp,
                    ep=mesh_shape.ep,
                    shard=shard,
                )
                if not ep_divides_experts(space.dimensions, sharding):
                    continue
            yield dp_replicate, dp_shard, shard


def unsharded_plans(space: SearchSpace, mesh_shape: MeshShape, workload: Workload | None) -> Iterator[Plan]:
    """Yield the plans of a mesh shape without recompute and state sharding; all data ranks are replicas."""
    sizes = mesh_micro_batch_sizes(space, mesh_shape)
    for split in compute_splits(space, mesh_shape):
        for plan in with_schedules(space, split, workload):
            for size in sizes:
                sized = replace(plan, micro_batch=size)
                if schedule_accepts_batches(sized, space.global_batches):
                    yield sized


def compute_splits(space: SearchSpace, mesh_shape: MeshShape) -> Iterator[Plan]:
    """Yield the splits of samples and matrices of a mesh shape, one stage, one-sample micro-batches."""
    plain = space.base_plan.with_changes(
        pp=mesh_shape.pp,
        dp_replicate=mesh_shape.data_ranks,
        dp_shard=1,
        cp=mesh_shape.cp,
        tp=mesh_shape.tp,
        ep=mesh_shape.ep,
        shard="none",
        micro_batch=1,
        virtual_stages=1,
        stage_cuts=(),
        recompute="none" if len(space.recompute) > 1 else space.recompute[0][0],
        recompute_share=1.0 if len(space.recompute) > 1 else space.recompute[0][1] or 1.0,
    )
    contexts = space.cp_method if mesh_shape.cp > 1 else space.cp_method[:1]
    sequences = space.sequence_parallel if mesh_shape.tp > 1 else (False,)
    for sequence, context in itertools.product(sequences, contexts):
        split = plain.with_changes(sequence_parallel=sequence, cp_method=context)
        if space.sequence_length is not None and not mesh_divides_sequence(split, space.sequence_length):
            continue
        if space.dimensions is not None and not cp_divides_heads(space.dimensions, split):
            continue
        for compiled in space.compile:
            yield split.with_changes(compile=compiled)


def mesh_micro_batch_sizes(space: SearchSpace, mesh_shape: MeshShape) -> list[int]:
    """List the micro-batch sizes of a mesh shape, in samples, with whole sample groups on every data rank."""
    rows = math.ceil(max(space.global_batches) / mesh_shape.data_ranks)
    sizes = candidate_micro_batch_sizes(rows) if space.micro_batch is None else space.micro_batch
    if space.sample_group_size == 1:
        return list(sizes)
    plain = Plan(dp_replicate=mesh_shape.data_ranks)
    return [
        size
        for size in sizes
        if keeps_sample_groups(
            replace(plain, micro_batch=size), space.global_batches, space.sample_group_size
        )
    ]


def with_schedules(space: SearchSpace, split: Plan, workload: Workload | None) -> Iterator[Plan]:
    """Yield `split` with each pipeline schedule and its stages."""
    if split.pp == 1:
        yield split
        return
    for schedule, virtual in space.schedules:
        if split.pp * virtual > space.layers + 2:
            continue
        plan = split.with_changes(schedule=schedule, virtual_stages=virtual)
        if split_backward_conflict(plan) is not None:
            continue
        cuts = space.stage_cuts
        if cuts is None:
            cuts = stage_cuts(workload, plan, space.layers)
        elif (
            invalid_cuts_reason(cuts, space.layers, plan.stage_count, has_pre_block=True, has_post_block=True)
            is not None
        ):
            continue
        if len(cuts) == plan.stage_count - 1:
            yield plan.with_changes(stage_cuts=cuts)


def recompute_options(space: SearchSpace, plan: Plan) -> RecomputeOptions:
    """Return the recompute options that differ for the plan's stages."""
    largest = max(blocks_per_stage(plan, space.layers), default=0)
    options: list[tuple[Recompute, float]] = []
    for kind, share in space.recompute:
        recompute_plan = plan.with_changes(recompute=kind)
        if split_backward_conflict(recompute_plan) is not None or not supports_compiled_recompute(
            recompute_plan, installed_torch_version()
        ):
            continue
        if kind == "none":
            options.append((kind, 1.0))
        elif share is not None or not largest:
            options.append((kind, share if share is not None else 1.0))
        else:
            options += [(kind, count / largest) for count in range(1, largest + 1)]
    return RecomputeOptions(options)


def blocks_per_stage(plan: Plan, layers: int) -> list[int]:
    """Return the number of blocks of each stage."""
    bounds = (0, *plan.stage_cuts, layers)
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def candidate_world_sizes(cluster: Cluster) -> tuple[int, ...]:
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
    node_parts = [size for size in range(1, per_node) if per_node % size == 0]
    sizes = sorted({count * per_node for count in counts} | set(node_parts), reverse=True)
    return (cluster.device_count or machines, *[size for size in sizes if size != cluster.device_count])


def coupled_samples(job: Job, dimensions: DecoderConfig | None, workload: Workload | None = None) -> int:
    """Return the number of samples that one micro-batch must hold together; 1 for independent samples."""
    if workload is not None and workload.coupled_samples > 1:
        return workload.coupled_samples
    if (job.model.preset or job.model.family or "").startswith("resnet"):
        return job.model.batch_norm_group
    if dimensions is not None and dimensions.has_sample_coupling:
        return dimensions.balance_group
    return 1


def _schedules(job: Job) -> tuple[tuple[Schedule, int], ...]:
    parallel, set_fields = job.parallel, job.parallel.model_fields_set
    kinds: tuple[Schedule, ...] = (
        (parallel.schedule,) if "schedule" in set_fields else tuple(DEFAULT_VIRTUAL_STAGES)  # every schedule
    )
    options = []
    for kind in kinds:
        if parallel.virtual_stages is not None:
            numbers: tuple[int, ...] = (parallel.virtual_stages,)
        else:
            numbers = VIRTUAL_STAGE_OPTIONS.get(kind, (DEFAULT_VIRTUAL_STAGES[kind],))
        options += [
            (kind, number) for number in numbers if invalid_virtual_stages_reason(kind, number) is None
        ]
    return tuple(options)


def _context_sizes(job: Job) -> AllowedSizes:
    """Return the sizes of `cp` that leave each rank at least `MIN_CONTEXT_TOKENS` of a sequence."""
    max_size = max(job.data.sequence_length // MIN_CONTEXT_TOKENS, 1)
    return range(1, max_size + 1)


def _recompute(job: Job) -> tuple[tuple[Recompute, float | None], ...]:
    parallel, set_fields = job.parallel, job.parallel.model_fields_set
    if "recompute" not in set_fields or parallel.recompute == "auto":
        return (("none", 1.0), ("selective", None), ("full", None))
    if parallel.recompute == "none":
        return (("none", 1.0),)
    return ((parallel.recompute, parallel.recompute_share),)


def _sizes(allowed: AllowedSizes, devices: int) -> Sequence[int]:
    if allowed is None:
        return divisors(devices)
    if isinstance(allowed, range):  # may have far more members than divisors exist
        return [size for size in divisors(devices) if size in allowed]
    return [size for size in allowed if devices % size == 0]


def stage_cuts(workload: Workload | None, plan: Plan, layers: int) -> tuple[int, ...]:
    """Return the stage boundaries of `plan_stage_cuts`, computed once for all plans with as many stages."""
    recompute = recompute_forwards(plan)
    costs = None
    if workload is not None:
        costs = tuple((layer.count, layer.flops_per_sample) for layer in workload.layers)
    return _cuts(costs, plan.stage_count, recompute, layers)


@lru_cache(maxsize=4096)
def _cuts(
    costs: tuple[tuple[int, float], ...] | None, stages: int, recompute: float, layers: int
) -> tuple[int, ...]:
    workload = None
    if costs is not None:
        workload = Workload(tuple(LayerWorkload("", count, 0, flops, 0.0) for count, flops in costs), 1)
    # Any policy with the recomputed share `recompute` gives the same boundaries.
    plan = Plan(pp=stages, recompute="full", recompute_share=recompute)
    return plan_stage_cuts(workload, plan, layers)
