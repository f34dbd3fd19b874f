"""Workload of a job's model, by formula, or traced from the module where its inputs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.forecast.data_feed import SampleLoading
from wanma.job.forecast.forecast import Workload
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind
from wanma.models.workload.model_workload import build_section_workload, trace_module_workload
from wanma.planner.memory.model_states import OPTIMIZER_STATE_COPIES, optimizer_rule
from wanma.planner.preparation.job_data import open_job_dataset

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.data.datasets.dataset import BatchedDataset


class WorkloadResult(NamedTuple):
    """Workload of a model, or the reason why there is none."""

    workload: Workload | None
    reason: str | None
    """Reason why there is no workload; None where there is one."""


def tokenizer_vocabulary_size(job: Job) -> int | None:
    """Return the number of tokens of a job's tokenizer; None where the job names no text, but a vocabulary.

    Such a job has tokens of its own. One that names neither is planned with the tokenizer.
    """
    names_vocabulary = job.model.vocabulary is not None or job.model.huggingface is not None
    if names_vocabulary and not job.data.has_text:
        return None
    return load_tokenizer(job.data.tokenizer).vocabulary_size


def read_model(job: Job, objects: dict[str, Any] | None = None) -> WorkloadResult:
    """Return the workload of a job's model; trace a user's own module on tensors without storage.

    The inputs of such a module are those that its data give: tokens, images, or a sample of the dataset.

    Args:
        job: the job.
        objects: model and data that the user passed in Python.

    Raises:
        JobError, WanmaError: the job describes no model, or its data cannot be had.
    """
    objects = objects or {}
    length, precision = job.data.sequence_length, job.train.precision
    kind = "custom" if "model" in objects else input_kind(job.model)
    if kind == "tokens" and "data" not in objects:
        workload = build_section_workload(
            job.model,
            vocabulary_size=tokenizer_vocabulary_size(job),
            sequence_length=length,
            image_shape=None,
            classes=None,
            precision=precision,
            parameter_groups=job.train.parameter_groups,
        )
        return WorkloadResult(workload, None)
    if kind == "custom":
        return _trace_custom_model(job, objects)
    has_own_sizes = kind == "interactions" and not job.data.has_interactions
    data = None if has_own_sizes else _open(job, objects)
    workload = build_section_workload(
        job.model,
        vocabulary_size=data.vocabulary_size if data is not None else None,
        sequence_length=length,
        image_shape=data.image_shape if data is not None else None,
        classes=data.classes if data is not None else None,
        interaction_sizes=data.interaction_sizes if data is not None else None,
        precision=precision,
        parameter_groups=job.train.parameter_groups,
        table_state=_table_state(job),
    )
    if workload is not None and data is not None:
        workload = replace(workload, loading=data.sample_loading())
    return WorkloadResult(workload, None)


def _table_state(job: Job) -> Callable[[int], float] | None:
    """Return the function from a table's width to a row's state, as `build_section_workload` takes it."""
    name = job.train.embedding_optimizer
    if job.parallel.embedding == "dense" and not job.servers.count:
        return None
    if name is None:
        _, copies = OPTIMIZER_STATE_COPIES[optimizer_rule(job.train)]
        return lambda width: copies * width
    from wanma.models.recommender.row_updates import ROW_RULES

    return ROW_RULES[name].state_elements


def _trace_custom_model(job: Job, objects: dict[str, Any]) -> WorkloadResult:
    """Trace a user's own module, given or made by a factory; failure to trace does not prevent training."""
    from wanma.models.structure.parameter_roles import is_frozen

    inputs, keywords, targets, loading = _inputs(job, objects)
    model = objects["model"] if "model" in objects else _model_factory(job)
    try:
        workload = trace_module_workload(
            model,
            inputs,
            targets,
            keywords=keywords,
            precision=job.train.precision,
            autocast=True,
            is_frozen=partial(is_frozen, groups=job.train.parameter_groups),
        )
    except WanmaError as error:
        return WorkloadResult(None, f"no forecast for this model: {error.message}")
    workload = replace(workload, loading=loading)
    if "model" in objects:  # training converts its batch normalization at the start
        from wanma.models.layers.batch_norm import find_sample_coupling_modules

        if find_sample_coupling_modules(objects["model"]):
            workload = replace(workload, coupled_samples=job.model.batch_norm_group)
    return WorkloadResult(workload, None)


def _model_factory(job: Job) -> Callable[[], nn.Module]:
    """Return the function that makes the factory's module, with all of the runtime's changes to it."""
    from wanma.models.model_spec import resolve_model_spec

    spec = resolve_model_spec(
        job.model, vocabulary_size=None, sequence_length=None, image_shape=None, classes=None
    )
    return spec.build_module


def _inputs(
    job: Job, objects: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], int, SampleLoading | None]:
    """Return positional and keyword arguments of the model for one sample, its targets, its loading cost."""
    import torch

    has_dataset = "data" in objects or job.data.is_own
    if not (has_dataset or job.data.has_images or job.data.has_interactions):
        length = job.data.sequence_length
        tokens = torch.zeros(1, length, dtype=torch.int64)
        masks = {"documents": tokens, "positions": tokens} if job.data.document_masks else {}
        return (tokens,), masks, length, None
    data = _open(job, objects)
    batch = data.batch([0])
    return batch.inputs, batch.keywords, data.targets_per_sample, data.sample_loading()


def _open(job: Job, objects: dict[str, Any]) -> BatchedDataset:
    return open_job_dataset(job, objects.get("data"))
