"""Entry point of a worker process: from a request to a trained model.

The supervisor calls `train_worker` in every rank; `train` is the same with the request at hand.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wanma.data.datasets.dataset import Data
from wanma.data.opening import open_data
from wanma.job.file.import_path import import_object
from wanma.job.run.worker import Worker
from wanma.job.sections.job import Job
from wanma.models.model_spec import ModelSpec, custom_spec, model_spec, with_adapters, with_frozen
from wanma.models.user_modules.parameter_hooks import register_hooks
from wanma.models.user_modules.validation import check_ready
from wanma.parallel.data_parallel.fsdp_errors import explaining
from wanma.parallel.data_parallel.global_batch import GlobalBatch
from wanma.parallel.memory.disk_pool import open_scratch
from wanma.parallel.mesh.parallel_mesh import process_grid
from wanma.parallel.parallelize import Parallel, parallelize
from wanma.training.checkpointing.code_fingerprint import code_fingerprint
from wanma.training.checkpointing.run_identity import DEFAULT_LOSS, Identity, identity_of, noting_identity
from wanma.training.checkpointing.training_state import seed_generators
from wanma.training.checks.carried_state import model_passes, refuse_carried_state
from wanma.training.checks.sample_coupling import Checked, refuse_coupling
from wanma.training.loop.train_request import Request
from wanma.training.loop.training_loop import run_loop, try_metrics
from wanma.training.loss.loss_functions import Classification, LossFunction, user_loss
from wanma.training.loss.supported_layouts import refuse_loss
from wanma.training.loss.transformers_labels import SampleLabels, default_loss
from wanma.training.loss.user_loss import ready_loss
from wanma.training.loss.validation_metrics import ACCURACY, Metrics, class_accuracy, own_metrics
from wanma.training.optimizer.user_optimizer_trial import tried_update
from wanma.training.run.numerics import set_numerics
from wanma.training.run.start_health_check import before_joining, together
from wanma.training.run.stream_position import take_up_stream
from wanma.training.run.trainer import Trainer
from wanma.training.step.early_stopping import check_validation_keys, without_validation
from wanma.training.step.forward_backward import ForwardBackward


def train_worker(worker: Worker, payload: bytes) -> None:
    """Train the job of a pickled request; the supervisor calls it in every rank.

    Args:
        worker: context of this rank.
        payload: pickled `Request`. It comes through an inherited descriptor from the very command that
            started this process, never from a file that somebody could have left.
    """
    train(worker, pickle.loads(payload))


def train(worker: Worker, request: Request) -> str:
    """Run the job on this rank.

    Returns:
        outcome: "finished", "interrupted" or "paused".
    """
    job, plan = request.job, request.plan
    set_numerics(job, plan)
    seed_generators(job.train.seed, worker.rank)
    progress = worker.control.progress
    progress(0, "joining")
    device = before_joining(job.cluster, plan, worker)
    with (
        process_grid(worker, plan, longest_silence(job), job.parallel.collectives) as grid,
        open_scratch(job, worker) as scratch,
        explaining(plan),
    ):
        health = together(device, job.cluster, worker) if device is not None else None
        progress(0, "opening data")
        data = open_data(job.data, job.train, dataset=request.objects.get("data"))
        progress(0, "building the model")
        identity = Identity()
        if (model := request.objects.get("model")) is not None:
            check_ready(model)
            identity = identity_of(model, seeded=request.seeded)
        spec = with_frozen(choose_spec(request, data), job.train.parameter_groups)
        is_factory = model is None and spec.kind == "custom"
        made, noted = noting_identity(spec, job.train.seed) if is_factory else (spec, lambda: identity)
        parallel = parallelize(made, plan, grid, job.train.seed, scratch)
        with Trainer(
            job,
            plan,
            worker,
            grid,
            parallel,
            targets_per_sample=data.targets_per_sample,
            identity=replace(noted(), data=data.fingerprint, loss=loss_fingerprint(request)),
            own=tried_update(job.train, request.objects, plan),
            flops_per_sample=request.flops_per_sample,
            peak_flops_per_second=request.peak_flops_per_second,
        ) as trainer:
            take_up_stream(trainer, data)
            if health is not None:
                trainer.tell_health(health)
            first = partial(data.batch, range(trainer.state.samples, trainer.state.samples + 1))
            refuse_loss(plan, data, own_loss(request) is not None, first)
            loss = choose_loss(request, spec, data, parallel, grid.device)
            metrics = choose_metrics(request, data, loss)
            usual = ("loss", "perplexity") if data.kind == "tokens" else ("loss",)
            check_validation_keys(job, (*usual, *metrics.names), data.validation_samples)
            if idle := without_validation(job, data.validation_samples, has_own_metrics(request)):
                trainer.message(idle, "warning")
            forward_backward = ForwardBackward(parallel, job, plan, grid, loss, metrics)
            gathering = GlobalBatch(grid, job.train.global_batch)
            if checked := own_code(request, spec, forward_backward):
                progress(trainer.state.step, "checking the loss")
                refuse_coupling(trainer, data, checked, gathering)
                if checked.model_is_own and not gathering.is_used:
                    forward, rows = model_passes(trainer, data, forward_backward)
                    refuse_carried_state(trainer, forward, rows, whole=plan.pp == 1)
            if has_own_metrics(request):
                progress(trainer.state.step, "checking the metrics")
                try_metrics(trainer, data, forward_backward, gathering)
            return run_loop(trainer, data, forward_backward, gathering)


def longest_silence(job: Job) -> float:
    """Return the seconds that the supervisor may wait for a sign of life."""
    return max(job.cluster.hang_timeout_seconds, job.cluster.start_timeout_seconds)


def choose_spec(request: Request, data: Any) -> ModelSpec:
    """Return the model that the user passed, or the one that the job describes."""
    model = request.objects.get("model")
    if model is not None:
        register_hooks(model, request.parameter_hooks)
        section = request.job.model
        return with_adapters(custom_spec(model, section.batch_norm_group), section)
    return model_spec(
        request.job.model,
        vocabulary=data.vocabulary,
        sequence_length=request.job.data.sequence_length,
        image_shape=data.image_shape,
        classes=data.classes,
    )


def loss_fingerprint(request: Request) -> str:
    """Return the fingerprint of the loss that the user passed or named."""
    function = own_loss(request)
    return DEFAULT_LOSS if function is None else code_fingerprint(function)


def choose_loss(
    request: Request, spec: ModelSpec, data: Data, parallel: Parallel, device: torch.device
) -> LossFunction:
    """Return the loss that the user passed or named; else that of the model's own library, or cross entropy.

    Data whose samples have `labels` are told how the model interprets them.
    """
    function = own_loss(request)
    if function is not None:
        data.padding_has_targets = True
        double = torch.float64 if request.plan.precision == "fp64" else None
        function = ready_loss(function, parallel.module, device, double)
        return user_loss(function, by_position=request.plan.cp > 1)
    return default_loss(spec, data, parallel)


def has_own_metrics(request: Request) -> bool:
    return bool(request.objects.get("metrics") or request.job.train.metrics)


def choose_metrics(request: Request, data: Data, loss: LossFunction) -> Metrics:
    """Return the metrics that the user passed or named, and accuracy for classes.

    Accuracy belongs to images, and to own data whose loss distinguishes classes.
    """
    functions = own_metrics(request.objects.get("metrics"), request.job.train.metrics)
    own = own_loss(request)
    tells_classes = isinstance(loss, Classification | SampleLabels) or isinstance(own, nn.CrossEntropyLoss)
    of_classes = data.kind == "images" or (data.kind == "custom" and tells_classes)
    if of_classes and request.plan.cp == 1:  # else targets are sequences
        functions = {ACCURACY: class_accuracy, **functions}
    return Metrics(functions, by_position=request.plan.cp > 1)


def own_code(request: Request, spec: ModelSpec, forward_backward: ForwardBackward) -> Checked | None:
    """Return a model or loss that may couple samples; None where both are wanma's."""
    loss = own_loss(request)
    if spec.kind != "custom" and loss is None:
        return None
    pipelined = request.plan.pp > 1
    return Checked(
        (lambda batch: forward_backward.evaluate_losses([batch])) if pipelined else forward_backward.losses,
        model_is_own=spec.kind == "custom",
        others=() if loss is None else (loss,),
    )


def own_loss(request: Request) -> Any:
    """Return the loss that the user passed or named; None if there is none."""
    function = request.objects.get("loss")
    if function is None and request.job.model.loss is not None:
        function = import_object(request.job.model.loss, "model.loss")
    return function
