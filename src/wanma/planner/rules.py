"""What a plan may be: every pair of settings that cannot be combined, refused with the reason.

Nothing has started when these rules are asked; each names the keys, why, and the way out.
"""

from __future__ import annotations

import math

from wanma.data.ramp import global_batch
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.models.presets import DecoderDimensions, model_kind


def check_axes(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Sizes of the axes against each other and against the machines.

    Raises:
        JobError: names the keys.
    """
    world, nodes = plan.world_size, job.cluster.nodes
    if world % nodes:
        raise JobError(
            f"the plan has {world} ranks, which cluster.nodes = {nodes} does not divide",
            "choose sizes of pp, dp_replicate, dp_shard, cp, tp whose product is a multiple of the nodes",
        )
    if nodes > 1 and job.cluster.rendezvous is None:
        raise JobError(
            f"cluster.nodes = {nodes}: the machines need a place to meet",
            "give --rendezvous HOST:PORT (cluster.rendezvous) with an address of one of them",
        )
    ranks_here = world // nodes
    for node in cluster.nodes:
        if plan.device == "cuda" and ranks_here > len(node.devices):
            raise JobError(
                f"the plan needs {ranks_here} GPUs on {node.name}, which has {len(node.devices)}",
                "lower the sizes in [parallel], add nodes, or set cluster.device = 'cpu'",
            )
    if plan.shard != "nothing" and plan.dp_shard * plan.cp == 1:
        raise JobError(
            f"parallel.shard = '{plan.shard}' has nobody to share with: parallel.dp_shard = 1",
            f"set parallel.dp_shard to the number of ranks (now dp_replicate = {plan.dp_replicate})",
        )
    if plan.shard == "nothing" and plan.dp_shard > 1:
        raise JobError(
            f"parallel.shard = 'nothing' with parallel.dp_shard = {plan.dp_shard}",
            f"write dp_replicate = {plan.dp_shard}, or say what is sharded: optimizer, gradients, parameters",
        )
    if plan.pp > 1 and job.model.loss is not None:
        raise JobError(
            f"model.loss = '{job.model.loss}' with parallel.pp = {plan.pp}: pipelines compute cross entropy",
            "set parallel.pp = 1, or leave model.loss out",
        )
    if plan.cp > 1:
        _check_context(job, plan)
    if min(global_batches(job)) < plan.data_ranks:
        raise JobError(
            f"train.global_batch = {min(global_batches(job))} gives {plan.data_ranks} data ranks "
            f"(dp_replicate × dp_shard) less than one sample each",
            f"raise train.global_batch to at least {plan.data_ranks}, or use fewer ranks",
        )


def check_dimensions(job: Job, plan: Plan, dimensions: DecoderDimensions) -> None:
    """Sizes of the axes against those of a decoder.

    Raises:
        JobError: names the keys.
    """
    _check_context_heads(plan, dimensions)


def check_micro_batches(job: Job, plan: Plan) -> None:
    """1F1B keeps every stage busy with a micro-batch of its own, and torch's refuses fewer."""
    smallest = min(global_batches(job))
    count = plan.accumulation(smallest)
    if plan.pp == 1 or plan.schedule != "1f1b" or count >= plan.pp:
        return
    rows = math.ceil(smallest / plan.data_ranks)
    if rows < plan.pp:
        raise JobError(
            f"parallel.pp = {plan.pp} stages need as many micro-batches in every step, but "
            f"train.global_batch = {smallest} gives each of {plan.data_ranks} data ranks {rows} samples",
            f"raise train.global_batch to at least {(plan.pp - 1) * plan.data_ranks + 1} (in every step of "
            "train.batch_ramp), lower parallel.pp, or set parallel.schedule = 'gpipe'",
        )
    raise JobError(
        f"parallel.micro_batch = {plan.micro_batch} cuts a data rank's {rows} samples of a step into {count} "
        f"micro-batches, fewer than parallel.pp = {plan.pp} stages",
        f"use parallel.micro_batch = {(rows - 1) // (plan.pp - 1)} or less, or parallel.schedule = 'gpipe'",
    )


def global_batches(job: Job) -> list[int]:
    """The global batches of the steps that the job has."""
    starts = {0, *(step for step, _ in job.train.batch_ramp if step < job.train.steps)}
    return [global_batch(job.train, step) for step in sorted(starts)]


def _check_context(job: Job, plan: Plan) -> None:
    """Sequences that the ranks of `cp` can share."""
    key = f"parallel.cp = {plan.cp}"
    named = job.model.huggingface is None and job.model.factory is None
    if job.data.images is not None or (named and model_kind(job.model) == "images"):
        raise JobError(
            f"{key} cuts sequences, and images have none",
            "set parallel.cp = 1 and use the ranks as dp_replicate or dp_shard",
        )
    if job.model.factory is not None:
        raise JobError(
            f"{key}: {job.model.factory} does not declare its attention, which must see what other ranks "
            "hold of a sequence",
            "set parallel.cp = 1; data-parallel axes (dp_replicate, dp_shard) work with any module",
        )
    length, unit = job.data.sequence_length, plan.sequence_unit
    if (job.data.text or job.data.sources) and length % unit:
        pieces = "twice as many pieces as ranks" if plan.context == "ring" else "as many pieces as ranks"
        shared = f", each shared by parallel.tp = {plan.tp}" if plan.sequence else ""
        raise JobError(
            f"data.sequence_length = {length} cannot be cut evenly: {key} with parallel.context = "
            f"'{plan.context}' needs {pieces}{shared}",
            f"use a multiple of {unit} for data.sequence_length, or a smaller parallel.cp",
        )


def _check_context_heads(plan: Plan, dimensions: DecoderDimensions) -> None:
    """All-to-all gives each context rank an equal share of the heads that `tp` leaves."""
    if plan.cp > 1 and plan.context == "all_to_all" and dimensions.heads % (plan.tp * plan.cp):
        raise JobError(
            f"parallel.cp = {plan.cp} with parallel.context = 'all_to_all' cannot share model.heads = "
            f"{dimensions.heads}" + (f" after parallel.tp = {plan.tp}" if plan.tp > 1 else ""),
            "set parallel.context = 'ring', which takes any number of heads, or use a cp × tp that divides "
            "the heads",
        )
