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

from wanma.data.batch import Batch, not_finite
from wanma.data.datasets.dataset import Data
from wanma.data.step_loader import Loader
from wanma.parallel.data_parallel.global_batch import GlobalBatch
from wanma.training.checks.state_restoration import undisturbed
from wanma.training.loss.best_metric import best_value
from wanma.training.run.trainer import Trainer
from wanma.training.step.forward_backward import ForwardBackward
from wanma.training.step.parameter_update import Agreement

Evaluate = Callable[[Iterable[Batch]], tuple[Tensor, ...]]
"""Function over this rank's batches, without gradients, that returns sums.

(sum of losses, targets), then sum and count of each metric.
"""


def run_loop(trainer: Trainer, data: Data, forward_backward: ForwardBackward, gathering: GlobalBatch) -> str:
    """Train from the trainer's position to the end of the job.

    Args:
        trainer: this rank's run.
        data: samples of the job.
        forward_backward: forward and backward of a step.
        gathering: gatherer for losses that see the entire global batch.

    Returns:
        "finished", or "interrupted" when an orderly stop was asked for, which both leave a checkpoint; or
            "paused", when a resize continues from here at once.
    """
    job, state, phases = trainer.job, trainer.state, trainer.phases
    progress = trainer.worker.control.progress
    outcome = "finished"
    names = forward_backward.metrics.names
    measure = partial(validate, trainer, data, forward_backward.evaluate, gathering, lambda: names)
    with Loader(
        data,
        trainer.plan,
        job.train,
        trainer.grid.data_rank,
        start_step=state.step,
        prefetch=job.data.prefetch,
        threads=job.data.workers,
        pin_memory=trainer.plan.device == "cuda",
    ) as loader:
        batches = iter(loader)
        while not state.is_over(job.train):
            progress(state.step, "waiting for data")
            with phases.phase("data"):
                step = next(batches)
            progress(state.step, "forward and backward")
            state.parallel.draws.step = state.step
            with (
                phases.phase("forward_backward"),
                state.parallel.clock.whole(),
                gathering.announced(trainer.plan, step.global_batch),
            ):
                loss_sum, targets = forward_backward(step.micro_batches, trainer.factor(step.global_batch))
            progress(state.step, "update")
            trainer.broken = partial(broken_samples, data, step.micro_batches)
            agreement = trainer.finish_step(loss_sum, targets, step.global_batch)
            is_saved = end_step(trainer, agreement, measure)
            loader.follow(trainer.plan)
            if agreement.stop and not state.is_over(job.train):
                outcome = "interrupted"
                break
            if agreement.pause and not state.is_over(job.train):
                trainer.pause(is_saved)
                return "paused"
    trainer.finish(outcome)
    return outcome


def broken_samples(data: Data, batches: Iterable[Batch]) -> list[str]:
    """Return the names of the samples that have a NaN or infinity among their inputs or targets."""
    return [data.sample_name(number) for batch in batches for number in not_finite(batch)]


def end_step(trainer: Trainer, agreement: Agreement, measure: Callable[[], float | None]) -> bool:
    """Validate and save where the job says so, and record the step that was just finished.

    Args:
        trainer: this rank's run.
        agreement: numbers of the step.
        measure: validates, and returns the metric by which checkpoints are compared, if there is one.

    Returns:
        True if the state was saved.
    """
    job, step = trainer.job, trainer.state.step
    last = step == job.train.steps or agreement.stop
    if last:
        trainer.worker.control.leaving(step)
    metric = None
    if _due(step, job.train.validate_every_steps) or (last and not agreement.stop):
        metric = measure()
    if trainer.state.stopping.is_over(job.train) and not last:
        trainer.worker.control.leaving(step)
        last = True
    saves = _due(step, job.checkpoint.every_steps) or last
    if saves:
        trainer.save(metric)
    trainer.record(agreement)
    return saves


def validate(
    trainer: Trainer,
    data: Data,
    evaluate: Evaluate,
    gathering: GlobalBatch,
    names: Callable[[], Sequence[str]],
) -> float | None:
    """Compute the mean loss over the job's fixed validation samples, and the metrics.

    The averaged weights are evaluated where there are any, or those that all sites share.

    Args:
        trainer: this rank's run.
        data: samples of the job.
        evaluate: function that evaluates this rank's batches.
        gathering: gatherer for losses that see the entire global batch.
        names: returns the names of the metrics; called when they have been computed.

    Returns:
        the metric by which checkpoints are compared, or None when the data has no validation part.

    Raises:
        JobError: validation gives no metric of that name.
    """
    count = min(trainer.job.train.validation_samples, data.validation_samples)
    if count == 0:
        return None
    with (
        trainer.phases.phase("validation"),
        _evaluating(trainer.state.parallel.parts),
        trainer.state.evaluating(),
        closing(_validation_batches(trainer, data, count, gathering)) as batches,
    ):
        numbers = torch.stack(evaluate(batches))
    if trainer.plan.world_size > 1:
        dist.all_reduce(numbers)
    loss_sum, targets, *sums = numbers.tolist()
    loss = float(loss_sum / targets) if targets else 0.0
    known = {"perplexity": math.exp(min(loss, 700.0))} if data.kind == "tokens" else {}
    pairs = zip(names(), sums[::2], sums[1::2], strict=True)
    metrics = {name: total / count for name, total, count in pairs if count}
    trainer.validated(loss, int(targets), known | metrics)
    return best_value(trainer.job.checkpoint, {"loss": loss, **known, **metrics})


def try_metrics(
    trainer: Trainer, data: Data, forward_backward: ForwardBackward, gathering: GlobalBatch
) -> None:
    """Compute the user's metrics of a few validation samples, before the first step; nothing of it stays.

    Raises:
        WanmaError: one fails, or depends on which samples are in a batch together.
    """
    count = min(trainer.job.train.validation_samples, data.validation_samples)
    if count == 0 or trainer.state.is_over(trainer.job.train):
        return
    parts, metrics = trainer.state.parallel.parts, forward_backward.metrics
    batches = _validation_batches(trainer, data, count, gathering)
    metrics.checks = True
    with undisturbed(parts), _evaluating(parts), closing(batches):
        forward_backward.evaluate(islice(batches, 1))
    metrics.checks = False


@contextmanager
def _evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode within the context; modules in that mode before stay there."""
    were = {module: module.training for part in parts for module in part.modules()}
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for part in parts:
            part.train(were[part])  # modules may do more there than note the mode
        for module, training in were.items():
            module.training = training


def _validation_batches(
    trainer: Trainer, data: Data, count: int, gathering: GlobalBatch
) -> Generator[Batch, None, None]:
    """Yield this rank's rows of `count` validation samples.

    Where a global batch is one micro-batch, they are cut into global batches first: a loss that gathers them
    then compares the same samples on every layout.
    """
    plan, whole = trainer.plan, trainer.job.train.global_batch
    if plan.pp > 1 or plan.accumulation(whole) > 1:
        whole = count
    for start in range(0, count, whole):
        samples = min(whole, count - start)
        for run in plan.micro_batches(samples, trainer.grid.data_rank):
            trainer.worker.control.progress(trainer.state.step, "validation")  # a long validation is no hang
            with gathering.announced(plan, samples):
                yield data.validation_batch(range(start + run.start, start + run.stop))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
