"""Training session in a user's own loop: `prepare` a module, iterate `batches`, call `step` with the losses.

    def losses(batch):
        return loss(model(*batch.inputs), batch.targets)  # one per sample: reduction="none"

    with wanma.session(job) as session:
        model = session.prepare(model)
        for batch in session.batches(dataset, validate=losses):
            session.step(losses(batch))

Accumulation, sharding, clipping, the schedule, validation, records, checkpoints and resuming are the job's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.step_loader import StepBatches, StepLoader
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.run_settings import run_settings
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.models.keyed_random.forward_draws import KeyedForward
from wanma.models.layers.router import set_auxiliary_loss_scale
from wanma.models.model_spec import apply_freezing_to_spec, apply_lora_to_spec, wrap_module
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.user_modules.validation import validate_module
from wanma.models.workload.model_workload import trace_module_workload
from wanma.parallel.data_parallel.fsdp_errors import to_job_error
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.parallel.memory.disk_pool import open_disk_pool
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel, parallelize
from wanma.planner.preparation.job_data import open_job_dataset
from wanma.training.checkpointing.resume import resume
from wanma.training.checkpointing.run_identity import Identity, identity_of, is_seeded
from wanma.training.checks.carried_state import CarriedStateCheck
from wanma.training.checks.lone_samples import has_single_sample_micro_batches, refuse_zero_gradients
from wanma.training.checks.loss_dependence import SampleDependenceCheck
from wanma.training.checks.sample_coupling import UserCode, is_batch_split, refuse_sample_coupling
from wanma.training.loop.data_position import seek_data
from wanma.training.loop.session_validation import LossesFunction, SessionValidation
from wanma.training.loop.training_loop import run_step_tasks
from wanma.training.loop.training_loop import validate as validate_with
from wanma.training.loss.target_counting import Losses, TargetCounter
from wanma.training.loss.transformers_labels import default_per_target_losses
from wanma.training.optimizer.user_optimizer_trial import load_tried_user_optimization
from wanma.training.run.data_parts import join_data_parts
from wanma.training.run.shared_reading import share_reading
from wanma.training.run.trainer import Trainer
from wanma.training.step.early_stopping import check_validation_keys, unused_validation_keys_note


class Session:
    """Run of one rank whose forward pass the user writes.

    Args:
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        parallel_mesh: device meshes of the plan.
        peak_flops_per_second: peak rate of one rank's device; None when unknown.
        on_first_step: function called when the run has done a step, with the model's workload if it is known.
        user_objects: `optimizer` and `schedule` that the user passed in Python.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: WorkerContext,
        parallel_mesh: ParallelMesh,
        *,
        peak_flops_per_second: float | None = None,
        on_first_step: Callable[[Workload | None], None] = lambda _: None,
        user_objects: Mapping[str, Any] | None = None,
    ) -> None:
        if plan.pp > 1:
            raise JobError(
                f"parallel.pp = {plan.pp}: a pipeline schedule runs the forward pass itself",
                "use wanma.train for pipelines, or pp = 1 in your own loop",
            )
        self.job, self.plan, self.worker, self.parallel_mesh = job, plan, worker, parallel_mesh
        self._peak_flops_per_second, self._user_objects = peak_flops_per_second, user_objects or {}
        self._on_first_step: Callable[[Workload | None], None] | None = on_first_step
        self._workload: Workload | None = None
        self._data: BatchedDataset | None = None
        self._parallel_model: ParallelModel | None = None
        self._trainer: Trainer | None = None
        self._run_validation: Callable[[], float | None] = lambda: None
        self._iteration: Generator[Batch, None, None] | None = None
        self._current: _CurrentMicroBatch | None = None
        self._target_counter = TargetCounter()
        self._identity = Identity()
        self._is_drain_requested = False
        """True if an orderly stop was asked for."""
        self._saved_step = 0
        self._ended = False
        self._disk_pool = open_disk_pool(job, worker)
        self._loader: StepLoader | None = None
        self._gatherer = GlobalBatchGatherer(parallel_mesh, job.train.global_batch)
        self._sample_dependence_check: SampleDependenceCheck | None = None
        self._has_single_sample_micro_batches = False
        """True if the first step is still to come, and has one sample per micro-batch."""

    @property
    def device(self) -> torch.device:
        return self.parallel_mesh.device

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which prints."""
        return self.worker.rank == 0

    def prepare(self, model: nn.Module, example: Tensor | Sequence[Tensor] | None = None) -> nn.Module:
        """Distribute `model` over the ranks by the job's plan; call it once, before `batches`.

        Every rank must have built it alike (same seed): seed torch with `job.train.seed`. A resumed run takes
        its weights in `batches`, where the data are known too.

        Args:
            model: module that the user has built.
            example: positional arguments of the model's forward, dim 0 the samples; only shapes and dtypes
                count. With them the records contain the model FLOPs utilization, for a loop that runs the
                model once per batch.

        Raises:
            WanmaError: a second call, no module, one that the plan cannot distribute, or an example that the
                model does not take.
        """
        if self._parallel_model is not None:
            raise WanmaError(
                "session.prepare was called twice: a session trains one model",
                "put modules that train together into one module, or open a second session after the first",
            )
        validate_module(model)
        self._identity = identity_of(model, seeded=is_seeded())
        if example is not None and self.is_main:  # the module is a plain one until it is distributed
            frozen = partial(is_frozen, groups=self.job.train.parameter_groups)
            self._workload = trace_module_workload(model, _checked(example), is_frozen=frozen)
        spec = apply_lora_to_spec(wrap_module(model, self.job.model.batch_norm_group), self.job.model)
        self._identity = replace(self._identity, settings=run_settings(self.job, spec.settings))
        self._parallel_model = parallelize(
            apply_freezing_to_spec(spec, self.job.train.parameter_groups),
            self.plan,
            self.parallel_mesh,
            self.job.train.seed,
            self._disk_pool,
        )
        return self._parallel_model.module

    def batches(self, dataset: Any = None, validate: LossesFunction | None = None) -> Iterator[Batch]:
        """Yield micro-batches on this rank's device, from the run's position to the job's last step.

        Args:
            dataset: map-style (`__len__`, `__getitem__`), or a pair (training, validation) of them; default:
                the job's `[data]`.
            validate: function that returns the losses of a validation batch, as for `step`. It is called for
                all of them when the job says so (`train.validate_every_steps`, and at the end), without
                gradients, in evaluation mode, on the averaged weights if there are any. It may return a pair,
                (losses, metrics), with metrics by name: a value per sample or target, (values, mask),
                (values, weights) or (sum, count).

        Raises:
            WanmaError: a second call; no model or no data; a checkpoint of another model, other data or
                another batch size. While iterating: a batch was left without a call of `step`.
        """
        if self._parallel_model is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        if self._trainer is not None:
            raise WanmaError(
                "session.batches was called twice: one call yields all steps of the job",
                "set train.steps to the number of steps; `break` ends the loop early and saves",
            )
        interval = self.job.train.validate_every_steps
        if interval > 0 and validate is None:
            raise JobError(
                f"train.validate_every_steps = {interval}, but session.batches has no validation function",
                "pass validate=FUNCTION to it, from a batch to its losses, or unset the key",
            )
        self.worker.supervisor_client.report_progress(0, "opening data")
        opened = open_job_dataset(self.job, dataset)
        self._data = data = join_data_parts(opened, self.job, self.worker, self.plan)
        data.padding_has_targets = True
        check_validation_keys(self.job, None, data.validation_samples)
        self._trainer = trainer = self._start_run(self._parallel_model, data)
        idle = unused_validation_keys_note(self.job, data.validation_samples, has_user_metrics=False)
        if idle is not None:
            trainer.message(idle, "warning")
        seek_data(trainer, data)
        if data.bad_data_note:
            trainer.message(data.bad_data_note, "warning")
        self._saved_step = trainer.state.step
        if validate is not None:
            validation = SessionValidation(trainer, validate, self._target_counter)
            refuse_sample_coupling(trainer, data, UserCode(validation.losses), self._gatherer)
            self._run_validation = partial(
                validate_with,
                trainer,
                data,
                validation.evaluate,
                self._gatherer,
                lambda: validation.metrics.names,
            )
        if is_batch_split(trainer):
            CarriedStateCheck(trainer, self._gatherer, self._samples)
        self._sample_dependence_check = SampleDependenceCheck(trainer, self._gatherer)
        self._has_single_sample_micro_batches = has_single_sample_micro_batches(trainer)
        self._iteration = self._batches(trainer, data)
        return self._iteration

    def settle(self) -> None:
        """Wait until no rank computes with the weights; every rank calls it.

        It belongs between an evaluation in a loop of your own and a change of weights by your own hand: ranks
        of one node may compute with one copy of them. `step` and `validate` do it themselves.

        Raises:
            WanmaError: there is no model yet, or one of its modules changed a weight in its forward.
        """
        if self._parallel_model is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        self._parallel_model.wait_until_weights_unused()

    def losses(self, output: Any, batch: Batch) -> Losses:
        """Return the losses that `wanma.train` computes by default, for `step` and `validate`.

        A model of transformers interprets `labels` as its own loss does, shifted for a causal language model.
        Numbers as the target of a table have the squared error, all other targets the cross entropy.

        Args:
            output: output of the model when it is given no labels.
            batch: batch of the output.

        Raises:
            WanmaError: there is no model yet, the loss of its class is not known, or the output and the
                targets do not fit it.
        """
        if self._parallel_model is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        return default_per_target_losses(self._parallel_model.module, output, batch, self._data)

    def step(self, losses: Losses) -> None:
        """Run backward of the current micro-batch; at the step's last one, update, validate, save and record.

        Args:
            losses: one loss per sample or target, leading dimension the batch's rows; or a pair of these and
                their weights: a mask, or weights by whose sum theirs is divided.

        Raises:
            WanmaError: a second call for one batch, losses that were averaged already or have no gradient, or
                the step's numbers are wrong, and train.non_finite or train.spike do not leave such steps out.
        """
        current, trainer = self._current, self._trainer
        if trainer is None or current is None or current.is_done:
            raise WanmaError("session.step was called twice for one batch, or outside session.batches")
        loss_sum, targets = self._target_counter(losses, current.batch)
        if not loss_sum.requires_grad:
            raise WanmaError(
                "the losses given to session.step have no gradient",
                "compute them with the model that session.prepare returned, not under torch.no_grad, "
                "and do not detach them",
            )
        current.forward.end_forward()
        factor = trainer.loss_multiplier(current.step.global_batch_size)
        clock = trainer.state.parallel_model.compute_timer
        clock.stop(is_forward=True)
        if self._sample_dependence_check is not None:
            self._sample_dependence_check.check(losses)
            self._sample_dependence_check = None
        with trainer.phases.phase("forward_backward"):
            clock.start()
            (loss_sum * factor).backward()
            clock.stop(is_forward=False)
            current.forward.end_backward()
            if current.is_last:
                trainer.state.parallel_model.finalize_gradients()
                if self._has_single_sample_micro_batches:
                    refuse_zero_gradients(trainer, self._gatherer)
                    self._has_single_sample_micro_batches = False
        current.loss_sum += loss_sum.detach().double()
        current.targets += targets
        current.is_done = True
        if current.is_last:
            with trainer.phases.phase("host"):
                self._finish_step(trainer, current)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run; a loop that the user left early is an orderly stop, with a checkpoint.

        Raises:
            WanmaError: that checkpoint could not be saved; or it explains an error of torch's in its place.
        """
        with self._disk_pool:
            self._close_run(failed=kind is not None)
        if isinstance(error, RuntimeError) and (reason := to_job_error(error, self.plan)) is not None:
            raise reason from error

    # ---------------------------------------------------------------- inside

    def _close_run(self, failed: bool) -> None:
        if self._iteration is not None:
            self._iteration.close()
        trainer = self._trainer
        if trainer is None:
            return
        if failed or self._ended:
            trainer.close(failed=failed)
            return
        left_in_order = False
        try:
            if trainer.state.step > self._saved_step:
                trainer.save()
            self._finish_run(trainer)
            left_in_order = True
        finally:
            trainer.close(not left_in_order)

    def _samples(self) -> Tensor:
        """Return the sample indices of the current micro-batch."""
        assert self._current is not None
        return self._current.batch.samples

    def _start_run(self, parallel_model: ParallelModel, data: BatchedDataset) -> Trainer:
        """Open the run at its resume point."""
        return Trainer(
            self.job,
            self.plan,
            self.worker,
            self.parallel_mesh,
            parallel_model,
            targets_per_sample=data.targets_per_sample,
            identity=replace(self._identity, data=data.fingerprint, order=data.order_identity),
            user_optimization=load_tried_user_optimization(self.job.train, self._user_objects, self.plan),
            flops_per_sample=self._workload.flops_per_sample if self._workload else None,
            peak_flops_per_second=self._peak_flops_per_second,
            restore=partial(resume, data=data),
        )

    def _batches(self, trainer: Trainer, data: BatchedDataset) -> Generator[Batch, None, None]:
        progress = self.worker.supervisor_client.report_progress
        rank = self.parallel_mesh.data_rank
        self._loader = loader = StepLoader.of_job(self.job, data, trainer.plan, rank, trainer.state.step)
        with share_reading(trainer, data), loader:
            steps = iter(loader)
            while not trainer.state.is_over(self.job.train) and not self._is_drain_requested:
                progress(trainer.state.step, "waiting for data")
                with trainer.phases.phase("data"):
                    step = next(steps)
                progress(trainer.state.step, "forward and backward")
                trainer.step_data.begin(data, step)
                with self._gatherer.provide(trainer.plan, step.global_batch_size):
                    yield from self._micro_batches(trainer, step)
        self._finish_run(trainer)

    def _micro_batches(self, trainer: Trainer, step: StepBatches) -> Iterator[Batch]:
        module = trainer.state.parallel_model.module
        # Hooks on the parameters of the returned module: backward has other parameters.
        trainer.state.parallel_model.gradient_hooks.collect(trainer.state.named_optimizer.parameters)
        trainer.state.parallel_model.random_draws.step = trainer.state.step
        loss_sum, targets = self._zero_scalar(), self._zero_scalar()
        set_auxiliary_loss_scale(module.modules(), trainer.loss_multiplier(step.global_batch_size))
        for index, batch in enumerate(step.micro_batches):
            is_last = index == len(step.micro_batches) - 1
            trainer.state.parallel_model.begin_micro_batch(is_last)
            batch = batch.to(self.device)
            forward = trainer.state.parallel_model.random_draws.forward(module, batch.samples)
            self._current = _CurrentMicroBatch(step, batch, is_last, loss_sum, targets, forward)
            trainer.state.parallel_model.compute_timer.start()
            watching = (
                nullcontext()
                if self._sample_dependence_check is None
                else self._sample_dependence_check.follow(batch)
            )
            with watching, forward:
                yield batch
            if not self._current.is_done:
                raise WanmaError(
                    "session.step(losses) was not called for a batch",
                    "call it exactly once for every batch of session.batches",
                )

    def _finish_step(self, trainer: Trainer, current: _CurrentMicroBatch) -> None:
        """End the optimizer step."""
        agreement = trainer.finish_step(current.loss_sum, current.targets, current.step.global_batch_size)
        if run_step_tasks(trainer, agreement, self._run_validation):
            self._saved_step = trainer.state.step
        if self._on_first_step is not None:
            self._on_first_step(self._workload)
            self._on_first_step = None
        if self._loader is not None:
            self._loader.switch_plan(trainer.plan)
        self._is_drain_requested = agreement.is_drain_requested

    def _zero_scalar(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _finish_run(self, trainer: Trainer) -> None:
        self._ended = True
        trainer.finish("finished" if trainer.state.is_over(self.job.train) else "interrupted")


@dataclass
class _CurrentMicroBatch:
    """Current micro-batch of the user's loop."""

    step: StepBatches
    batch: Batch
    is_last: bool
    loss_sum: Tensor
    targets: Tensor
    forward: KeyedForward
    is_done: bool = False


def _checked(example: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) and x.ndim > 0 and len(x) > 0 for x in inputs):
        raise WanmaError(
            "session.prepare: example must hold tensors with at least one sample in dim 0",
            "pass the positional arguments of the model's forward as tensors, with the samples in dim 0",
        )
    return inputs
