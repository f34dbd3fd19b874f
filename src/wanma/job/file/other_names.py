"""Names that other libraries give to settings of a job, by which an unknown key or option finds its own."""

from __future__ import annotations

from wanma.job.file.schema import schema_keys
from wanma.job.sections.job import Job

_NAMES_BY_KEY = {
    "train.steps": "max_steps num_steps max_iters train_iters iterations epochs num_epochs max_epochs "
    "num_train_epochs",
    "train.global_batch": "batch batch_size train_batch_size global_batch_size",
    "parallel.micro_batch": "micro_batch_size local_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu gradient_accumulation_steps accumulate_grad_batches",
    "train.learning_rate": "lr max_lr",
    "train.schedule": "lr_scheduler lr_scheduler_type lr_schedule",
    "train.warmup_steps": "warmup warmup_iters warmup_ratio",
    "train.gradient_clip": "grad_clip clip_grad max_norm max_grad_norm gradient_clip_val gradient_clipping",
    "train.precision": "dtype mixed_precision bf16 fp16 amp",
    "train.validate_every_steps": "eval_steps eval_every eval_interval val_check_interval",
    "data.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length",
    "data.workers": "num_workers dataloader_num_workers",
    "data.columns.text": "text_field text_key text_column dataset_text_field",
    "data.columns.image": "image_field image_key image_column",
    "data.columns.target": "label_field label_key label_column",
    "parallel.dp_replicate": "gpus num_gpus ngpus devices ranks world_size num_processes nproc_per_node dp "
    "data_parallel data_parallel_size worker worker_replicas",
    "parallel.dp_shard": "fsdp fsdp_size",
    "parallel.shard": "zero zero_stage sharding_strategy",
    "parallel.tp": "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size",
    "parallel.pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size",
    "parallel.cp": "cp_size context_parallel context_parallel_size context_parallel_degree",
    "parallel.ep": "ep_size expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size",
    "parallel.recompute": "gradient_checkpointing activation_checkpointing",
    "servers.count": "ps num_ps ps_replicas num_ps_replicas parameter_servers num_parameter_servers",
    "cluster.nodes": "nnodes num_nodes num_machines",
    "checkpoint.every_steps": "save_steps save_every save_interval checkpoint_interval",
    "checkpoint.resume": "resume_from_checkpoint",
    "observe.runs": "output_dir save_dir default_root_dir",
    "observe.name": "run_name",
    "observe.log_every_steps": "logging_steps log_interval log_freq log_every_n_steps",
    "observe.trackers": "report_to wandb mlflow",
}

KEYS_BY_OTHER_NAME = {name: key for key, names in _NAMES_BY_KEY.items() for name in names.split()}
"""Key of the job by the name that another library gives to it."""


def key_of_other_name(name: str) -> str | None:
    """Return the key of a job that other libraries call `name`; None if none is known."""
    return KEYS_BY_OTHER_NAME.get(name.replace("-", "_").lower())


def key_of_option(option: str) -> str | None:
    """Return the key that `option` means, such as `--lr` or `--steps`: by its own name or by another's."""
    name = option.lstrip("-").replace("-", "_").lower()
    own = [key for key in schema_keys(Job) if key.count(".") == 1 and key.rpartition(".")[2] == name]
    return own[0] if len(own) == 1 else key_of_other_name(name)
