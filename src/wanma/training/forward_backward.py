"""Forward and backward of one step's micro-batches; gradients end as sums over this rank's samples."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import IGNORED, Batch, stack_rows
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.models.dropout import keyed_samples
from wanma.parallel.mesh import Grid
from wanma.parallel.parallelize import Parallel
from wanma.parallel.shard import begin_micro_batch, reshard
from wanma.training.cross_entropy import cross_entropy_sum
from wanma.training.loss import LossFunction

_EVALUATED_TOGETHER = 4
"""Micro-batches per stage in one run of an evaluating pipeline: its bubble is a fifth of the time."""


class ForwardBackward:
    """Runs a step's micro-batches through the model, pipelined or one after the other."""

    def __init__(self, parallel: Parallel, job: Job, plan: Plan, grid: Grid, loss: LossFunction) -> None:
        self._parallel = parallel
        self._plan = plan
        self._grid = grid
        self._loss = loss
        self._seed = job.train.seed

    def __call__(self, batches: list[Batch], factor: float) -> tuple[Tensor, Tensor]:
        """Add this rank's gradients of (sum of losses × `factor`).

        Returns:
            (sum of losses, number of targets), both zero where another rank counts the same loss.
        """
        if self._parallel.pipeline is not None:
            return self._pipelined(batches, factor, backward=True)
        loss_sum, targets = self._zero(), self._zero()
        for index, batch in enumerate(batches):
            begin_micro_batch(self._parallel.module, self._plan, last=index == len(batches) - 1)
            batch = batch.to(self._grid.device)
            batch_loss, batch_targets = self._loss(self._forward(batch), batch)
            (batch_loss * factor).backward()
            loss_sum += batch_loss.detach()
            targets += batch_targets
        return self._counted(loss_sum, targets)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """Without gradients.

        Returns:
            (sum of losses, number of targets, number of right classes where targets are classes of
            whole samples), counted as above.
        """
        loss_sum, targets, right = self._zero(), self._zero(), self._zero()
        if self._parallel.pipeline is not None:
            remaining = iter(batches)
            # A schedule keeps what all its micro-batches put out until its end: a few at a time.
            while some := list(islice(remaining, _EVALUATED_TOGETHER * self._plan.pp)):
                some_loss, some_targets = self._pipelined(some, 1.0, backward=False)
                loss_sum += some_loss
                targets += some_targets
            reshard(self._parallel.module)
            return loss_sum, targets, right
        with torch.no_grad():
            for batch in batches:
                batch = batch.to(self._grid.device)
                output = self._forward(batch)
                batch_loss, batch_targets = self._loss(output, batch)
                loss_sum += batch_loss
                targets += batch_targets
                if batch.targets.ndim == 1 and not batch.targets.is_floating_point():
                    right += (output.argmax(dim=-1) == batch.targets).sum()
        reshard(self._parallel.module)
        return *self._counted(loss_sum, targets), right if self._grid.counts_loss else self._zero()

    def _forward(self, batch: Batch) -> Any:
        module: nn.Module = self._parallel.module
        with keyed_samples(module, self._seed, batch.samples):
            return module(*batch.inputs, **batch.keywords)

    def _pipelined(self, batches: list[Batch], factor: float, backward: bool) -> tuple[Tensor, Tensor]:
        pipeline = self._parallel.pipeline
        assert pipeline is not None
        # A schedule wants equal micro-batches; padding rows have no targets and so no gradient.
        whole = stack_rows(batches, self._plan.micro_batch).to(self._grid.device)
        run = pipeline.run if backward else pipeline.evaluate
        scaled = run(whole, len(batches), self._seed, lambda out, to: cross_entropy_sum(out, to) * factor)
        return self._counted(scaled.double() / factor, (whole.targets != IGNORED).sum())

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._grid.device)

    def _counted(self, loss_sum: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._grid.counts_loss:
            return loss_sum, targets
        return torch.zeros_like(loss_sum), torch.zeros_like(targets)
