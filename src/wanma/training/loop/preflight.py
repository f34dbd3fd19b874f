"""Checks of a job in one process, before any rank is started: for `wanma train --dry-run`.

They are the checks that ranks make, on a model without storage. A user's own model is run on some samples:
for real where it is small, or where its code reads values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wanma.checkpoint.conversion.huggingface_weights import has_huggingface_weights
from wanma.checkpoint.inspection.integrity_scan import LocalFiles, find_size_mismatch
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.map_dataset import UserDataset
from wanma.data.interactions.dataset import InteractionDataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.job.sections.job import Job
from wanma.job.sections.train import TrainSection
from wanma.models.config.resolution import input_kind
from wanma.models.model_spec import ModelSpec, apply_freezing_to_spec
from wanma.models.recommender.config import resolve_recommender_config
from wanma.models.recommender.embedding_tables import embedding_parameters
from wanma.models.structure.parameter_roles import find_parameter_roles, is_frozen
from wanma.models.user_modules.forward_error import forward_error
from wanma.parallel.parameters.freezing import LOW_PRECISION_DTYPES
from wanma.parallel.parameters.initialization import WithoutValues
from wanma.parallel.precision.autocast import PRECISION_DTYPES
from wanma.planner.preparation.job_data import open_job_dataset
from wanma.torch_internals.fake_tensors import fake_tensor_mode
from wanma.training.checkpointing.error_feedback_state import check_compression_patterns
from wanma.training.checkpointing.initial_weights import (
    check_embedding_rows,
    check_start_folder,
    incomplete_start_error,
)
from wanma.training.checkpointing.published_weights import check_huggingface_weights
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import build_model_spec, user_loss_of
from wanma.training.loss.loss_functions import squared_error, wrap_user_loss
from wanma.training.loss.recommender_metrics import RecommenderMetrics
from wanma.training.loss.supported_layouts import refuse_unsupported_loss
from wanma.training.loss.transformers_labels import default_per_target_losses
from wanma.training.loss.user_loss import check_loss
from wanma.training.loss.validation_metrics import Metrics, check_metrics, user_metrics
from wanma.training.optimizer.named_optimizer import (
    check_parameter_patterns,
    parameter_rules,
    require_trainable,
)
from wanma.training.optimizer.user_optimizer_trial import load_tried_user_optimization
from wanma.training.step.early_stopping import check_validation_keys, unused_validation_keys_note
from wanma.training.step.float64_errors import explain_float64_errors

MAX_ELEMENTS_RUN_FIRST = 10_000_000
"""Largest number of parameters of a user's model that is run for real without another try.

Dtypes of elements are checked only so.
"""
MAX_ELEMENTS_RUN = 1 << 30
"""Largest number of parameters of one that is run for real where it does not run without storage."""
_SAMPLES = 4


def preflight(job: Job, plan: Plan) -> list[str]:
    """Refuse a job that no rank could train.

    Returns:
        notes: on keys without effect, and on checks that were left out.

    Raises:
        WanmaError: the ranks would raise it before their first step, or in it.
    """
    request = TrainRequest(job, plan)
    data = open_job_dataset(job)
    if (loss := user_loss_of(request)) is not None:
        check_loss(loss)
    first = partial(data.batch, range(1))
    refuse_unsupported_loss(plan, data, loss is not None, first)
    if loss is None and isinstance(data, UserDataset) and data.has_number_targets:
        loss = squared_error  # as `default_loss` has it
    notes = _check_own(job, plan, data, loss)
    spec = apply_freezing_to_spec(build_model_spec(request, data), job.train.parameter_groups)
    if spec.input_kind != "custom":
        with torch.device("meta"), WithoutValues():
            model = spec.build_module()
        _check_model(model, job, plan)
        return notes
    batch = data.batch(range(min(_SAMPLES, data.train_samples)))
    size = _parameter_count(spec)
    if size is not None and size > MAX_ELEMENTS_RUN_FIRST:
        with fake_tensor_mode():
            model = spec.build_module()
            _check_model(model, job, plan)
            try:
                _run_forward(model, batch, loss, job)
                return notes
            except Exception as error:  # of the user's code: perhaps it does not bear tensors without storage
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
        if size > MAX_ELEMENTS_RUN:
            text = (
                f"the forward pass was not checked: the model has {size:,} parameters, and it fails on "
                f"the meta device: {cause}"
            )
            return [*notes, text]
    with torch.random.fork_rng(devices=[]):
        model = spec.build_module()
        _check_model(model, job, plan)
        _run_forward(model, batch, loss, job)
    return notes


def _check_own(job: Job, plan: Plan, data: BatchedDataset, loss: Any) -> list[str]:
    """Check the user's own code that the job names beside model and data; return notes."""
    load_tried_user_optimization(job.train, {}, plan)
    check_metrics(user_metrics(None, job.train.metrics))
    known = ("loss", *_standard_metrics(job, plan, data, loss), *job.train.metrics)
    check_validation_keys(job, known, data.validation_samples)
    idle = unused_validation_keys_note(job, data.validation_samples, bool(job.train.metrics))
    return [] if idle is None else [idle]


def _standard_metrics(job: Job, plan: Plan, data: BatchedDataset, loss: Any) -> tuple[str, ...]:
    """Return the names of the metrics that wanma computes by itself beside the loss, as `build_metrics`."""
    if isinstance(data, InteractionDataset) and input_kind(job.model) == "interactions":
        config = resolve_recommender_config(job.model, data.interaction_sizes)
        return RecommenderMetrics(config, data, {}).names
    if data.input_kind == "tokens":
        return ("perplexity",)
    of_classes = data.input_kind == "images" or loss is None or isinstance(loss, nn.CrossEntropyLoss)
    return ("accuracy",) if of_classes and plan.cp == 1 else ()


def _parameter_count(spec: ModelSpec) -> int | None:
    """Return the number of a model's parameters; None where it cannot be made without storage."""
    try:
        with fake_tensor_mode():
            return sum(parameter.numel() for parameter in spec.build_module().parameters())
    except Exception:
        return None


def _check_model(model: nn.Module, job: Job, plan: Plan) -> None:
    names = [name for name, _ in model.named_parameters()]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(
            f"{type(model).__name__} has requires_grad = False on every parameter: it has nothing to train",
            "set requires_grad = True on the parameters to train",
        )
    check_parameter_patterns(names, job.train)
    check_compression_patterns(names, plan)
    _check_parameter_groups(model, names, job.train)
    if job.checkpoint.start_from is not None:
        _check_start(model, Path(job.checkpoint.start_from).expanduser(), job.checkpoint)


def _check_parameter_groups(model: nn.Module, names: Iterable[str], train: TrainSection) -> None:
    trained = {name for name in names if not is_frozen(name, train.parameter_groups)}
    require_trainable(trained)
    parameter_rules(
        {name: role for name, role in find_parameter_roles(model).items() if name in trained}, train
    )


def _check_start(model: nn.Module, folder: Path, section: CheckpointSection) -> None:
    check_start_folder(folder, section)
    if has_huggingface_weights(folder):
        check_huggingface_weights(model, folder)
        return
    try:
        manifest = read_manifest(folder)
    except WanmaError as error:
        raise incomplete_start_error(folder, error.message) from error
    if (problem := find_size_mismatch(LocalFiles(folder).size, manifest)) is not None:
        raise incomplete_start_error(folder, problem)
    tables = list(embedding_parameters(model))
    check_embedding_rows(folder, tables, manifest.tensors)
    table_names = {table.name for table in tables}
    for name, parameter in model.named_parameters():
        saved = manifest.tensors.get(f"model.{name}")
        compared = slice(1 if name in table_names else 0, None)
        if saved is not None and tuple(saved.shape)[compared] != tuple(parameter.shape)[compared]:
            raise JobError(
                f"checkpoint.start_from = '{folder}' does not match the model of the job: {name} has "
                f"shape {tuple(parameter.shape)} in the model, {tuple(saved.shape)} in the checkpoint",
                "change the model of the job to the saved one, or start from another checkpoint",
            )


def _run_forward(model: nn.Module, batch: Batch, loss: Any, job: Job) -> None:
    """Run forward, loss and metrics of the first samples of training."""
    model.eval()
    with torch.no_grad(), explain_float64_errors(batch, job.train.precision), _autocast(job):
        try:
            output = model(*batch.inputs, **batch.keywords)
        except Exception as error:
            user_error = forward_error(error, model, batch.inputs, batch.keywords, batch.samples.tolist())
            if user_error is None:
                raise
            raise user_error from error
        if loss is not None:
            wrap_user_loss(loss)(output, batch)
        else:
            default_per_target_losses(model, output, batch)
        metrics = Metrics(user_metrics(None, job.train.metrics))
        metrics.compares_halves = True
        metrics.reset()
        metrics.add(output, batch.given_targets, batch.real)


def _autocast(job: Job) -> AbstractContextManager[Any]:
    """Return the autocast of a forward in the job's precision, as ranks compute it."""
    dtype = PRECISION_DTYPES[job.train.precision]
    return torch.autocast("cpu", dtype=dtype) if dtype in LOW_PRECISION_DTYPES else nullcontext()
