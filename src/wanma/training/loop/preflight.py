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

from wanma.checkpoint.conversion.huggingface_weights import is_published
from wanma.checkpoint.inspection.integrity_scan import FolderFiles, quick_problem
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.data.batch import Batch
from wanma.data.datasets.dataset import Data
from wanma.data.opening import open_data
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job, TrainSection
from wanma.models.model_spec import ModelSpec, with_frozen
from wanma.models.structure.parameter_roles import is_frozen, parameter_roles
from wanma.models.user_modules.forward_error import forward_error
from wanma.models.workload.fake_tensors import without_storage
from wanma.parallel.data_parallel.sharded import DTYPES
from wanma.parallel.parameters.freezing import LOW
from wanma.training.checkpointing.error_feedback_state import check_compressed
from wanma.training.checkpointing.published_weights import check_published
from wanma.training.checkpointing.resume import check_start_folder, not_whole
from wanma.training.loop.train_request import Request
from wanma.training.loop.train_worker import choose_spec, own_loss
from wanma.training.loss.loss_functions import user_loss
from wanma.training.loss.supported_layouts import refuse_loss
from wanma.training.loss.transformers_labels import default_losses
from wanma.training.loss.user_loss import check_loss
from wanma.training.loss.validation_metrics import Metrics, check_metrics, own_metrics
from wanma.training.optimizer.named_optimizer import check_patterns, group_rules, require_trained
from wanma.training.optimizer.user_optimizer_trial import tried_update
from wanma.training.step.early_stopping import check_validation_keys, without_validation
from wanma.training.step.float64_errors import explaining_doubles

SMALL = 10_000_000
"""Largest number of parameters of a user's model that is run for real without another try.

Dtypes of elements are checked only so.
"""
LARGEST = 1 << 30
"""Largest number of parameters of one that is run for real where it does not run without storage."""
_SAMPLES = 4


def preflight(job: Job, plan: Plan) -> list[str]:
    """Refuse a job that no rank could train.

    Returns:
        notes: on keys without effect, and on checks that were left out.

    Raises:
        WanmaError: the ranks would raise it before their first step, or in it.
    """
    request = Request(job, plan)
    data = open_data(job.data, job.train)
    if (loss := own_loss(request)) is not None:
        check_loss(loss)
    first = partial(data.batch, range(1))
    refuse_loss(plan, data, loss is not None, first)
    notes = _check_own(job, plan, data)
    spec = with_frozen(choose_spec(request, data), job.train.parameter_groups)
    if spec.kind != "custom":
        with torch.device("meta"):
            model = spec.make()
        _check_model(model, job, plan)
        return notes
    batch = data.batch(range(min(_SAMPLES, data.train_samples)))
    size = _parameters(spec)
    if size is not None and size > SMALL:
        with without_storage():
            model = spec.make()
            _check_model(model, job, plan)
            try:
                _run(model, batch, loss, job)
                return notes
            except Exception as error:  # of the user's code: perhaps it does not bear tensors without storage
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
        if size > LARGEST:
            text = f"the model was not run: it has {size:,} parameters, and without storage it fails: {cause}"
            return [*notes, text]
    with torch.random.fork_rng(devices=[]):
        model = spec.make()
        _check_model(model, job, plan)
        _run(model, batch, loss, job)
    return notes


def _check_own(job: Job, plan: Plan, data: Data) -> list[str]:
    """Check the user's own code that the job names beside model, data and loss; return notes."""
    tried_update(job.train, {}, plan)
    check_metrics(own_metrics(None, job.train.metrics))
    known = ("loss", "perplexity" if data.kind == "tokens" else "accuracy", *job.train.metrics)
    check_validation_keys(job, known, data.validation_samples)
    idle = without_validation(job, data.validation_samples, bool(job.train.metrics))
    return [] if idle is None else [idle]


def _parameters(spec: ModelSpec) -> int | None:
    """Return the number of a model's parameters; None where it cannot be made without storage."""
    try:
        with without_storage():
            return sum(parameter.numel() for parameter in spec.make().parameters())
    except Exception:
        return None


def _check_model(model: nn.Module, job: Job, plan: Plan) -> None:
    names = [name for name, _ in model.named_parameters()]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(
            f"{type(model).__name__} has requires_grad = False on every parameter: there is nothing to train",
            "leave it True on what is to be trained",
        )
    check_patterns(names, job.train)
    check_compressed(names, plan)
    _check_trained(model, names, job.train)
    if job.checkpoint.start_from is not None:
        _check_start(model, Path(job.checkpoint.start_from).expanduser())


def _check_trained(model: nn.Module, names: Iterable[str], train: TrainSection) -> None:
    trained = {name for name in names if not is_frozen(name, train.parameter_groups)}
    require_trained(trained)
    group_rules({name: role for name, role in parameter_roles(model).items() if name in trained}, train)


def _check_start(model: nn.Module, folder: Path) -> None:
    check_start_folder(folder)
    if is_published(folder):
        check_published(model, folder)
        return
    try:
        manifest = read_manifest(folder)
    except WanmaError as error:
        raise not_whole(folder, error.message) from error
    if (problem := quick_problem(FolderFiles(folder).size, manifest)) is not None:
        raise not_whole(folder, problem)
    for name, parameter in model.named_parameters():
        saved = manifest.tensors.get(f"model.{name}")
        if saved is not None and tuple(saved.shape) != tuple(parameter.shape):
            raise JobError(
                f"checkpoint.start_from = '{folder}' holds another model: {name} has shape "
                f"{tuple(parameter.shape)} here, {tuple(saved.shape)} in the checkpoint",
                "describe the model that was saved, or start from another checkpoint",
            )


def _run(model: nn.Module, batch: Batch, loss: Any, job: Job) -> None:
    """Run forward, loss and metrics of the first samples of training."""
    model.eval()
    with torch.no_grad(), explaining_doubles(batch, job.train.precision), _cast(job):
        try:
            output = model(*batch.inputs, **batch.keywords)
        except Exception as error:
            told = forward_error(error, model, batch.inputs, batch.keywords, batch.samples.tolist())
            if told is None:
                raise
            raise told from error
        if loss is not None:
            user_loss(loss)(output, batch)
        else:
            default_losses(model, output, batch)
        metrics = Metrics(own_metrics(None, job.train.metrics))
        metrics.checks = True
        metrics.begin()
        metrics.add(output, batch.given_targets, batch.real)


def _cast(job: Job) -> AbstractContextManager[Any]:
    """Return the autocast of a forward in the job's precision, as ranks compute it."""
    dtype = DTYPES[job.train.precision]
    return torch.autocast("cpu", dtype=dtype) if dtype in LOW else nullcontext()
