"""The end of an optimizer step: agree on sums over the world, divide once, clip, update or refuse.

All that ranks must agree on per step travels in one all-reduce of a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.checkpoint.shards import local_part
from wanma.job.errors import WanmaError
from wanma.job.sections import TrainSection
from wanma.parallel.mesh import Grid
from wanma.parallel.norm import squared_norm_share
from wanma.training.optimizer import Updater
from wanma.training.precision import LossScale


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a step after its backward."""

    loss: float
    """Mean over the global batch's targets."""
    targets: int
    gradient_norm: float
    """Of the mean loss's gradient, before clipping."""
    correction: float
    """Factor from the gradients as they stand to the mean loss's gradient."""
    stop: bool
    """Some rank was asked to end the run in order."""
    pause: bool = False
    """Some rank was asked to leave, for others go on from where it is."""
    shared: tuple[float, ...] = ()
    """Sums over the ranks of what each gave beside that."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def agree(
    loss_sum: Tensor,
    targets: Tensor,
    stop: bool,
    updater: Updater,
    grid: Grid,
    *,
    step: int,
    factor: float,
    pause: bool = False,
    shared: Sequence[float] = (),
) -> Agreement:
    """Add up the ranks' sums.

    Args:
        loss_sum: sum of this rank's losses; zero on ranks that do not count.
        targets: their number; zero likewise.
        stop, pause: whether this rank was asked to.
        factor: how many times the gradient of the summed losses the gradients are.
        shared: more numbers to add up; as many on every rank.

    Raises:
        WanmaError: nothing in the batch has a target; every rank raises the same message.
    """
    share = squared_norm_share(updater.counted_gradients(), grid.plan).to(grid.device)
    numbers = torch.stack(
        [
            share,
            loss_sum.detach().double(),
            targets.double(),
            *torch.tensor([float(stop), float(pause), *shared], dtype=torch.float64, device=grid.device),
        ]
    )
    if grid.plan.world_size > 1:
        dist.all_reduce(numbers)
    squared, total_loss, total_targets, stops, pauses, *others = numbers.tolist()
    if total_targets == 0:
        raise WanmaError(
            f"step {step}: no sample of the global batch has a target to learn from",
            "every target is masked: check the data's targets",
        )
    correction = 1.0 / (total_targets * factor)
    return Agreement(
        loss=total_loss / total_targets,
        targets=int(total_targets),
        gradient_norm=math.sqrt(squared) * correction,
        correction=correction,
        stop=stops > 0,
        pause=pauses > 0,
        shared=tuple(others),
    )


def apply_update(
    agreement: Agreement,
    updater: Updater,
    train: TrainSection,
    rate: float,
    scale: LossScale,
    left_out: bool = False,
) -> bool:
    """Clip and update the weights.

    Args:
        left_out: the weights are to stay as they are.

    Returns:
        False when they do, or the gradient is not finite: the step was skipped.
    """
    if not agreement.is_finite:
        scale.overflowed()
    if left_out or not agreement.is_finite:
        updater.zero_gradients()
        return False
    factor = agreement.correction
    if train.gradient_clip > 0:
        factor *= min(1.0, train.gradient_clip / (agreement.gradient_norm + 1e-6))
    gradients = [local_part(gradient) for gradient in updater.gradients()]
    if gradients and not math.isclose(factor, 1.0, rel_tol=1e-15):
        torch._foreach_mul_(gradients, factor)
    updater.step(rate)
    updater.zero_gradients()
    scale.succeeded()
    return True


def what_is_not_finite(agreement: Agreement, loss_sum: Tensor, updater: Updater, grid: Grid) -> str:
    """Says it, and names the ranks at fault: those whose own loss broke, else those whose own gradient did.

    The reduction has already spread a broken gradient to every rank that shares the parameter, so
    the loss, which is still local, is the better witness. Every rank calls it.

    Args:
        loss_sum: of this rank, as `agree` had it.
    """
    share = squared_norm_share(updater.counted_gradients(), grid.plan)
    mine = (not bool(torch.isfinite(loss_sum)), not bool(torch.isfinite(share)))
    verdicts = [mine] * grid.plan.world_size
    if grid.plan.world_size > 1:
        dist.all_gather_object(verdicts, mine)
    by_loss = [rank for rank, (loss_broke, _) in enumerate(verdicts) if loss_broke]
    by_gradient = [rank for rank, (_, gradient_broke) in enumerate(verdicts) if gradient_broke]
    ranks = by_loss or by_gradient
    return (
        f"the loss is {agreement.loss} and the gradient norm {agreement.gradient_norm}; "
        f"seen on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    )
