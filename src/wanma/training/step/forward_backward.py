"""Forward and backward of one step's micro-batches; gradients end as sums over this rank's samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from wanma.data.batch import IGNORED, Batch, stack_rows
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.keyed_random.forward_draws import Forward
from wanma.models.layers.router import Routing, set_loss_factor
from wanma.models.user_modules.forward_error import forward_error
from wanma.parallel.context.sequence_shards import residual_positions, split_sequence
from wanma.parallel.data_parallel.fsdp_errors import explained
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel
from wanma.parallel.pipeline.pipeline_runner import Loss
from wanma.training.loss.foreign_weights import refuse_own_weights
from wanma.training.loss.loss_functions import Classification, LossFunction, class_range
from wanma.training.loss.model_outputs import tensors_of
from wanma.training.loss.transformers_labels import SampleLabels
from wanma.training.loss.validation_metrics import Metrics
from wanma.training.step.float64_errors import doubles, explaining_doubles

_EVALUATED_TOGETHER = 4
"""Micro-batches per stage in one run of an evaluating pipeline: its bubble is a fifth of the time."""


class ForwardBackward:
    """Runner of a step's micro-batches through the model, pipelined or one after the other."""

    def __init__(
        self,
        parallel: Parallel,
        job: Job,
        plan: Plan,
        grid: Grid,
        loss: LossFunction,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics({})
        """Metrics that `evaluate` computes beside the loss."""
        self._parallel = parallel
        self._plan = plan
        self._job = job
        self._grid = grid
        self._loss = loss
        self._checks_weights = not isinstance(loss, Classification | SampleLabels)
        """True if the loss is the user's, and has had no gradient yet."""
        known = loss if isinstance(loss, Classification) else Classification(classes_last=True)
        self._of_pipeline = replace(known, spend=True)
        """Cross entropy of a pipeline, whose logits nobody reads afterwards."""
        self._routers = [module for module in parallel.modules() if isinstance(module, Routing)]

    def __call__(self, batches: list[Batch], factor: float) -> tuple[Tensor, Tensor]:
        """Add this rank's gradients of (sum of losses × `factor`).

        Returns:
            (sum of losses, number of targets), both zero where another rank counts the same loss.
        """
        set_loss_factor(self._routers, factor)
        if self._parallel.pipeline is not None:
            classes = class_range(batches)

            def scaled(output: Tensor, targets: Tensor) -> Tensor:
                return self._of_pipeline.sum(output, targets, classes) * factor

            return self._pipelined(batches, factor, scaled, backward=True)
        loss_sum, targets = self._zero(), self._zero()
        clock = self._parallel.clock
        for index, batch in enumerate(batches):
            self._parallel.begin_micro_batch(last=index == len(batches) - 1)
            clock.start()
            part, positions = self._part(batch)
            with explaining_doubles(batch, self._plan.precision), self._drawing(part, positions) as forward:
                batch_loss, batch_targets = self._losses(part)
                if not batch_loss.requires_grad:
                    raise WanmaError(
                        "the loss has no gradient: no parameter that it depends on is trained",
                        "leave requires_grad = True on what is to be trained, and do not detach the output",
                    )
                forward.end()
                clock.stop(forward=True)
                clock.start()
                (batch_loss * factor).backward()
            clock.stop(forward=False)
            loss_sum += batch_loss.detach()
            targets += batch_targets
        self._parallel.end_backward()
        return self._counted(loss_sum, targets)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[Tensor, ...]:
        """Evaluate batches without gradients.

        Returns:
            (sum of losses, number of targets, and the sum and count of each metric), counted as in
                `__call__`.
        """
        sums = self.evaluate_losses(batches, self.metrics)
        return *sums, *self.metrics.sums(self._grid.device, counts=self._grid.counts_loss)

    def evaluate_losses(
        self, batches: Iterable[Batch], metrics: Metrics | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) without gradients, counted as in `__call__`.

        Args:
            batches: micro-batches of this rank.
            metrics: metrics to which the values of the batches are added.
        """
        loss_sum, targets, metrics = self._zero(), self._zero(), metrics or Metrics({})
        metrics.begin()
        if self._parallel.pipeline is not None:
            remaining = iter(batches)
            # A schedule keeps what all its micro-batches put out until its end: a few at a time.
            while some := list(islice(remaining, _EVALUATED_TOGETHER * self._plan.pp)):
                real = iter(self._stacked(some).real.to(self._grid.device).chunk(len(some)))

                def loss(output: Tensor, of_batch: Tensor, real: Iterator[Tensor] = real) -> Tensor:
                    metrics.add(output, of_batch, next(real))
                    return self._of_pipeline.sum(output, of_batch)

                some_loss, some_targets = self._pipelined(some, 1.0, loss, backward=False)
                loss_sum += some_loss
                targets += some_targets
        else:
            with torch.no_grad():
                for batch in batches:
                    part, positions = self._part(batch)
                    with self._drawing(part, positions) as forward:
                        output = self._forward(part)
                        batch_loss, batch_targets = self._loss(output, part)
                        forward.end()
                    loss_sum += batch_loss
                    targets += batch_targets
                    metrics.add(output, part.given_targets, part.real)
        self._parallel.rest()
        self._parallel.settle()
        return self._counted(loss_sum, targets)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, target count) of this rank's part of a micro-batch, without a pipeline."""
        part, positions = self._part(batch)
        with self._drawing(part, positions) as forward:
            sums = self._losses(part)
            forward.end()
        return sums

    def _losses(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) of a part.

        It is a function of its own: a caller that held the logits would hold them until backward has ended,
        and through the next forward.
        """
        output = self._forward(part)
        sums = self._loss(output, part)
        if self._checks_weights and sums[0].requires_grad:
            self._checks_weights = False
            refuse_own_weights(sums[0], tensors_of(output), self._parallel, part.rows)
        return sums

    def output(self, batch: Batch) -> Any:
        """Return the model's output for this rank's part of a micro-batch, without a pipeline."""
        part, positions = self._part(batch)
        with self._drawing(part, positions) as forward:
            output = self._forward(part)
            forward.end()
        return output

    def _part(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Return this rank's part of a micro-batch, and the sequence positions of its activations."""
        positions = self._positions(batch)
        return split_sequence(batch.to(self._grid.device), self._grid), positions

    def _drawing(self, part: Batch, positions: Tensor | None) -> Forward:
        return self._parallel.draws.forward(self._parallel.module, part.samples, positions)

    def _forward(self, part: Batch) -> Any:
        """Return the model's output for this rank's part of a micro-batch."""
        module = self._parallel.module
        try:
            return module(*part.inputs, **part.keywords)
        except Exception as error:
            if doubles(part) or explained(error, self._plan) is not None:
                raise  # explained further up
            told = forward_error(error, module, part.inputs, part.keywords, part.samples.tolist())
            if told is None:
                raise
            raise told from error

    def _positions(self, batch: Batch) -> Tensor | None:
        """Return the sequence positions of the activations that this rank holds; None for all."""
        positions = residual_positions(batch, self._plan, self._grid.rank)
        return None if positions is None else positions.to(self._grid.device)

    def _pipelined(
        self, batches: list[Batch], factor: float, loss: Loss, *, backward: bool
    ) -> tuple[Tensor, Tensor]:
        """Return sums as `__call__` does; `loss` gives `factor` times those of a micro-batch."""
        pipeline = self._parallel.pipeline
        assert pipeline is not None
        stacked = self._stacked(batches)
        positions = self._positions(stacked)
        whole = split_sequence(stacked.to(self._grid.device), self._grid)
        run = pipeline.run if backward else pipeline.evaluate
        scaled = run(whole, positions, len(batches), loss)
        if backward:
            self._parallel.ties.sum_gradients()
        return self._counted(scaled.double() / factor, (whole.targets != IGNORED).sum())

    def _stacked(self, batches: list[Batch]) -> Batch:
        """Stack the micro-batches of a schedule at equal size; padding has no targets, so no gradient.

        Checks before the first step may have more rows than the plan's.
        """
        return stack_rows(batches, max(self._plan.micro_batch, *(batch.rows for batch in batches)))

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._grid.device)

    def _counted(self, loss_sum: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._grid.counts_loss:
            return loss_sum, targets
        return torch.zeros_like(loss_sum), torch.zeros_like(targets)
