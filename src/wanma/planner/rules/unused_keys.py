"""Detection of job keys without effect in the run, each with the reason.

Only keys with another value than their default are considered: a job file may spell out every default. Keys
that contradict the rest of a job are errors elsewhere; keys without effect are only reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.job.file.schema import schema_keys
from wanma.job.file.serialization import toml_value
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job

_ADAM_OPTIMIZERS = ("adamw", "muon")
_CONTENT_OF_TABLES = {
    "data.chat.": "conversations (data.columns.messages)",
    "data.image_transform.": "stored images",
    "data.interactions.": "interactions",
}
"""Content of the samples to which the keys of a table apply, by the beginning of their paths."""


def unused_key_notes(job: Job, plan: Plan) -> list[str]:
    """Return one sentence for each job key without effect.

    Example: 'train.warmup_steps = 500 is not reached: the run has 300 steps'.
    """
    notes = []
    for path, reason in _unused_keys(job, plan):
        value = attrgetter(path)(job)
        if not _is_default(path, value):
            notes.append(f"{path} = {toml_value(value)} has no effect: {reason}")
    return notes + list(_partial_effect_notes(job, plan))


def _unused_keys(job: Job, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the keys that have no effect whatever their value, each with the reason."""
    yield from _unused_layout_keys(job, plan)
    yield from _unused_training_keys(job)
    yield from _unused_cluster_keys(job)
    yield from _unused_order_keys(job)
    yield from _unused_checkpoint_keys(job)
    yield from _unused_observe_keys(job)
    yield from _keys_of_other_data(job)
    if job.model.lora_rank == 0:
        for name in ("lora_alpha", "lora_targets"):
            yield f"model.{name}", "there are no adapters (model.lora_rank = 0)"
    if job.data.has_text or job.data.has_interactions:
        yield "data.worker_processes", "only images, tables and a dataset of your own are read by processes"
    if job.data.has_images or job.data.has_text or job.data.has_interactions:
        yield "data.check_reads", "only a dataset of your own is read twice"
    if job.data.is_own or job.data.has_images or job.data.has_interactions:
        names = {
            "factory": job.data.has_factory,
            "tables": job.data.has_table,
            "images": job.data.has_images,
            "interactions": True,
        }
        name = next(name for name, is_given in names.items() if is_given)
        kind = f"{name} in data.sources" if job.data.sources else f"data.{name}"
        if job.data.path:
            kind = f"{name} in data.path"
        own_model = ("sequence_length",) if job.model.factory is not None else ()
        for name in ("tokenizer", "document_masks", *own_model):
            yield f"data.{name}", f"it applies to text, and the data come from {kind}"
    if job.data.is_own and not job.data.has_table:
        for name in ("bad_data", "bad_data_limit", "cache"):
            yield f"data.{name}", f"it applies to stored data, and the data come from {kind}"
    elif job.data.bad_data not in ("skip", "substitute"):
        yield "data.bad_data_limit", "no bad data is skipped or substituted (data.bad_data)"


def _unused_checkpoint_keys(job: Job) -> Iterator[tuple[str, str]]:
    if job.servers.count:
        if job.train.embedding_optimizer is None:
            reason = "each step changes all rows of tables (train.embedding_optimizer is not set)"
            yield "checkpoint.full_every", reason
    elif job.parallel.embedding == "dense":
        yield "checkpoint.full_every", "no step leaves rows of a tensor alone (parallel.embedding = 'dense')"


def _unused_observe_keys(job: Job) -> Iterator[tuple[str, str]]:
    if not job.observe.alerts:
        for name in ("alert_webhook", "alert_body", "alert_command"):
            yield f"observe.{name}", "nothing watches the run (observe.alerts = false)"
    elif not job.observe.alert_webhook:
        yield "observe.alert_body", "alerts are not sent to a URL (observe.alert_webhook is not set)"
    if job.observe.metrics_port is None:
        for name in ("metrics_host", "metrics_token"):
            yield f"observe.{name}", "there is no endpoint of metrics (observe.metrics_port is not set)"


def _keys_of_other_data(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the keys of kinds of data, and of splits, that the job does not have."""
    data, interactions = job.data, job.data.interactions
    if data.factory is None:
        yield "data.arguments", "no program makes the data (data.factory is not set)"
    if data.placement == "shared":
        yield "data.part_order", "all nodes have the same data (data.placement = 'shared')"
    tables = {
        "data.chat.": any(source.columns.messages for _, source in data.located_sources),
        "data.image_transform.": data.has_images,
        "data.interactions.": data.has_interactions,
    }
    for table, is_used in tables.items():
        for path in () if is_used else schema_keys():
            if path.startswith(table):
                yield path, f"the data of the job are no {_CONTENT_OF_TABLES[table]}"
    if not data.has_interactions:
        return
    if interactions.split != "random":
        for name in ("fold", "folds"):
            yield f"data.interactions.{name}", f"data.interactions.split = '{interactions.split}'"
    if interactions.split != "time":
        yield "data.validation_fraction", f"data.interactions.split = '{interactions.split}' decides"
    if interactions.split != "leave_last" or interactions.target != "click":
        yield "data.interactions.top_k", "items are ranked for clicks with split = 'leave_last' alone"
    if interactions.negatives == 0:
        yield "data.interactions.negative_power", "no negatives are drawn (data.interactions.negatives = 0)"


def _unused_order_keys(job: Job) -> Iterator[tuple[str, str]]:
    if job.data.shuffle != "block":
        for name in ("block_samples", "window_blocks"):
            yield f"data.{name}", f"it applies to blocks, and data.shuffle = '{job.data.shuffle}'"


def _unused_layout_keys(job: Job, plan: Plan) -> Iterator[tuple[str, str]]:
    parallel = job.parallel
    ranks = plan.dp_replicate * plan.shard_group_size
    if plan.pp == 1:
        for name in ("schedule", "virtual_stages", "stage_cuts"):
            yield f"parallel.{name}", "there is no pipeline (parallel.pp = 1)"
    if plan.cp == 1:
        yield "parallel.cp_method", "sequences are not split (parallel.cp = 1)"
    if plan.tp == 1:
        yield "parallel.sequence_parallel", "matrices are not split (parallel.tp = 1)"
    if plan.shard_group_size == 1 and not parallel.auto:
        yield "parallel.shard", "there is one shard rank (parallel.dp_shard = 1)"
    if plan.dp_replicate == 1:
        for name in ("bucket_bytes", "all_reduce"):
            yield f"parallel.{name}", "there is one replica (parallel.dp_replicate = 1)"
    if plan.world_size == 1:
        yield "parallel.collectives", "there is one rank"
    if ranks == 1:
        for name in ("overlap", "compression", "load_balancing"):
            yield f"parallel.{name}", "there is no other rank to reduce gradients with (one data rank)"
    if plan.sites == 1:
        for name in ("outer_compression", "overlap_steps", "overlap_mixing_factor"):
            yield f"parallel.{name}", "there is one site, so nothing is exchanged"
    if plan.recompute == "none" and parallel.recompute == "none":
        yield "parallel.recompute_share", "nothing is recomputed (parallel.recompute = 'none')"


def _unused_training_keys(job: Job) -> Iterator[tuple[str, str]]:
    train, checkpoint = job.train, job.checkpoint
    if train.optimizer_factory is not None:
        for name in ("momentum", "betas", "epsilon"):
            yield f"train.{name}", "train.optimizer_arguments are those of train.optimizer_factory"
    elif train.optimizer not in ("sgd", "muon"):
        yield "train.momentum", f"train.optimizer = '{train.optimizer}' has no momentum"
    if train.optimizer not in _ADAM_OPTIMIZERS:
        for name in ("betas", "epsilon"):
            yield f"train.{name}", f"it applies to AdamW, and train.optimizer = '{train.optimizer}'"
    if train.optimizer_factory is None:
        yield "train.optimizer_arguments", "there is no train.optimizer_factory"
    if train.schedule_factory is not None:
        for name in ("warmup_steps", "final_learning_rate_share"):
            yield f"train.{name}", "train.schedule_factory gives every learning rate"
    if train.precision != "fp16":
        yield "train.loss_scale", f"only fp16 uses a loss scale, and train.precision = '{train.precision}'"
    if train.spike == "ignore":
        yield "train.spike_deviations", "spikes are ignored (train.spike = 'ignore')"
    if train.schedule == "constant":
        yield "train.final_learning_rate_share", "the learning rate is constant (train.schedule = 'constant')"
    if train.stop_patience == 0:
        for name in ("stop_metric", "stop_mode", "stop_min_delta"):
            yield f"train.{name}", "early stopping is off (train.stop_patience = 0)"
    if not checkpoint.keep_best:
        for name in ("best_metric", "best_mode"):
            yield f"checkpoint.{name}", "the best checkpoint is not kept (checkpoint.keep_best = false)"
    if checkpoint.upload is None:
        yield "checkpoint.upload_keep", "nothing is uploaded (checkpoint.upload is not set)"


def _unused_cluster_keys(job: Job) -> Iterator[tuple[str, str]]:
    parallel, cluster = job.parallel, job.cluster
    if cluster.nodes == 1:
        for name in ("node_rank", "rendezvous", "claims", "topology_address"):
            yield f"cluster.{name}", "there is one node (cluster.nodes = 1)"
        yield "checkpoint.partner", "there is no partner node (cluster.nodes = 1)"
    if cluster.min_nodes is None:
        yield (
            "cluster.last_call_timeout_seconds",
            "the start waits for all nodes; only cluster.nodes = 'MIN..MAX' uses it",
        )
    targets = (parallel.offload_parameters, parallel.offload_optimizer, parallel.offload_activations)
    if "disk" not in targets and parallel.embedding_memory_bytes is None:
        yield "cluster.scratch", "nothing is offloaded to disk (parallel.offload_*, embedding_memory_bytes)"


def _partial_effect_notes(job: Job, plan: Plan) -> Iterator[str]:
    """Yield sentences on keys with less effect than they say, such as a start after the last step."""
    if plan.synchronization is not None and plan.sites == 1:
        kind = plan.synchronization.kind
        yield f"parallel.synchronize = '{kind}': there is one site (one replica), so nothing is exchanged"
    steps = job.train.steps
    end = f"the run has {steps:,} steps"
    if job.train.warmup_steps >= steps and job.train.schedule_factory is None:
        yield (
            f"train.warmup_steps = {job.train.warmup_steps:,} is not reached: {end}, and the learning rate "
            "rises through all of them"
        )
    if job.train.validate_every_steps > steps:
        interval = job.train.validate_every_steps
        yield f"train.validate_every_steps = {interval:,}: {end}, so validation runs only at the end"
    best = job.checkpoint
    if best.keep_best and best.best_metric != "loss" and job.train.validate_every_steps == 0:
        yield (
            f"checkpoint.best_metric = '{best.best_metric}' has no effect: validation runs only at the "
            "end (train.validate_every_steps = 0)"
        )
    interval = job.checkpoint.every_steps
    if interval > steps and not _is_default("checkpoint.every_steps", interval):
        yield f"checkpoint.every_steps = {interval:,}: {end}, so a checkpoint is saved only at the end"
    if unreached := [step for step, _ in job.train.batch_ramp if step >= steps]:
        yield f"train.batch_ramp: step {unreached[0]:,} is not reached: {end}"
    samples = samples_consumed_before(job.train, steps)
    for number, source in enumerate(job.data.sources):
        stages = source.weight if isinstance(source.weight, list) else []
        if unreached := [first for first, _ in stages if first >= samples]:
            yield (
                f"data.sources[{number}].weight: sample {unreached[0]:,} is not reached: the run has "
                f"{samples:,} samples"
            )
    if job.parallel.compression_from_step >= steps:
        yield f"parallel.compression_from_step = {job.parallel.compression_from_step:,} is not reached: {end}"


def _is_default(path: str, value: Any) -> bool:
    return bool(value == schema_keys()[path].default)
