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

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import Data
from wanma.data.opening import open_data
from wanma.data.step_loader import Loader, Step
from wanma.job.errors import JobError, WanmaError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.job.sections.job import Job
from wanma.models.keyed_random.forward_draws import Forward
from wanma.models.layers.router import set_loss_factor
from wanma.models.model_spec import custom_spec, with_adapters, with_frozen
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.user_modules.validation import check_ready
from wanma.models.workload.model_workload import module_workload
from wanma.parallel.data_parallel.fsdp_errors import explained
from wanma.parallel.data_parallel.global_batch import GlobalBatch
from wanma.parallel.memory.disk_pool import open_scratch
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel, parallelize
from wanma.training.checkpointing.run_identity import Identity, identity_of, is_seeded
from wanma.training.checks.carried_state import FirstForward
from wanma.training.checks.lone_samples import has_lone_samples, refuse_lone_samples
from wanma.training.checks.loss_dependence import Dependence
from wanma.training.checks.sample_coupling import Checked, is_cut, refuse_coupling
from wanma.training.loop.training_loop import broken_samples, end_step
from wanma.training.loop.training_loop import validate as validate_with
from wanma.training.loss.target_counting import Counting, Losses
from wanma.training.loss.transformers_labels import default_losses
from wanma.training.loss.validation_metrics import GivenMetrics, Value
from wanma.training.optimizer.user_optimizer_trial import tried_update
from wanma.training.run.stream_position import take_up_stream
from wanma.training.run.trainer import Trainer
from wanma.training.step.early_stopping import check_validation_keys, without_validation

Validated = Losses | tuple[Losses, Mapping[str, Value]]
"""Losses of a batch; or a pair of these and of metrics by name."""
LossesOf = Callable[[Batch], Validated]
"""User's forward pass: a function from a batch to its losses, in validation perhaps with metrics."""


class Session:
    """Run of one rank whose forward pass the user writes.

    Args:
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        grid: device meshes of the plan.
        peak_flops_per_second: peak rate of one rank's device; None when unknown.
        on_start: function called when the run begins, after its checkpoint has accepted it, with the model's
            workload if it is known.
        objects: `optimizer` and `schedule` that the user passed in Python.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: Worker,
        grid: Grid,
        *,
        peak_flops_per_second: float | None = None,
        on_start: Callable[[Workload | None], None] = lambda _: None,
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        if plan.pp > 1:
            raise JobError(
                f"parallel.pp = {plan.pp}: a pipeline schedule runs the forward pass itself",
                "use wanma.train for pipelines, or pp = 1 in your own loop",
            )
        self.job, self.plan, self.worker, self.grid = job, plan, worker, grid
        self._peak, self._on_start, self._own = peak_flops_per_second, on_start, objects or {}
        self._workload: Workload | None = None
        self._parallel: Parallel | None = None
        self._trainer: Trainer | None = None
        self._measure: Callable[[], float | None] = lambda: None
        self._iteration: Generator[Batch, None, None] | None = None
        self._current: _Current | None = None
        self._count = Counting()
        self._identity = Identity()
        self._stopped = False
        """True if an orderly stop was asked for."""
        self._saved_at = 0
        self._ended = False
        self._scratch = open_scratch(job, worker)
        self._loader: Loader | None = None
        self._gathering = GlobalBatch(grid, job.train.global_batch)
        self._dependence: Dependence | None = None
        self._has_lone_samples = False
        """True if the first step is still to come, and has one sample per micro-batch."""

    @property
    def device(self) -> torch.device:
        return self.grid.device

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
                count. With them the records contain the model FLOPs utilisation, for a loop that runs the
                model once per batch.

        Raises:
            WanmaError: a second call, no module, one that the plan cannot distribute, or an example that the
                model does not take.
        """
        if self._parallel is not None:
            raise WanmaError(
                "session.prepare was called twice: a session trains one model",
                "put modules that train together into one, or open a second session after the first",
            )
        check_ready(model)
        self._identity = identity_of(model, seeded=is_seeded())
        if (
            example is not None and self.is_main
        ):  # before the module is distributed: afterwards it is no plain one
            frozen = partial(is_frozen, groups=self.job.train.parameter_groups)
            self._workload = module_workload(model, _checked(example), frozen=frozen)
        spec = with_adapters(custom_spec(model, self.job.model.batch_norm_group), self.job.model)
        self._parallel = parallelize(
            with_frozen(spec, self.job.train.parameter_groups),
            self.plan,
            self.grid,
            self.job.train.seed,
            self._scratch,
        )
        return self._parallel.module

    def batches(self, dataset: Any = None, validate: LossesOf | None = None) -> Iterator[Batch]:
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
        if self._parallel is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        if self._trainer is not None:
            raise WanmaError(
                "session.batches was called twice: it goes through all steps of the job once",
                "train.steps says how many; break leaves the loop early and saves",
            )
        every = self.job.train.validate_every_steps
        if every > 0 and validate is None:
            raise JobError(
                f"train.validate_every_steps = {every}, but session.batches does not know how to validate",
                "give it validate=FUNCTION, from a batch to its losses, or leave the key out",
            )
        self.worker.control.progress(0, "opening data")
        data = open_data(self.job.data, self.job.train, dataset=dataset)
        data.padding_has_targets = True
        check_validation_keys(self.job, None, data.validation_samples)
        self._trainer = trainer = self._begin(self._parallel, data)
        if (idle := without_validation(self.job, data.validation_samples, has_metrics=False)) is not None:
            trainer.message(idle, "warning")
        take_up_stream(trainer, data)
        self._saved_at = trainer.state.step
        if validate is not None:
            losses = partial(self._losses_of, trainer, validate)
            refuse_coupling(trainer, data, Checked(losses), self._gathering)
        if is_cut(trainer):
            FirstForward(trainer, self._gathering, self._samples)
        self._dependence = Dependence(trainer, self._gathering)
        self._has_lone_samples = has_lone_samples(trainer)
        self._on_start(self._workload)
        if validate is not None:
            self._measure = self._measuring(trainer, data, validate)
        self._iteration = self._batches(trainer, data)
        return self._iteration

    def settle(self) -> None:
        """Wait until no rank computes with the weights; every rank calls it.

        It belongs between an evaluation in a loop of your own and a change of weights by your own hand: ranks
        of one node may compute with one copy of them. `step` and `validate` do it themselves.

        Raises:
            WanmaError: there is no model yet, or one of its modules changed a weight in its forward.
        """
        if self._parallel is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        self._parallel.settle()

    def losses(self, output: Any, batch: Batch) -> Losses:
        """Return the losses that `wanma.train` computes by default, for `step` and `validate`.

        A model of transformers interprets `labels` as its own loss does, shifted for a causal language model.
        Otherwise they are the cross entropy of the batch's targets.

        Args:
            output: output of the model when it is given no labels.
            batch: batch of the output.

        Raises:
            WanmaError: there is no model yet, the loss of its class is not known, or the output and the
                targets do not fit it.
        """
        if self._parallel is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        return default_losses(self._parallel.module, output, batch)

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
        if trainer is None or current is None or current.done:
            raise WanmaError("session.step was called twice for one batch, or outside session.batches")
        loss_sum, targets = self._count(losses, current.batch)
        if not loss_sum.requires_grad:
            raise WanmaError(
                "the losses given to session.step have no gradient",
                "compute them with the model that session.prepare returned, not under torch.no_grad, "
                "and do not detach them",
            )
        current.forward.end()
        factor = trainer.factor(current.step.global_batch)
        clock = trainer.state.parallel.clock
        clock.stop(forward=True)
        if self._dependence is not None:
            self._dependence.refuse(losses)
            self._dependence = None
        with trainer.phases.phase("forward_backward"):
            clock.start()
            (loss_sum * factor).backward()
            clock.stop(forward=False)
            current.forward.finish()
            if current.is_last:
                trainer.state.parallel.end_backward()
                if self._has_lone_samples:
                    refuse_lone_samples(trainer, self._gathering)
                    self._has_lone_samples = False
        current.loss_sum += loss_sum.detach().double()
        current.targets += targets
        current.done = True
        if current.is_last:
            self._finish(trainer, current)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run; a loop that the user left early is an orderly stop, with a checkpoint.

        Raises:
            WanmaError: that checkpoint could not be saved; or it explains an error of torch's in its place.
        """
        with self._scratch:
            self._leave(failed=kind is not None)
        if isinstance(error, RuntimeError) and (reason := explained(error, self.plan)) is not None:
            raise reason from error

    # ---------------------------------------------------------------- inside

    def _leave(self, failed: bool) -> None:
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
            if trainer.state.step > self._saved_at:
                trainer.save()
            self._end(trainer)
            left_in_order = True
        finally:
            trainer.close(not left_in_order)

    def _samples(self) -> Tensor:
        """Return the sample indices of the current micro-batch."""
        assert self._current is not None
        return self._current.batch.samples

    def _begin(self, parallel: Parallel, data: Data) -> Trainer:
        """Open the run at its resume point."""
        return Trainer(
            self.job,
            self.plan,
            self.worker,
            self.grid,
            parallel,
            targets_per_sample=data.targets_per_sample,
            identity=replace(self._identity, data=data.fingerprint),
            own=tried_update(self.job.train, self._own, self.plan),
            flops_per_sample=self._workload.flops_per_sample if self._workload else None,
            peak_flops_per_second=self._peak,
        )

    def _batches(self, trainer: Trainer, data: Data) -> Generator[Batch, None, None]:
        progress = self.worker.control.progress
        self._loader = loader = Loader(
            data,
            trainer.plan,
            self.job.train,
            self.grid.data_rank,
            start_step=trainer.state.step,
            prefetch=self.job.data.prefetch,
            threads=self.job.data.workers,
            pin_memory=self.plan.device == "cuda",
        )
        with loader:
            steps = iter(loader)
            while not trainer.state.is_over(self.job.train) and not self._stopped:
                progress(trainer.state.step, "waiting for data")
                with trainer.phases.phase("data"):
                    step = next(steps)
                progress(trainer.state.step, "forward and backward")
                trainer.broken = partial(broken_samples, data, step.micro_batches)
                with self._gathering.announced(trainer.plan, step.global_batch):
                    yield from self._micro_batches(trainer, step)
        self._end(trainer)

    def _micro_batches(self, trainer: Trainer, step: Step) -> Iterator[Batch]:
        module = trainer.state.parallel.module
        # Hooks on the parameters of the returned module: backward has other parameters.
        trainer.state.parallel.hooks.collect(trainer.state.updater.parameters)
        trainer.state.parallel.draws.step = trainer.state.step
        loss_sum, targets = self._zero(), self._zero()
        set_loss_factor(module.modules(), trainer.factor(step.global_batch))
        for index, batch in enumerate(step.micro_batches):
            is_last = index == len(step.micro_batches) - 1
            trainer.state.parallel.begin_micro_batch(is_last)
            batch = batch.to(self.device)
            forward = trainer.state.parallel.draws.forward(module, batch.samples)
            self._current = _Current(step, batch, is_last, loss_sum, targets, forward)
            trainer.state.parallel.clock.start()
            watching = nullcontext() if self._dependence is None else self._dependence.watching(batch)
            with watching, forward:
                yield batch
            if not self._current.done:
                raise WanmaError(
                    "a batch went by without session.step(losses)",
                    "call it exactly once for every batch that session.batches gives",
                )

    def _finish(self, trainer: Trainer, current: _Current) -> None:
        """End the optimizer step."""
        agreement = trainer.finish_step(current.loss_sum, current.targets, current.step.global_batch)
        if end_step(trainer, agreement, self._measure):
            self._saved_at = trainer.state.step
        if self._loader is not None:
            self._loader.follow(trainer.plan)
        self._stopped = agreement.stop

    def _measuring(self, trainer: Trainer, data: Data, losses_of: LossesOf) -> Callable[[], float | None]:
        """Return the validation function over the user's own forward pass."""
        metrics = GivenMetrics()

        def evaluate(batches: Iterable[Batch]) -> tuple[Tensor, ...]:
            loss_sum, targets = self._zero(), self._zero()
            metrics.begin()
            with torch.no_grad():
                for batch in batches:
                    of_batch, number = self._losses_of(trainer, losses_of, batch.to(self.device), metrics)
                    loss_sum += of_batch
                    targets += number
            trainer.state.parallel.rest()
            trainer.state.parallel.settle()
            return loss_sum, targets, *metrics.sums(self.device, counts=self.grid.counts_loss)

        return partial(validate_with, trainer, data, evaluate, self._gathering, lambda: metrics.names)

    def _losses_of(
        self, trainer: Trainer, losses_of: LossesOf, batch: Batch, metrics: GivenMetrics | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses, number of targets) of a batch, by the user's own forward pass.

        Args:
            trainer: this rank's run.
            losses_of: user's forward pass.
            batch: batch of samples.
            metrics: sums of the metrics to which those of the batch are added.
        """
        draws, module = trainer.state.parallel.draws, trainer.state.parallel.module
        with draws.forward(module, batch.samples) as forward:
            losses, values = _with_metrics(losses_of(batch))
            sums = self._count(losses, batch)
            if metrics is not None:
                metrics.add(values, batch.rows, batch.real)
            forward.end()
        return sums

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _end(self, trainer: Trainer) -> None:
        self._ended = True
        trainer.finish("finished" if trainer.state.is_over(self.job.train) else "interrupted")


class _Current:
    """Current micro-batch of the user's loop."""

    def __init__(
        self,
        step: Step,
        batch: Batch,
        is_last: bool,
        loss_sum: Tensor,
        targets: Tensor,
        forward: Forward,
    ) -> None:
        self.step, self.batch, self.is_last, self.forward = step, batch, is_last, forward
        self.loss_sum, self.targets = loss_sum, targets
        self.done = False


def _with_metrics(validated: Validated) -> tuple[Losses, Mapping[str, Value]]:
    if isinstance(validated, tuple) and len(validated) == 2 and isinstance(validated[1], Mapping):
        losses: Any = validated[0]
        return losses, validated[1]
    plain: Any = validated
    return plain, {}


def _checked(example: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) and x.ndim > 0 and len(x) > 0 for x in inputs):
        raise WanmaError(
            "session.prepare's example is not what a model's forward takes",
            "give its positional arguments as tensors with one sample or more in dim 0",
        )
    return inputs
