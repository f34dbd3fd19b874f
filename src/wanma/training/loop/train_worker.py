"""Entry point of a worker process: from a request to a trained model.

The supervisor calls `train_worker` in every rank; `train` is the same with the request at hand.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.interactions.dataset import InteractionDataset
from wanma.job.file.import_path import import_object
from wanma.job.file.run_settings import run_settings
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.models.model_spec import (
    ModelSpec,
    apply_freezing_to_spec,
    apply_lora_to_spec,
    resolve_model_spec,
    wrap_module,
)
from wanma.models.user_modules.parameter_hooks import register_hooks
from wanma.models.user_modules.validation import validate_module
from wanma.parallel.data_parallel.fsdp_errors import translate_fsdp_errors
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.parallel.memory.disk_pool import open_disk_pool
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import ParallelModel, parallelize
from wanma.planner.preparation.job_data import open_job_dataset
from wanma.training.checkpointing.code_fingerprint import code_fingerprint
from wanma.training.checkpointing.resume import resume
from wanma.training.checkpointing.run_identity import (
    DEFAULT_CODE,
    Identity,
    identity_of,
    with_identity_recorded,
)
from wanma.training.checkpointing.training_state import seed_generators
from wanma.training.checks.carried_state import first_samples_forward, refuse_carried_state
from wanma.training.checks.process_state import factory_paths, refuse_other_process_state
from wanma.training.checks.sample_coupling import UserCode, refuse_sample_coupling
from wanma.training.loop.data_position import seek_data
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.training_loop import run_training_loop, try_metrics
from wanma.training.loss.loss_functions import CrossEntropy, LossFunction, wrap_user_loss
from wanma.training.loss.recommender_loss import RecommenderLoss, recommender_config
from wanma.training.loss.recommender_metrics import RecommenderMetrics
from wanma.training.loss.supported_layouts import refuse_unsupported_loss
from wanma.training.loss.transformers_labels import SampleClassificationLoss, default_loss
from wanma.training.loss.user_loss import prepare_loss
from wanma.training.loss.validation_metrics import ACCURACY, Metrics, class_accuracy, user_metrics
from wanma.training.optimizer.user_optimizer_trial import load_tried_user_optimization
from wanma.training.run.data_parts import join_data_parts
from wanma.training.run.numerics import configure_numerics, flush_denormals
from wanma.training.run.start_health_check import check_cluster, check_local_device
from wanma.training.run.trainer import Trainer
from wanma.training.step.early_stopping import check_validation_keys, unused_validation_keys_note
from wanma.training.step.forward_backward import ForwardBackward


def train_worker(worker: WorkerContext, payload: bytes) -> None:
    """Train the job of a pickled request; the supervisor calls it in every rank.

    Args:
        worker: context of this rank.
        payload: pickled `ProcessSettings` and, after them, pickled `TrainRequest`. It comes through an
            inherited descriptor from the very command that started this process, never from a file, which
            another user could write.
    """
    train(worker, read_request(payload))


def read_request(payload: bytes) -> TrainRequest:
    """Apply the settings of the user's process, and return the request, as `train_worker` gets both."""
    with io.BytesIO(payload) as file:
        pickle.load(file).apply()
        request: TrainRequest = pickle.load(file)
    return request


@flush_denormals()
def train(worker: WorkerContext, request: TrainRequest) -> str:
    """Run the job on this rank.

    Returns:
        outcome: "finished", "interrupted" or "paused".
    """
    job, plan = request.job, request.plan
    refuse_other_process_state(request.process_state, factory_paths(job, request.user_objects))
    configure_numerics(job, plan)
    seed_generators(job.train.seed, worker.rank)
    progress = worker.supervisor_client.report_progress
    progress(0, "joining")
    device = check_local_device(job.cluster, plan, worker)
    with (
        open_mesh(worker, plan, hang_timeout_seconds(job), job.parallel.collectives) as grid,
        open_disk_pool(job, worker) as scratch,
        translate_fsdp_errors(plan),
    ):
        health = check_cluster(device, job.cluster, worker) if device is not None else None
        progress(0, "opening data")
        data = open_job_dataset(job, request.user_objects.get("data"))
        data = join_data_parts(data, job, worker, plan)
        progress(0, "building the model")
        spec, model_identity = build_identified_spec(request, data)
        parallel = parallelize(spec, plan, grid, job.train.seed, scratch)
        with Trainer(
            job,
            plan,
            worker,
            grid,
            parallel,
            targets_per_sample=data.targets_per_sample,
            identity=replace(
                model_identity(),
                data=data.fingerprint,
                order=data.order_identity,
                loss=loss_fingerprint(request),
                settings=run_settings(job, spec.settings),
            ),
            user_optimization=load_tried_user_optimization(job.train, request.user_objects, plan),
            flops_per_sample=request.flops_per_sample,
            peak_flops_per_second=request.peak_flops_per_second,
            restore=partial(resume, data=data),
        ) as trainer:
            seek_data(trainer, data)
            if worker.local_rank == 0 and worker.restart is None:  # else other ranks have counted it
                trainer.step_data.add_traffic(request.prepared_traffic)
            if data.bad_data_note:
                trainer.message(data.bad_data_note, "warning")
            if health is not None:
                trainer.record_health(health)
            first = partial(data.batch, range(trainer.state.samples, trainer.state.samples + 1))
            refuse_unsupported_loss(plan, data, user_loss_of(request) is not None, first)
            loss = build_loss(request, spec, data, parallel, grid.device)
            metrics = build_metrics(request, data, loss)
            standard_metrics = ("loss", "perplexity") if data.input_kind == "tokens" else ("loss",)
            check_validation_keys(job, (*standard_metrics, *metrics.names), data.validation_samples)
            if idle := unused_validation_keys_note(job, data.validation_samples, has_user_metrics(request)):
                trainer.message(idle, "warning")
            forward_backward = ForwardBackward(parallel, plan, grid, loss, metrics)
            gathering = GlobalBatchGatherer(grid, job.train.global_batch)
            check_user_code(trainer, request, spec, data, forward_backward, gathering)
            return run_training_loop(trainer, data, forward_backward, gathering)


def hang_timeout_seconds(job: Job) -> float:
    """Return the seconds that the supervisor may wait for a sign of life."""
    return max(job.cluster.hang_timeout_seconds, job.cluster.start_timeout_seconds)


def build_identified_spec(
    request: TrainRequest, data: BatchedDataset
) -> tuple[ModelSpec, Callable[[], Identity]]:
    """Return the model, frozen as the job says, and a function that returns the identity of the built one."""
    train, identity = request.job.train, Identity()
    model = request.user_objects.get("model")
    if model is not None:
        validate_module(model)
        identity = identity_of(model, seeded=request.seeded)
    spec = apply_freezing_to_spec(build_model_spec(request, data), train.parameter_groups)
    if model is None and spec.input_kind == "custom":
        return with_identity_recorded(spec, train.seed)
    return spec, lambda: identity


def build_model_spec(request: TrainRequest, data: Any) -> ModelSpec:
    """Return the model that the user passed, or the one that the job describes."""
    model = request.user_objects.get("model")
    if model is not None:
        register_hooks(model, request.parameter_hooks)
        section = request.job.model
        return apply_lora_to_spec(wrap_module(model, section.batch_norm_group), section)
    return resolve_model_spec(
        request.job.model,
        vocabulary_size=data.vocabulary_size,
        sequence_length=request.job.data.sequence_length,
        image_shape=data.image_shape,
        classes=data.classes,
        interaction_sizes=data.interaction_sizes,
    )


def loss_fingerprint(request: TrainRequest) -> str:
    """Return the fingerprint of the loss that the user passed or named."""
    function = user_loss_of(request)
    return DEFAULT_CODE if function is None else code_fingerprint(function)


def build_loss(
    request: TrainRequest,
    spec: ModelSpec,
    data: BatchedDataset,
    parallel_model: ParallelModel,
    device: torch.device,
) -> LossFunction:
    """Return the loss that the user passed or named; else that of the model's own library, or cross entropy.

    For tables whose target is a number it is the squared error.
    Data whose samples have `labels` are told how the model interprets them.
    """
    function = user_loss_of(request)
    if function is not None:
        data.padding_has_targets = True
        double = torch.float64 if request.plan.precision == "fp64" else None
        function = prepare_loss(function, parallel_model.module, device, double)
        return wrap_user_loss(function, is_per_position=request.plan.cp > 1)
    if spec.input_kind == "interactions":
        return RecommenderLoss(recommender_config(parallel_model.module))
    return default_loss(spec, data, parallel_model)


def has_user_metrics(request: TrainRequest) -> bool:
    return bool(request.user_objects.get("metrics") or request.job.train.metrics)


def build_metrics(request: TrainRequest, data: BatchedDataset, loss: LossFunction) -> Metrics:
    """Return the metrics that the user passed or named, and accuracy for classes.

    Accuracy belongs to images, and to own data whose loss distinguishes classes.
    """
    functions = user_metrics(request.user_objects.get("metrics"), request.job.train.metrics)
    if isinstance(loss, RecommenderLoss) and isinstance(data, InteractionDataset):
        return RecommenderMetrics(loss.config, data, functions)
    user_loss = user_loss_of(request)
    tells_classes = isinstance(loss, CrossEntropy | SampleClassificationLoss) or isinstance(
        user_loss, nn.CrossEntropyLoss
    )
    of_classes = data.input_kind == "images" or (data.input_kind == "custom" and tells_classes)
    if of_classes and request.plan.cp == 1:  # else targets are sequences
        functions = {ACCURACY: class_accuracy, **functions}
    return Metrics(functions, is_per_position=request.plan.cp > 1)


def check_user_code(
    trainer: Trainer,
    request: TrainRequest,
    spec: ModelSpec,
    data: BatchedDataset,
    forward_backward: ForwardBackward,
    gatherer: GlobalBatchGatherer,
) -> None:
    """Try the user's model, loss and metrics before the first step; every rank calls it.

    Raises:
        WanmaError: they compute other numbers under the plan than in a loop over the global batch.
    """
    progress = trainer.worker.supervisor_client.report_progress
    if checked := user_code(request, spec, forward_backward):
        progress(trainer.state.step, "checking the loss")
        refuse_sample_coupling(trainer, data, checked, gatherer)
        if checked.is_user_model and not gatherer.is_used:
            forward, rows = first_samples_forward(trainer, data, forward_backward)
            refuse_carried_state(trainer, forward, rows, takes_any_rows=request.plan.pp == 1)
    if has_user_metrics(request):
        progress(trainer.state.step, "checking the metrics")
        try_metrics(trainer, data, forward_backward, gatherer)


def user_code(request: TrainRequest, spec: ModelSpec, forward_backward: ForwardBackward) -> UserCode | None:
    """Return a model or loss that may couple samples; None where both are wanma's."""
    loss = user_loss_of(request)
    if spec.input_kind != "custom" and loss is None:
        return None
    pipelined = request.plan.pp > 1
    return UserCode(
        (lambda batch: forward_backward.evaluate_losses([batch])) if pipelined else forward_backward.losses,
        is_user_model=spec.input_kind == "custom",
        other_objects=() if loss is None else (loss,),
    )


def user_loss_of(request: TrainRequest) -> Any:
    """Return the loss that the user passed or named; None if there is none."""
    function = request.user_objects.get("loss")
    if function is None and request.job.model.loss is not None:
        function = import_object(request.job.model.loss, "model.loss")
    return function
