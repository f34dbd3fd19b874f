"""The loop of a whole job: next batch, forward-backward, finish the step, perhaps validate and save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist

from wanma.data.batch import Batch
from wanma.data.data import Data
from wanma.data.loader import Loader
from wanma.training.forward_backward import ForwardBackward
from wanma.training.trainer import Trainer


def run_loop(trainer: Trainer, data: Data, forward_backward: ForwardBackward) -> str:
    """Train from the trainer's position to the end of the job.

    Returns:
        "finished", or "interrupted" when an orderly stop was asked for; both leave a checkpoint.
    """
    job, state, phases = trainer.job, trainer.state, trainer.phases
    progress = trainer.worker.control.progress
    outcome = "finished"
    saved_at = state.step
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
        while state.step < job.train.steps:
            progress(state.step, "waiting for data")
            with phases.phase("data"):
                step = next(batches)
            progress(state.step, "forward and backward")
            with phases.phase("forward_backward"):
                loss_sum, targets = forward_backward(step.micro_batches, trainer.factor(step.global_batch))
            progress(state.step, "update")
            agreement = trainer.finish_step(loss_sum, targets, step.global_batch)

            last = state.step == job.train.steps or agreement.stop
            metric = None
            if _due(state.step, job.train.validate_every_steps) or (last and not agreement.stop):
                metric = validate(trainer, data, forward_backward)
            if _due(state.step, job.checkpoint.every_steps) or last:
                trainer.save(metric)
                saved_at = state.step
            trainer.record(agreement)
            if agreement.stop and state.step < job.train.steps:
                outcome = "interrupted"
                break
    assert saved_at == state.step
    trainer.finish(outcome)
    return outcome


def validate(trainer: Trainer, data: Data, forward_backward: ForwardBackward) -> float | None:
    """Mean loss over the job's fixed validation samples, with the averaged weights where there are any.

    Returns:
        the loss, or None when the data has no validation part.
    """
    count = min(trainer.job.train.validation_samples, data.validation_samples)
    if count == 0:
        return None
    parts = trainer.state.parallel.parts
    for part in parts:
        part.eval()
    rows = trainer.plan.micro_batches(count, trainer.grid.data_rank)
    average = trainer.state.average
    with trainer.phases.phase("validation"), average.in_place() if average else nullcontext():
        numbers = torch.stack(forward_backward.evaluate(_batches(trainer, data, rows)))
    for part in parts:
        part.train()
    if trainer.plan.world_size > 1:
        dist.all_reduce(numbers)
    loss_sum, targets, right = numbers.tolist()
    loss = float(loss_sum / max(targets, 1.0))
    metrics = {"perplexity": math.exp(min(loss, 700.0))} if data.kind == "tokens" else {}
    if data.kind == "images":
        metrics = {"accuracy": right / max(targets, 1.0)}
    trainer.validated(loss, int(targets), metrics)
    return loss


def _batches(trainer: Trainer, data: Data, rows: list[range]) -> Iterator[Batch]:
    for run in rows:
        trainer.worker.control.progress(trainer.state.step, "validation")  # it may be long, but it moves
        yield data.validation_batch(run)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
