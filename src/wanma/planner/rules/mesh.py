"""Validation of mesh-dimension sizes and plan settings against job, cluster and model dimensions.

The rules run before anything starts; each error names the keys, the cause and the way out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.resolution import input_kind
from wanma.observe.units import count_text
from wanma.planner.pipeline.schedules import (
    INTERLEAVED,
    invalid_cuts_reason,
    invalid_micro_batches_reason,
    invalid_virtual_stages_reason,
)
from wanma.planner.rules.capabilities import unsupported_fp8_error
from wanma.planner.rules.compression import unsupported_compression_error, unused_compression_key_error
from wanma.planner.rules.predicates import (
    cp_divides_heads,
    mesh_divides_sequence,
    split_backward_conflict,
    tensor_parallel_sizes,
)


def check_mesh(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Check the sizes of the mesh dimensions against each other, the nodes and the batch.

    Raises:
        JobError: names the keys.
    """
    world, nodes = plan.world_size, job.cluster.nodes
    if world % nodes:
        raise JobError(
            f"the plan has {count_text(world, 'rank')}, which is not a multiple of cluster.nodes = {nodes}",
            "set pp, dp_replicate, dp_shard, cp and tp so that their product is a multiple of the nodes, or "
            'let the planner choose: parallel = "auto"',
        )
    if nodes > 1 and job.cluster.rendezvous is None:
        raise JobError(
            f"cluster.nodes = {nodes} needs a rendezvous address",
            "start all nodes from here with --engine ssh, slurm or ray; or start each with --rendezvous "
            "HOST:PORT (cluster.rendezvous), an address of one of them",
        )
    ranks_here = world // nodes
    for node in cluster.nodes:
        if plan.device == "cuda" and ranks_here > len(node.devices):
            raise JobError(
                f"the plan needs {ranks_here} GPUs on {node.name}; it has {len(node.devices)}",
                "lower the sizes in [parallel], add nodes, or set cluster.device = 'cpu'",
            )
    if plan.shard != "none" and plan.dp_shard * plan.cp == 1:
        raise JobError(
            f"parallel.shard = '{plan.shard}' needs more than one shard rank: parallel.dp_shard = 1",
            f"set parallel.dp_shard to the number of ranks (now dp_replicate = {plan.dp_replicate})",
        )
    check_shards(plan)
    if plan.pp > 1 and job.model.loss is not None:
        raise JobError(
            f"model.loss = '{job.model.loss}' with parallel.pp = {plan.pp}: pipelines support only "
            "cross entropy",
            "set parallel.pp = 1, or unset model.loss",
        )
    if plan.pp > 1:
        check_schedule(plan)
    else:
        _check_unused_stage_keys(job, plan)
    if plan.cp > 1:
        _check_context(job, plan)
    if plan.ep > 1:
        _check_expert_ranks(job, plan)
    _check_sequence(job, plan)
    _check_offload_and_recompute(job, plan)
    for error in (
        unsupported_fp8_error(plan, cluster),
        unused_compression_key_error(job),
        unsupported_compression_error(plan, cluster),
    ):
        if error is not None:
            raise error
    if min(global_batches(job)) < plan.data_parallel_size:
        raise JobError(
            f"train.global_batch = {min(global_batches(job))} gives {plan.data_parallel_size} data ranks "
            f"(dp_replicate × dp_shard) less than one sample each",
            f"raise train.global_batch to at least {plan.data_parallel_size}, or use fewer ranks",
        )


def check_shards(plan: Plan) -> None:
    """Check that `dp_shard` ranks shard something of the model states.

    Raises:
        JobError: names the keys.
    """
    if plan.shard == "none" and plan.dp_shard > 1:
        raise JobError(
            f"parallel.shard = 'none' with parallel.dp_shard = {plan.dp_shard}: nothing is sharded",
            f"set dp_replicate = {plan.dp_shard} instead, or set parallel.shard to 'optimizer', "
            "'gradients' or 'parameters'",
        )


def check_model_dimensions(plan: Plan, dimensions: DecoderConfig) -> None:
    """Check the sizes of the mesh dimensions against a decoder's dimensions.

    Raises:
        JobError: names the keys.
    """
    _check_tensor(plan, dimensions)
    _check_context_heads(plan, dimensions)
    _check_experts(plan, dimensions)


def check_schedule(plan: Plan) -> None:
    """Check the number of virtual stages, compile and recompute against the pipeline schedule.

    Raises:
        JobError: names the keys.
    """
    key = f"parallel.schedule = '{plan.schedule}'"
    if reason := invalid_virtual_stages_reason(plan.schedule, plan.virtual_stages):
        raise JobError(
            f"parallel.virtual_stages = {plan.virtual_stages}: {reason}",
            f"unset parallel.virtual_stages, or set parallel.schedule to {' or '.join(INTERLEAVED)}",
        )
    excluded = split_backward_conflict(plan)
    if excluded == "compile":
        raise JobError(
            f"{key} with parallel.compile: this schedule splits backward into input and weight "
            "gradients, which a compiled block computes together",
            "set parallel.compile = false, or parallel.schedule = 'interleaved_1f1b'",
        )
    if excluded == "recompute":
        raise JobError(
            f"{key} with parallel.recompute = '{plan.recompute}': this schedule splits backward into "
            "input and weight gradients, and each of them would recompute the block",
            "set parallel.recompute = 'none', or parallel.schedule = 'interleaved_1f1b'",
        )


def check_stage_cuts(job: Job, plan: Plan, blocks: int) -> None:
    """Check stage boundaries, the job's or chosen, against a model of `blocks` blocks between two ends.

    Raises:
        JobError: names the keys.
    """
    if plan.pp == 1:
        return
    cuts = job.parallel.stage_cuts or plan.stage_cuts
    if reason := invalid_cuts_reason(cuts, blocks, plan.stage_count, has_pre_block=True, has_post_block=True):
        cuts_text = f", parallel.stage_cuts = {list(cuts)}" if job.parallel.stage_cuts else ""
        raise JobError(
            f"parallel.pp = {plan.pp} with {plan.virtual_stages} stages per rank{cuts_text}: {reason}",
            f"unset parallel.stage_cuts, and use at most {blocks + 2} stages (pp × virtual_stages)",
        )


def check_micro_batches(job: Job, plan: Plan) -> None:
    """Check that the pipeline schedule can run the micro-batches of every step on every data rank.

    Raises:
        JobError: names the keys, and the nearest size of micro-batch that works.
    """
    if plan.pp == 1:
        return
    for batch in global_batches(job):
        violation = _first_invalid_count(plan, batch)
        if violation is None:
            continue
        rank, count, reason = violation
        sizes = valid_micro_batch_sizes(job, plan, max(plan.max_rows_per_data_rank(batch), plan.micro_batch))
        if sizes:
            nearest = min(sizes, key=lambda size: (abs(size - plan.micro_batch), size))
            way_out = f"set parallel.micro_batch = {nearest}"
        else:
            single = replace(plan, micro_batch=1)
            min_batch = next(
                larger for larger in itertools.count(batch) if _first_invalid_count(single, larger) is None
            )
            way_out = (
                f"raise train.global_batch to at least {min_batch} (in every step of train.batch_ramp), "
                "lower parallel.pp"
            )
        rows = plan.rows_per_data_rank(batch)[rank]
        subject = (
            f"data rank {rank}" if plan.batch_shares else f"each of {plan.data_parallel_size} data ranks"
        )
        raise JobError(
            f"parallel.pp = {plan.pp}: train.global_batch = {batch} gives {subject} {rows} samples, "
            f"which are {count} micro-batches of parallel.micro_batch = {plan.micro_batch}: {reason}",
            f"{way_out}, or set parallel.schedule = 'gpipe', which accepts any number",
        )


def _first_invalid_count(plan: Plan, batch: int) -> tuple[int, int, str] | None:
    """Return the first data rank whose number of micro-batches the schedule cannot run, or None.

    Returns:
        (data rank, number of micro-batches, reason).
    """
    counts = plan.micro_batch_counts(batch)
    for count in dict.fromkeys(counts):
        if reason := invalid_micro_batches_reason(plan.schedule, plan.pp, count):
            return counts.index(count), count, reason
    return None


def valid_micro_batch_sizes(job: Job, plan: Plan, largest: int) -> list[int]:
    """List the micro-batch sizes, in samples, with which the schedule can run every step of the job.

    Returns:
        those up to `largest`, the largest first; where there are none, the smallest above it, if any.
    """
    batches = global_batches(job)

    def is_admitted(size: int) -> bool:
        sized = replace(plan, micro_batch=size)
        return plan.pp == 1 or all(_first_invalid_count(sized, batch) is None for batch in batches)

    rows = plan.max_rows_per_data_rank(max(batches))
    smaller = [size for size in range(largest, 0, -1) if is_admitted(size)]
    return smaller or [size for size in range(largest + 1, rows + 1) if is_admitted(size)][:1]


def global_batches(job: Job) -> list[int]:
    """Return the global batch sizes of the job's steps, in samples, in the order of the steps."""
    starts = {0, *(step for step, _ in job.train.batch_ramp if step < job.train.steps)}
    return [global_batch_size(job.train, step) for step in sorted(starts)]


def _check_unused_stage_keys(job: Job, plan: Plan) -> None:
    """Refuse stage settings of a job without a pipeline, which would have no effect."""
    virtual = plan.virtual_stages if job.parallel.virtual_stages else 1  # else it is the schedule's default
    settings = {"virtual_stages": virtual if virtual > 1 else None, "stage_cuts": list(plan.stage_cuts)}
    for key, value in settings.items():
        if value:
            raise JobError(
                f"parallel.{key} = {value} with parallel.pp = 1: there is no pipeline",
                f"unset parallel.{key}, or set parallel.pp to the number of pipeline ranks",
            )


def _check_context(job: Job, plan: Plan) -> None:
    """Check that the sequences can be cut among the ranks of `cp`."""
    key = f"parallel.cp = {plan.cp}"
    named = job.model.huggingface is None and job.model.factory is None
    if job.data.has_images or (named and input_kind(job.model) in ("images", "interactions")):
        raise JobError(
            f"{key} splits sequences, which images and interactions have not",
            "set parallel.cp = 1, and use the ranks as dp_replicate or dp_shard",
        )
    if job.model.factory is not None:
        raise JobError(
            f"{key}: {job.model.factory} does not declare its attention layers, which communicate over cp",
            "set parallel.cp = 1; dp_replicate and dp_shard work with any module",
        )
    length, unit = job.data.sequence_length, plan.sequence_length_multiple
    if job.data.has_text and not mesh_divides_sequence(plan, length):
        pieces = "twice as many pieces as ranks" if plan.cp_method == "ring" else "as many pieces as ranks"
        shared = f", each split over parallel.tp = {plan.tp}" if plan.sequence_parallel else ""
        raise JobError(
            f"data.sequence_length = {length} cannot be split evenly: {key} with parallel.cp_method = "
            f"'{plan.cp_method}' needs {pieces}{shared}",
            f"set data.sequence_length to a multiple of {unit}, or lower parallel.cp",
        )


def _check_context_heads(plan: Plan, dimensions: DecoderConfig) -> None:
    """Check that all-to-all gives each context rank an equal share of the heads that `tp` leaves."""
    if not cp_divides_heads(dimensions, plan):
        raise JobError(
            f"parallel.cp = {plan.cp} with parallel.cp_method = 'all_to_all' cannot split model.heads = "
            f"{dimensions.heads}" + (f" after parallel.tp = {plan.tp}" if plan.tp > 1 else ""),
            "set parallel.cp_method = 'ring', which accepts any number of heads, or use a cp × tp that "
            "divides the heads",
        )


def _check_tensor(plan: Plan, dimensions: DecoderConfig) -> None:
    """Check that `tp` divides heads, inner width and vocabulary evenly.

    Key and value heads need not divide: where they do not, each rank computes those that its heads attend to.
    """
    sizes = tensor_parallel_sizes(dimensions)
    for key, size in sizes.items():
        if size % plan.tp:
            smaller = [str(tp) for tp in range(1, plan.tp) if all(n % tp == 0 for n in sizes.values())]
            remedy = f"set model.{key} to a multiple of {plan.tp}"
            raise JobError(
                f"parallel.tp = {plan.tp} does not divide model.{key} = {size}",
                f"set parallel.tp to {' or '.join(smaller)}, or {remedy}",
            )


def _check_expert_ranks(job: Job, plan: Plan) -> None:
    """Check that the model has experts and `ep` can be cut out of the data and context ranks."""
    named = job.model.huggingface is None and job.model.factory is None
    if job.model.factory is not None or (named and input_kind(job.model) in ("images", "interactions")):
        raise JobError(
            f"parallel.ep = {plan.ep}: {job.model.factory or job.model.preset or job.model.family} has "
            "no experts",
            "set parallel.ep = 1",
        )
    sizes = plan.valid_ep_sizes()
    if plan.ep not in sizes:
        ranks = plan.data_parallel_size * plan.cp
        raise JobError(
            f"parallel.ep = {plan.ep} cannot split {ranks} data and context ranks (dp_replicate × "
            "dp_shard × cp)"
            + (f" in shard groups of {plan.shard_group_size}" if plan.shard_group_size < ranks else ""),
            f"set parallel.ep to {' or '.join(map(str, sizes))}, or change dp_replicate, dp_shard or cp",
        )


def _check_experts(plan: Plan, dimensions: DecoderConfig) -> None:
    """Check that `ep` divides the experts."""
    experts = dimensions.experts
    if plan.ep > 1 and experts == 0:
        raise JobError(
            f"parallel.ep = {plan.ep}, but the model has no experts",
            "set parallel.ep = 1, or set model.experts",
        )
    if experts % plan.ep:
        sizes = [str(size) for size in plan.valid_ep_sizes() if experts % size == 0]
        raise JobError(
            f"parallel.ep = {plan.ep} does not divide model.experts = {experts}",
            f"set parallel.ep to {' or '.join(sizes)}, or set model.experts to a multiple of {plan.ep}",
        )


def _check_sequence(job: Job, plan: Plan) -> None:
    """Check that sequence parallelism over `tp` divides the sequence evenly."""
    length = job.data.sequence_length
    if plan.sequence_parallel and job.data.has_text and length % plan.tp:
        raise JobError(
            f"data.sequence_length = {length} is not a multiple of parallel.tp = {plan.tp}",
            f"set it to a multiple of {plan.tp}, or set parallel.sequence_parallel = false",
        )


def _check_offload_and_recompute(job: Job, plan: Plan) -> None:
    parallel = job.parallel
    kinds = ("parameters", "optimizer", "activations")
    host_keys = [f"parallel.offload_{kind}" for kind in kinds if getattr(plan, f"offload_{kind}") == "host"]
    if plan.device == "cpu" and host_keys:
        raise JobError(
            f"{' and '.join(host_keys)} = 'host' has no effect on CPUs: the data is in host memory already",
            "offload to 'disk', or unset the key",
        )
    if parallel.recompute_share < 1 and parallel.recompute in ("none", "auto"):
        raise JobError(
            f"parallel.recompute_share = {parallel.recompute_share:g} with parallel.recompute = "
            f"'{parallel.recompute}'" + (", which chooses the share" if parallel.recompute == "auto" else ""),
            "unset parallel.recompute_share, or set parallel.recompute = 'full' or 'selective'",
        )
