"""wanma inside a user's own loop: `prepare` a module, iterate `batches`, call `step` with the losses.

    with wanma.session(job) as session:
        model = session.prepare(model)
        for batch in session.batches(dataset):
            losses = loss(model(*batch.inputs), batch.targets)  # one per sample: reduction="none"
            session.step(losses)

Accumulation, sharding, clipping, the schedule, records, checkpoints and resuming are the job's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.data.loader import Loader, Step
from wanma.data.open import open_data
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.job.worker import Worker
from wanma.models.build import custom_spec
from wanma.models.dropout import keyed_samples
from wanma.parallel.mesh import Grid
from wanma.parallel.parallelize import parallelize
from wanma.parallel.shard import begin_micro_batch
from wanma.training.loss import sum_losses
from wanma.training.trainer import Trainer


class Session:
    """One rank of a run whose forward pass the user writes."""

    def __init__(self, job: Job, plan: Plan, worker: Worker, grid: Grid) -> None:
        if plan.pp > 1:
            raise JobError(
                f"parallel.pp = {plan.pp}: a pipeline schedule runs the forward pass itself",
                "use wanma.train for pipelines, or pp = 1 in your own loop",
            )
        self.job, self.plan, self.worker, self.grid = job, plan, worker, grid
        self._model: nn.Module | None = None
        self._trainer: Trainer | None = None
        self._current: _Current | None = None
        self._stopped = False
        """An orderly stop was asked for."""
        self._saved_at = 0
        self._ended = False

    @property
    def device(self) -> torch.device:
        return self.grid.device

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints."""
        return self.worker.rank == 0

    def prepare(self, model: nn.Module) -> nn.Module:
        """Spread `model` over the ranks by the job's plan; call it once, before `batches`.

        Every rank must have built it alike (same seed): seed torch with `job.train.seed`.
        """
        if self._trainer is not None:
            raise WanmaError(
                "session.prepare was called twice: a session trains one model",
                "put modules that train together into one, or open a second session after the first",
            )
        parallel = parallelize(
            custom_spec(model, self.job.model.statistics_group), self.plan, self.grid, self.job.train.seed
        )
        self._model = parallel.module
        self._trainer = Trainer(self.job, self.plan, self.worker, self.grid, parallel, targets_per_sample=1)
        self._saved_at = self._trainer.state.step
        return parallel.module

    def batches(self, dataset: Any = None) -> Iterator[Batch]:
        """Micro-batches on this rank's device, from the run's position to the job's last step.

        Args:
            dataset: map-style (`__len__`, `__getitem__`); default: the job's `[data]`.

        Raises:
            WanmaError: a step's micro-batch was left without a call of `step`.
        """
        trainer = self._require_trainer()
        data = open_data(self.job.data, self.job.train, dataset=dataset)
        loader = Loader(
            data,
            self.plan,
            self.job.train,
            self.grid.data_rank,
            start_step=trainer.state.step,
            prefetch=self.job.data.prefetch,
            threads=self.job.data.workers,
            pin_memory=self.plan.device == "cuda",
        )
        progress = self.worker.control.progress
        with loader:
            steps = iter(loader)
            while trainer.state.step < self.job.train.steps and not self._stopped:
                progress(trainer.state.step, "waiting for data")
                with trainer.phases.phase("data"):
                    step = next(steps)
                progress(trainer.state.step, "forward and backward")
                yield from self._step_batches(step)
        self._end(trainer)

    def step(self, losses: Tensor) -> None:
        """Backward of the current micro-batch; at the step's last one, update, record and save.

        Args:
            losses: one loss per sample or target, leading dimension the batch's rows.

        Raises:
            WanmaError: a second call for one batch, losses that were averaged already, or the step's
                numbers are not finite and train.non_finite is "stop".
        """
        current, trainer = self._current, self._require_trainer()
        if current is None or current.done:
            raise WanmaError("session.step was called twice for one batch, or outside session.batches")
        loss_sum, targets = sum_losses(losses, current.batch)
        factor = trainer.factor(current.step.global_batch)
        with trainer.phases.phase("forward_backward"):
            (loss_sum * factor).backward()
        current.loss_sum += loss_sum.detach().double()
        current.targets += targets
        current.done = True
        if current.is_last:
            self._finish(current)

    def _step_batches(self, step: Step) -> Iterator[Batch]:
        assert self._model is not None
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        loss_sum, targets = zero.clone(), zero.clone()
        for index, batch in enumerate(step.micro_batches):
            is_last = index == len(step.micro_batches) - 1
            begin_micro_batch(self._model, self.plan, is_last)
            batch = batch.to(self.device)
            self._current = _Current(step, batch, is_last, loss_sum, targets)
            with keyed_samples(self._model, self.job.train.seed, batch.samples):
                yield batch
            if not self._current.done:
                raise WanmaError(
                    "a batch went by without session.step(losses)",
                    "call it exactly once for every batch that session.batches gives",
                )

    def _finish(self, current: _Current) -> None:
        """End the optimizer step."""
        trainer = self._require_trainer()
        agreement = trainer.finish_step(current.loss_sum, current.targets, current.step.global_batch)
        every = self.job.checkpoint.every_steps
        last = agreement.stop or trainer.state.step == self.job.train.steps
        if last or (every > 0 and trainer.state.step % every == 0):
            trainer.save()
            self._saved_at = trainer.state.step
        trainer.record(agreement)
        self._stopped = agreement.stop

    def _require_trainer(self) -> Trainer:
        if self._trainer is None:
            raise WanmaError("the session has no model yet", "call session.prepare(model) first")
        return self._trainer

    def _end(self, trainer: Trainer) -> None:
        self._ended = True
        trainer.finish("interrupted" if trainer.state.step < self.job.train.steps else "finished")

    def close(self, failed: bool) -> None:
        """Let go of everything; a loop that the user left early is an orderly stop, with a checkpoint.

        Raises:
            WanmaError: that checkpoint could not be saved.
        """
        trainer = self._trainer
        if trainer is None:
            return
        if failed or self._ended:
            trainer.close(failed)
            return
        left_in_order = False
        try:
            if trainer.state.step > self._saved_at:
                trainer.save()
            self._end(trainer)
            left_in_order = True
        finally:
            trainer.close(not left_in_order)


class _Current:
    """The micro-batch that the user is at."""

    def __init__(self, step: Step, batch: Batch, is_last: bool, loss_sum: Tensor, targets: Tensor) -> None:
        self.step, self.batch, self.is_last = step, batch, is_last
        self.loss_sum, self.targets = loss_sum, targets
        self.done = False
