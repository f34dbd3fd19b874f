"""Check of a user's own loop with one sample per micro-batch: the first step must have a gradient.

A loss that compares samples has nothing to compare a lone one with. Most then depend on nothing: a softmax
over one similarity is 1, and a mean over the batch is the sample itself. No other check sees it, because
there is no second row to exchange. By chance, hardly ever do all samples of a step have no gradient.
"""

from __future__ import annotations

import math

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import JobError
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.training.checks.sample_coupling import any_rank, is_batch_split
from wanma.training.run.trainer import Trainer


def has_single_sample_micro_batches(trainer: Trainer) -> bool:
    """Return whether later steps compute their samples one at a time."""
    plan, samples = trainer.plan, trainer.job.train.global_batch
    return (
        is_batch_split(trainer)
        and math.ceil(plan.max_rows_per_data_rank(samples) / plan.gradient_accumulation_steps(samples)) == 1
    )


def refuse_zero_gradients(trainer: Trainer, gatherer: GlobalBatchGatherer) -> None:
    """Check the gradients after the last backward of the first step; every rank calls it.

    Raises:
        JobError: no rank has a gradient other than zero.
    """
    gradients = (parameter.grad for parameter in trainer.state.named_optimizer.parameters.values())
    has_gradient = any(bool(local_tensor(gradient).any()) for gradient in gradients if gradient is not None)
    if any_rank(has_gradient or gatherer.is_used, trainer):
        return
    raise JobError(
        "no loss of the first step depends on the weights: each loss was computed from one sample "
        f"(parallel.micro_batch = {trainer.plan.micro_batch}), without other samples to compare it with",
        "gather all samples in the loss with wanma.global_batch (docs/guides/losses.md), or train on one "
        f"rank with parallel.micro_batch = {trainer.job.train.global_batch}; if the loss needs one sample "
        "only, check that it depends on the output of the model",
    )
