"""From a job and the machines to a plan: what the job fixes is kept, the rest follows by stated rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast import Forecast, Workload
from wanma.job.plan import Plan
from wanma.job.sections import Job, ParallelSection
from wanma.models.dimensions import DecoderDimensions
from wanma.observe.units import bytes_text
from wanma.planner.memory import forecast_memory
from wanma.planner.recompute import least_recompute
from wanma.planner.rules import (
    admitted_micro_batches,
    check_axes,
    check_batch_shares,
    check_dimensions,
    check_micro_batches,
    check_schedule,
    check_stage_cuts,
    global_batches,
)
from wanma.planner.stages import VIRTUAL_STAGES, planned_cuts

MEMORY_SHARE = 0.85
"""Of a device's memory, what a forecast may fill."""
CPU_TOKENS = 4096
"""Targets per micro-batch on a CPU: larger ones leave the caches and gain nothing."""


@dataclass(frozen=True)
class Planned:
    """A plan with its forecast; None for a model that cannot be read before its data."""

    plan: Plan
    forecast: Forecast | None


def device_of(job: Job, cluster: Cluster) -> str:
    """ "cuda" or "cpu".

    Raises:
        JobError: a GPU is asked for and none is here.
    """
    has_gpu = all(node.devices for node in cluster.nodes)
    if job.cluster.device == "cuda" and not has_gpu:
        raise JobError(
            "cluster.device = 'cuda', but this machine shows no NVIDIA GPU",
            "use cluster.device = 'auto' or 'cpu'; `wanma doctor` says what was looked for",
        )
    return "cuda" if has_gpu and job.cluster.device != "cpu" else "cpu"


def layout(job: Job, cluster: Cluster) -> Plan:
    """The axes, device and threads of a job: all of a plan that does not depend on the model.

    Raises:
        JobError: sizes that contradict each other or the machine; names the keys.
    """
    parallel = job.parallel
    device = device_of(job, cluster)
    if parallel.auto:
        parallel = _automatic(job, cluster, device)
    shard = parallel.shard or ("parameters" if parallel.dp_shard > 1 else "nothing")
    check_batch_shares(parallel)
    plan = Plan(
        pp=parallel.pp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        shard=shard,
        sequence=parallel.sequence and parallel.tp > 1,
        context=parallel.context,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages or VIRTUAL_STAGES[parallel.schedule],
        stage_cuts=tuple(parallel.stage_cuts),
        recompute="none" if parallel.recompute == "auto" else parallel.recompute,
        recompute_share=parallel.recompute_share,
        offload_parameters=parallel.offload_parameters,
        offload_optimizer=parallel.offload_optimizer,
        offload_activations=parallel.offload_activations,
        compile=parallel.compile,
        precision=job.train.precision,
        fp8=job.train.fp8,
        device=device,
        approximate=("fp8",) if job.train.fp8 else (),
        batch_shares=tuple(parallel.batch_shares),
    )
    check_axes(job, plan, cluster)
    node = cluster.nodes[0]
    ranks_here = plan.world_size // job.cluster.nodes
    threads = job.cluster.threads_per_rank or max(node.cores // ranks_here, 1)
    return replace(plan, threads_per_rank=threads)


def complete(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    workload: Workload | None,
    dimensions: DecoderDimensions | None = None,
) -> Planned:
    """Choose the micro-batch and forecast memory.

    Args:
        dimensions: of a decoder, where the model is one.

    Raises:
        JobError: the plan splits what this model cannot, or not even one sample per micro-batch fits.
    """
    rows = plan.most_rows(min(global_batches(job)))
    group = _group(job, dimensions)
    reasons = [_layout_reason(job, plan)]
    if dimensions is not None:
        check_dimensions(plan, dimensions)
    if dimensions is not None and plan.pp > 1:
        plan = _cut(job, plan, workload, dimensions.layers)
    if workload is None:
        if job.parallel.recompute == "auto":
            raise JobError(
                "parallel.recompute = 'auto' needs a forecast, which a model of one's own does not have",
                "say parallel.recompute = 'none', 'selective' or 'full'",
            )
        sizes = admitted_micro_batches(job, plan, max(rows // plan.pp, 1)) or [1]
        plan = replace(plan, micro_batch=job.parallel.micro_batch or sizes[0])
        check_micro_batches(job, plan)
        return Planned(plan, None)

    limit = _memory_per_rank(plan, cluster, job) * MEMORY_SHARE

    def needs(sized: Plan) -> Forecast:
        return forecast_memory(
            workload,
            sized,
            job.train.optimizer,
            micro_batches=sized.accumulation(max(global_batches(job))),
            weight_average=job.train.weight_average > 0,
        )

    def fits(sized: Plan) -> bool:
        return needs(sized).memory_bytes <= limit

    if job.parallel.micro_batch is not None:
        micro_batch = job.parallel.micro_batch
        if not group.are_whole(job, replace(plan, micro_batch=micro_batch)):
            raise group.refusal(job, plan)
    else:
        largest = rows if plan.pp == 1 else max(rows // (2 * plan.pp), 1)
        if plan.device == "cpu":
            largest = min(largest, max(CPU_TOKENS // workload.tokens_per_sample, 1))
        sizes = _micro_batches(job, plan, group, largest)
        largest = sizes[0]
        fitting = (size for size in sizes if fits(replace(plan, micro_batch=size)))
        micro_batch = next(fitting, sizes[-1])
        reasons.append(
            f"micro_batch {micro_batch}: the largest that fits, at most {largest} "
            f"({rows} samples per rank and step)"
        )
    plan = replace(plan, micro_batch=micro_batch)
    check_micro_batches(job, plan)
    if job.parallel.recompute == "auto":
        plan, reason = least_recompute(plan, workload, fits)
        reasons.append(reason)
        if plan.pp > 1:
            check_schedule(plan)
    forecast = needs(plan)
    _check_host(forecast, plan, cluster, job)
    if forecast.memory_bytes > limit:
        raise JobError(
            f"the plan does not fit: a rank needs about {bytes_text(forecast.memory_bytes)} of "
            f"{bytes_text(limit)}: {_largest_kind(forecast)}",
            "shard more (parallel.dp_shard, shard = 'parameters'), set parallel.recompute = 'auto', offload "
            "(parallel.offload_*), or take a smaller model, micro-batch or sequence",
        )
    return Planned(plan, replace(forecast, reasons=tuple(reasons)))


def _cut(job: Job, plan: Plan, workload: Workload | None, blocks: int) -> Plan:
    """The plan with the stages that the job asks for, or with equally dear ones.

    Raises:
        JobError: the job's cuts, or the number of stages, do not fit the model.
    """
    if not plan.stage_cuts:
        plan = replace(plan, stage_cuts=planned_cuts(workload, plan, blocks))
    check_stage_cuts(job, plan, blocks)
    return plan


def _automatic(job: Job, cluster: Cluster, device: str) -> ParallelSection:
    """All GPUs as one sharded replica; on CPUs one process with all cores. Sizes that the job gives stay.

    One process was the faster on the CPUs measured, for the same cores: two ranks pay for
    communication what threads share for nothing (docs/performance.md).
    """
    parallel = job.parallel
    if parallel.dp_shard > 1:
        return parallel
    # Machines that are not here are taken to be like those that are.
    on_each = min(len(node.devices) for node in cluster.nodes) if device == "cuda" else 1
    others = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    return parallel.model_copy(update={"dp_shard": max(on_each * job.cluster.nodes // others, 1)})


def _layout_reason(job: Job, plan: Plan) -> str:
    if not job.parallel.auto:
        return f"{plan.world_size} ranks as the job says"
    if plan.device == "cuda":
        return f"{plan.world_size} GPUs found; {plan.shard} sharded over {plan.dp_shard} of them"
    return "one process per machine with all its cores: on CPUs threads beat ranks (docs/performance.md)"


def _micro_batches(job: Job, plan: Plan, group: _Group, largest: int) -> list[int]:
    """Sizes to try, from the largest on.

    Raises:
        JobError: none gives every rank whole groups.
    """
    if plan.pp > 1:
        sizes = admitted_micro_batches(job, plan, largest) or [1]  # which is then refused with the reason
    elif group.size == 1:
        return [largest >> halvings for halvings in range(largest.bit_length())]
    else:
        sizes = list(range(max(largest // group.size, 1) * group.size, 0, -group.size))
    whole = [size for size in sizes if group.are_whole(job, replace(plan, micro_batch=size))]
    if not whole:
        raise group.refusal(job, plan)
    return whole


@dataclass(frozen=True)
class _Group:
    """Samples that must be computed in one micro-batch, because something is defined over them."""

    size: int
    key: str
    what: str
    """They share it."""

    def are_whole(self, job: Job, plan: Plan) -> bool:
        """Whether every micro-batch of every rank is a multiple of the group."""
        return self.size == 1 or all(
            len(run) > 0 and len(run) % self.size == 0
            for batch in global_batches(job)
            for rank in _unlike_ranks(plan)
            for run in plan.micro_batches(batch, rank)
        )

    def refusal(self, job: Job, plan: Plan) -> JobError:
        batches = ", ".join(map(str, global_batches(job)))
        return JobError(
            f"train.global_batch = {batches} over {plan.data_ranks} data ranks does not divide into "
            f"micro-batches of whole groups: {self.key} = {self.size} samples share {self.what}",
            f"make train.global_batch a multiple of {self.size * plan.data_ranks} and parallel.micro_batch "
            f"one of {self.size}, or change {self.key}",
        )


def _unlike_ranks(plan: Plan) -> Iterable[int]:
    """Data ranks among which are all sizes: even ones differ by one at most, the larger ones first."""
    return range(plan.data_ranks) if plan.batch_shares else (0, plan.data_ranks - 1)


def _group(job: Job, dimensions: DecoderDimensions | None) -> _Group:
    if job.model.family == "resnet" or (job.model.preset or "").startswith("resnet"):
        return _Group(job.model.statistics_group, "model.statistics_group", "one statistic")
    if dimensions is not None and dimensions.couples_samples:
        return _Group(dimensions.balance_group, "model.balance_group", "the experts' balance and capacity")
    return _Group(1, "", "")


def _memory_per_rank(plan: Plan, cluster: Cluster, job: Job) -> float:
    node = min(cluster.nodes, key=lambda node: node.memory_bytes)
    if plan.device == "cuda":
        return min(device.memory_bytes for node in cluster.nodes for device in node.devices)
    return node.memory_bytes / (plan.world_size // job.cluster.nodes)


def _check_host(forecast: Forecast, plan: Plan, cluster: Cluster, job: Job) -> None:
    """What waits in the host's memory must fit there."""
    node = min(cluster.nodes, key=lambda node: node.memory_bytes)
    needed = forecast.host_bytes * (plan.world_size // job.cluster.nodes)
    if needed > node.memory_bytes * MEMORY_SHARE:
        raise JobError(
            f"the plan does not fit: {bytes_text(needed)} would wait in the memory of {node.name}, "
            f"which has {bytes_text(node.memory_bytes)}",
            "offload less to 'host' (parallel.offload_*), or to 'disk'",
        )


def _largest_kind(forecast: Forecast) -> str:
    kinds = {
        "parameters": forecast.parameters_bytes,
        "gradients": forecast.gradients_bytes,
        "optimizer state": forecast.optimizer_bytes,
        "activations": forecast.activations_bytes,
        "logits": forecast.logits_bytes,
        "Python and torch": forecast.runtime_bytes,
    }
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in ordered if size)
