"""Training loop of a job: next batch, forward-backward, finish the step, perhaps validate and save."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.step_loader import StepLoader
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.parallel.embedding.row_prefetch import begin_step
from wanma.training.checks.state_restoration import preserve_state
from wanma.training.loss.best_metric import best_value
from wanma.training.run.shared_reading import share_reading
from wanma.training.run.trainer import Trainer
from wanma.training.step.forward_backward import ForwardBackward
from wanma.training.step.parameter_update import StepTotals

EvaluateFunction = Callable[[Iterable[Batch]], tuple[Tensor, ...]]
"""Function over this rank's batches, without gradients, that returns sums.

(sum of losses, targets), then sum and count of each metric.
"""


def run_training_loop(
    trainer: Trainer, data: BatchedDataset, forward_backward: ForwardBackward, gatherer: GlobalBatchGatherer
) -> str:
    """Train from the trainer's position to the end of the job.

    Args:
        trainer: this rank's run.
        data: samples of the job.
        forward_backward: forward and backward of a step.
        gatherer: gatherer for losses that see the entire global batch.

    Returns:
        "finished", or "interrupted" when an orderly stop was asked for, which both leave a checkpoint; or
            "paused", when a resize continues from here at once.
    """
    job, state, phases = trainer.job, trainer.state, trainer.phases
    progress = trainer.worker.supervisor_client.report_progress
    outcome = "finished"
    names = forward_backward.metrics.names
    measure = partial(validate, trainer, data, forward_backward.evaluate, gatherer, lambda: names)
    loader = StepLoader.of_job(job, data, trainer.plan, trainer.parallel_mesh.data_rank, state.step)
    with share_reading(trainer, data, couples_rows=gatherer.is_used), loader, phases.phase("host"):
        batches = iter(loader)
        while not state.is_over(job.train):
            progress(state.step, "waiting for data")
            with phases.phase("data"):
                step = next(batches)
                begin_step(state.parallel_model.embeddings, step, loader.peek)
            trainer.step_data.begin(data, step)
            progress(state.step, "forward and backward")
            state.parallel_model.random_draws.step = state.step
            with (
                phases.phase("forward_backward"),
                state.parallel_model.compute_timer.measure_step(),
                gatherer.provide(trainer.plan, step.global_batch_size),
            ):
                loss_sum, targets = forward_backward(
                    step.micro_batches, trainer.loss_multiplier(step.global_batch_size)
                )
            progress(state.step, "update")
            agreement = trainer.finish_step(loss_sum, targets, step.global_batch_size)
            is_saved = run_step_tasks(trainer, agreement, measure, keeps_last_state=True)
            loader.switch_plan(trainer.plan)
            if agreement.is_drain_requested and not state.is_over(job.train):
                outcome = "interrupted"
                break
            if agreement.is_suspend_requested and not state.is_over(job.train):
                trainer.suspend(is_saved)
                return "paused"
    trainer.finish(outcome)
    if trainer.worker.local_rank == 0:  # each host has its own rates, by which it plans
        data.record_rates(f"run {trainer.worker.run_directory.name}")
    return outcome


def run_step_tasks(
    trainer: Trainer,
    totals: StepTotals,
    run_validation: Callable[[], float | None],
    *,
    keeps_last_state: bool = False,
) -> bool:
    """Validate and save where the job says so, and record the step that was just finished.

    Args:
        trainer: this rank's run.
        totals: numbers of the step.
        run_validation: validates, and returns the metric by which checkpoints are compared, if there is one.
        keeps_last_state: true if nothing changes the state after the last step; a user's loop may.

    Returns:
        True if the state was saved.
    """
    job, step = trainer.job, trainer.state.step
    last = step == job.train.steps or totals.is_drain_requested
    if last:
        trainer.worker.supervisor_client.report_drain(step)
    metric = None
    if _is_due(step, job.train.validate_every_steps) or (last and not totals.is_drain_requested):
        metric = run_validation()
    if trainer.state.early_stopping.is_over(job.train) and not last:
        trainer.worker.supervisor_client.report_drain(step)
        last = True
    saves = _is_due(step, job.checkpoint.every_steps) or last
    if saves:
        trainer.save(metric, is_final=last and keeps_last_state)
    trainer.record_step(totals)
    trainer.profiler.after_step(step)
    return saves


def validate(
    trainer: Trainer,
    data: BatchedDataset,
    evaluate: EvaluateFunction,
    gatherer: GlobalBatchGatherer,
    metric_names: Callable[[], Sequence[str]],
) -> float | None:
    """Compute the mean loss over the job's fixed validation samples, and the metrics.

    The averaged weights are evaluated where there are any, or those that all sites share.

    Args:
        trainer: this rank's run.
        data: samples of the job.
        evaluate: function that evaluates this rank's batches.
        gatherer: gatherer for losses that see the entire global batch.
        metric_names: returns the names of the metrics; called when they have been computed.

    Returns:
        the metric by which checkpoints are compared; None: the data has no validation part, or no sample of
            it counts for that metric.

    Raises:
        JobError: validation gives no metric of that name.
    """
    count = min(trainer.job.train.validation_samples, data.validation_samples)
    if count == 0:
        return None
    with (
        trainer.phases.phase("validation"),
        _evaluation_mode(trainer.state.parallel_model.model_parts),
        trainer.state.use_evaluation_weights(),
        closing(_validation_batches(trainer, data, count, gatherer)) as batches,
    ):
        numbers = torch.stack(evaluate(batches))
        if trainer.plan.world_size > 1:
            dist.all_reduce(numbers)
    loss_sum, targets, *sums = numbers.tolist()
    loss = loss_sum / targets if targets else None
    values = {"loss": loss}
    if data.input_kind == "tokens":
        values["perplexity"] = None if loss is None else math.exp(min(loss, 700.0))
    for name, total, weight in zip(metric_names(), sums[::2], sums[1::2], strict=True):
        values[name] = total / weight if weight else None
    trainer.record_validation(values, int(targets))
    return best_value(trainer.job.checkpoint, values)


def try_metrics(
    trainer: Trainer, data: BatchedDataset, forward_backward: ForwardBackward, gatherer: GlobalBatchGatherer
) -> None:
    """Compute the user's metrics of a few validation samples, before the first step; nothing of it stays.

    Raises:
        WanmaError: one fails, or depends on which samples are in a batch together.
    """
    count = min(trainer.job.train.validation_samples, data.validation_samples)
    if count == 0 or trainer.state.is_over(trainer.job.train):
        return
    parts, metrics = trainer.state.parallel_model.model_parts, forward_backward.metrics
    batches = _validation_batches(trainer, data, count, gatherer)
    metrics.compares_halves = True
    with preserve_state(parts), _evaluation_mode(parts), closing(batches):
        forward_backward.evaluate(islice(batches, 1))
    metrics.compares_halves = False


@contextmanager
def _evaluation_mode(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode within the context; modules in that mode before stay there."""
    modes = {module: module.training for part in parts for module in part.modules()}
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for part in parts:
            part.train(modes[part])  # modules may do more there than note the mode
        for module, training in modes.items():
            module.training = training


def _validation_batches(
    trainer: Trainer, data: BatchedDataset, count: int, gatherer: GlobalBatchGatherer
) -> Generator[Batch, None, None]:
    """Yield this rank's rows of `count` validation samples.

    Where a global batch is one micro-batch, they are cut into global batches first: a loss that gathers them
    then compares the same samples on every layout.
    """
    plan, chunk = trainer.plan, trainer.job.train.global_batch
    if plan.pp > 1 or plan.gradient_accumulation_steps(chunk) > 1:
        chunk = count
    for start in range(0, count, chunk):
        samples = min(chunk, count - start)
        for run in plan.micro_batches(samples, trainer.parallel_mesh.data_rank):
            trainer.worker.supervisor_client.report_progress(
                trainer.state.step, "validation"
            )  # a long validation is no hang
            with gatherer.provide(plan, samples):
                yield data.validation_batch(range(start + run.start, start + run.stop))


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
