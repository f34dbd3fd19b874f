"""Forward and backward of one step's micro-batches; gradients end as sums over this rank's samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, Batch, concatenate_padded
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.forward_draws import KeyedForward
from wanma.models.layers.router import TopKRouter, set_auxiliary_loss_scale
from wanma.models.user_modules.forward_error import forward_error
from wanma.parallel.context.sequence_shards import residual_positions, shard_sequence
from wanma.parallel.data_parallel.fsdp_errors import to_job_error
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel
from wanma.training.loss.foreign_weights import refuse_foreign_weights
from wanma.training.loss.loss_functions import CrossEntropy, LossFunction, class_range
from wanma.training.loss.model_outputs import output_tensors
from wanma.training.loss.transformers_labels import SampleClassificationLoss
from wanma.training.loss.validation_metrics import Metrics
from wanma.training.step.float64_errors import explain_float64_errors, float64_tensor_names

if TYPE_CHECKING:
    from wanma.parallel.pipeline.pipeline_runner import MicroBatchLoss

_EVALUATION_MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage in one run of an evaluating pipeline: its bubble is a fifth of the time."""


class ForwardBackward:
    """Runner of a step's micro-batches through the model, pipelined or one after the other."""

    def __init__(
        self,
        parallel_model: ParallelModel,
        plan: Plan,
        parallel_mesh: ParallelMesh,
        loss: LossFunction,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics({})
        """Metrics that `evaluate` computes beside the loss."""
        self._parallel_model = parallel_model
        self._plan = plan
        self._parallel_mesh = parallel_mesh
        self._loss = loss
        self._check_foreign_weights = not isinstance(loss, CrossEntropy | SampleClassificationLoss)
        """True if the loss is the user's, and has had no gradient yet."""
        known = loss if isinstance(loss, CrossEntropy) else CrossEntropy(classes_last=True)
        self._pipeline_loss = replace(known, overwrite_logits=True)
        """Cross entropy of a pipeline, whose logits are not read afterwards."""
        self._routers = [module for module in parallel_model.modules() if isinstance(module, TopKRouter)]

    def __call__(self, batches: list[Batch], loss_multiplier: float) -> tuple[Tensor, Tensor]:
        """Add this rank's gradients of (sum of losses × `loss_multiplier`).

        Returns:
            (sum of losses, number of targets), both zero where another rank counts the same loss.
        """
        set_auxiliary_loss_scale(self._routers, loss_multiplier)
        if self._parallel_model.pipeline is not None:
            classes = class_range(batches)

            def scaled(output: Tensor, targets: Tensor) -> Tensor:
                return self._pipeline_loss.sum(output, targets, classes) * loss_multiplier

            return self._run_pipeline(batches, loss_multiplier, scaled, backward=True)
        loss_sum, targets = self._zero_scalar(), self._zero_scalar()
        clock = self._parallel_model.compute_timer
        for index, batch in enumerate(batches):
            self._parallel_model.begin_micro_batch(is_last=index == len(batches) - 1)
            clock.start()
            part, positions = self._local_part(batch)
            with (
                explain_float64_errors(batch, self._plan.precision),
                self._sample_context(part, positions) as forward,
            ):
                batch_loss, batch_targets = self._losses(part)
                if not batch_loss.requires_grad:
                    raise WanmaError(
                        "the loss has no gradient: it depends on no trainable parameter",
                        "set requires_grad = True on the parameters to train, and do not detach the output",
                    )
                forward.end_forward()
                clock.stop(is_forward=True)
                clock.start()
                (batch_loss * loss_multiplier).backward()
            clock.stop(is_forward=False)
            loss_sum += batch_loss.detach()
            targets += batch_targets
        self._parallel_model.finalize_gradients()
        return self._mask_duplicate_losses(loss_sum, targets)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[Tensor, ...]:
        """Evaluate batches without gradients.

        Returns:
            (sum of losses, number of targets, and the sum and count of each metric), counted as in
                `__call__`.
        """
        sums = self.evaluate_losses(batches, self.metrics)
        return *sums, *self.metrics.sums(
            self._parallel_mesh.device, contributes=self._parallel_mesh.contributes_loss
        )

    def evaluate_losses(
        self, batches: Iterable[Batch], metrics: Metrics | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) without gradients, counted as in `__call__`.

        Args:
            batches: micro-batches of this rank.
            metrics: metrics to which the values of the batches are added.
        """
        loss_sum, targets, metrics = self._zero_scalar(), self._zero_scalar(), metrics or Metrics({})
        metrics.reset()
        if self._parallel_model.pipeline is not None:
            remaining = iter(batches)
            # A schedule keeps what all its micro-batches put out until its end: a few at a time.
            while chunk := list(islice(remaining, _EVALUATION_MICRO_BATCHES_PER_STAGE * self._plan.pp)):
                is_real = iter(self._stacked(chunk).real.to(self._parallel_mesh.device).chunk(len(chunk)))
                dtypes = iter([batch.targets.dtype for batch in chunk])

                def loss(
                    output: Tensor,
                    targets: Tensor,
                    is_real: Iterator[Tensor] = is_real,
                    dtypes: Iterator[torch.dtype] = dtypes,
                ) -> Tensor:
                    metrics.add(output, targets.to(next(dtypes)), next(is_real))
                    return self._pipeline_loss.sum(output, targets)

                chunk_loss, chunk_targets = self._run_pipeline(chunk, 1.0, loss, backward=False)
                loss_sum += chunk_loss
                targets += chunk_targets
        else:
            with torch.no_grad():
                for batch in batches:
                    part, positions = self._local_part(batch)
                    with self._sample_context(part, positions) as forward:
                        output = self._forward(part)
                        batch_loss, batch_targets = self._loss(output, part)
                        forward.end_forward()
                    loss_sum += batch_loss
                    targets += batch_targets
                    metrics.add(output, part.given_targets, part.real)
        self._parallel_model.reshard()
        self._parallel_model.wait_until_weights_unused()
        return self._mask_duplicate_losses(loss_sum, targets)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, target count) of this rank's part of a micro-batch, without a pipeline."""
        part, positions = self._local_part(batch)
        with self._sample_context(part, positions) as forward:
            sums = self._losses(part)
            forward.end_forward()
        return sums

    def _losses(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) of a part.

        It is a function of its own: a caller that held the logits would hold them until backward has ended,
        and through the next forward.
        """
        output = self._forward(part)
        sums = self._loss(output, part)
        if self._check_foreign_weights and sums[0].requires_grad:
            self._check_foreign_weights = False
            refuse_foreign_weights(sums[0], output_tensors(output), self._parallel_model, part.rows)
        return sums

    def output(self, batch: Batch) -> Any:
        """Return the model's output for this rank's part of a micro-batch, without a pipeline."""
        part, positions = self._local_part(batch)
        with self._sample_context(part, positions) as forward:
            output = self._forward(part)
            forward.end_forward()
        return output

    def _local_part(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Return this rank's part of a micro-batch, and the sequence positions of its activations."""
        positions = self._positions(batch)
        return shard_sequence(batch.to(self._parallel_mesh.device), self._parallel_mesh), positions

    def _sample_context(self, part: Batch, positions: Tensor | None) -> KeyedForward:
        return self._parallel_model.random_draws.forward(self._parallel_model.module, part.samples, positions)

    def _forward(self, part: Batch) -> Any:
        """Return the model's output for this rank's part of a micro-batch."""
        module = self._parallel_model.module
        try:
            return module(*part.inputs, **part.keywords)
        except Exception as error:
            if float64_tensor_names(part) or to_job_error(error, self._plan) is not None:
                raise  # explained further up
            user_error = forward_error(error, module, part.inputs, part.keywords, part.samples.tolist())
            if user_error is None:
                raise
            raise user_error from error

    def _positions(self, batch: Batch) -> Tensor | None:
        """Return the sequence positions of the activations that this rank holds; None for all."""
        positions = residual_positions(batch, self._plan, self._parallel_mesh.rank)
        return None if positions is None else positions.to(self._parallel_mesh.device)

    def _run_pipeline(
        self, batches: list[Batch], loss_multiplier: float, loss: MicroBatchLoss, *, backward: bool
    ) -> tuple[Tensor, Tensor]:
        """Return sums as `__call__` does; `loss` gives `loss_multiplier` times those of a micro-batch."""
        pipeline = self._parallel_model.pipeline
        assert pipeline is not None
        stacked = self._stacked(batches)
        positions = self._positions(stacked)
        local_batch = shard_sequence(stacked.to(self._parallel_mesh.device), self._parallel_mesh)
        run = pipeline.forward_backward if backward else pipeline.evaluate
        scaled = run(local_batch, positions, len(batches), loss)
        if backward:
            with self._parallel_model.communication_timer.time_blocking_transfer("pipeline"):
                self._parallel_model.tied_weights.all_reduce_gradients()
        return self._mask_duplicate_losses(
            scaled.double() / loss_multiplier, (local_batch.targets != IGNORE_INDEX).sum()
        )

    def _stacked(self, batches: list[Batch]) -> Batch:
        """Stack the micro-batches of a schedule at equal size; padding has no targets, so no gradient.

        Checks before the first step may have more rows than the plan's.
        """
        return concatenate_padded(batches, max(self._plan.micro_batch, *(batch.rows for batch in batches)))

    def _zero_scalar(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._parallel_mesh.device)

    def _mask_duplicate_losses(self, loss_sum: Tensor, target_count: Tensor) -> tuple[Tensor, Tensor]:
        if self._parallel_mesh.contributes_loss:
            return loss_sum, target_count
        return torch.zeros_like(loss_sum), torch.zeros_like(target_count)
