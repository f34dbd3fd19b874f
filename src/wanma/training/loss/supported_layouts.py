"""Refusal of losses that pipelines or context parallelism cannot compute."""

from __future__ import annotations

from collections.abc import Callable

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan

_SUPPORTED_HINT = "dp_replicate, dp_shard and tp support any loss"


def refuse_unsupported_loss(
    plan: Plan, data: BatchedDataset, has_user_loss: bool, first_batch: Callable[[], Batch]
) -> None:
    """Refuse a user's own loss, or several targets, under a plan that cannot compute it.

    Args:
        plan: plan of the run.
        data: samples of the job.
        has_user_loss: true if the user has given a loss.
        first_batch: returns a batch of `data`; called where samples may have several targets.

    Raises:
        JobError: it names the mesh dimension, the reason and the way out.
    """
    if plan.pp == plan.cp == 1:
        return
    named = first_batch().named_targets if data.input_kind == "custom" else None
    keys = "" if named is None else f"the samples' target is a dict of {', '.join(named)}"
    if named is not None and plan.pp > 1:
        raise JobError(
            f"parallel.pp = {plan.pp}: {keys}, which needs a custom loss, but the last pipeline stage "
            "computes cross entropy of one target",
            f"set parallel.pp = 1 and use a custom loss ({_SUPPORTED_HINT}), or use one target",
        )
    if has_user_loss and plan.pp > 1:
        raise JobError(
            f"parallel.pp = {plan.pp}: a custom loss is not supported with a pipeline, which computes "
            "cross entropy",
            f"set parallel.pp = 1 ({_SUPPORTED_HINT}), or unset the loss",
        )
    if named is not None and plan.cp > 1:
        raise JobError(
            f"parallel.cp = {plan.cp}: {keys}, but a rank holds a part of each sequence: only a single "
            "target with one value per position can be split like it",
            f"set parallel.cp = 1 ({_SUPPORTED_HINT}), or use a single target with one value per position",
        )
