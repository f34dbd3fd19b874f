"""End of an optimizer step: all-reduce of its sums over the world, normalisation, clipping, update.

All numbers on which ranks must agree per step travel in one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_part
from wanma.job.errors import WanmaError
from wanma.job.sections.job import TrainSection
from wanma.parallel.gradients.gradient_hooks import GradientHooks
from wanma.parallel.gradients.gradient_norm import squared_norm_share
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import Updater
from wanma.training.sites.delayed_gradients import Summed

_NAMED = 5
"""Largest number of samples named in one message."""


@dataclass(frozen=True)
class Agreement:
    """Numbers of a step that all ranks agree on after its backward."""

    loss: float
    """Mean loss over the global batch's targets."""
    targets: float
    gradient_norm: float
    """Norm of the mean loss's gradient before clipping; infinite where fp16's loss scale is too large."""
    correction: float
    """Factor from the gradients as they stand to the gradient of the mean loss."""
    stop: bool
    """True if some rank was asked to end the run in order."""
    pause: bool = False
    """True if some rank was asked to suspend, for a resize that continues from this step."""
    shared: tuple[float, ...] = ()
    """Sums over the ranks of the further numbers that each gave."""
    site_norm: float | None = None
    """Norm of the gradient that this rank's site takes; None: the same as `gradient_norm`.

    Where sites take different gradients, `gradient_norm` is the mean over them.
    """
    site_targets: tuple[float, ...] = ()
    """Number of targets of every site."""
    has_gradients: bool = True
    """True if the gradients of the update have arrived; false while they are still on their way."""

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
    summed: Summed | None = None,
    scale: LossScale | None = None,
) -> Agreement:
    """Sum the ranks' numbers of a step.

    Each site has its place in them, so that one message contains the totals and each site's own part.

    Args:
        loss_sum: sum of this rank's losses; zero on ranks that do not count.
        targets: their number; zero likewise.
        stop: true if this rank was asked to end the run.
        updater: optimizer of this rank's parameters.
        grid: device meshes of the plan.
        step: step, counted from 1.
        factor: ratio of the gradients to those of the summed losses.
        pause: true if this rank was asked to suspend.
        shared: more numbers to add up; as many on every rank.
        summed: normalisation of gradients summed over all sites; None: they are of this step and site.
        scale: scale of the loss, which may be too large for the gradients.

    Raises:
        WanmaError: nothing in the batch has a target; every rank raises the same message.
    """
    share = squared_norm_share(updater.counted_gradients(), grid.plan).to(grid.device)
    sites = grid.plan.sites
    by_site = torch.zeros(2, sites, dtype=torch.float64, device=grid.device)
    by_site[:, grid.site] = torch.stack([share, targets.double()])
    numbers = torch.cat(
        [
            by_site.view(-1),
            loss_sum.detach().double().view(1),
            torch.tensor([float(stop), float(pause), *shared], dtype=torch.float64, device=grid.device),
        ]
    )
    if grid.plan.world_size > 1:
        dist.all_reduce(numbers)
    given = numbers.tolist()
    squares, counts = given[:sites], given[sites : 2 * sites]
    total_loss, stops, pauses, *others = given[2 * sites :]
    total_targets = sum(counts)
    if total_targets == 0:
        raise WanmaError(
            f"step {step}: no sample of the global batch has a target to learn from",
            "every target is masked: check the data's targets",
        )
    if summed is None:
        corrections = [1.0 / (count * factor) if count else 0.0 for count in counts]
    else:
        of = total_targets if summed.targets is None else summed.targets
        corrections = [1.0 / (of * summed.factor) if of else 0.0] * sites
    norms = [math.sqrt(square) * one for square, one in zip(squares, corrections, strict=True)]
    if scale is not None and scale.enabled and scale.is_too_large_for(_largest(updater, grid)):
        norms = [math.inf] * sites
    mean = sum(norm * count for norm, count in zip(norms, counts, strict=True)) / total_targets
    return Agreement(
        loss=total_loss / total_targets,
        targets=total_targets,
        gradient_norm=mean if sites > 1 else norms[0],
        correction=corrections[grid.site],
        stop=stops > 0,
        pause=pauses > 0,
        shared=tuple(others),
        site_norm=norms[grid.site],
        site_targets=tuple(counts),
        has_gradients=summed is None or summed.targets != 0,
    )


def call_hooks(hooks: GradientHooks, updater: Updater, targets: Tensor, grid: Grid, factor: float) -> None:
    """Call users' hooks with the step's gradients, before `agree`; every rank calls it.

    Args:
        hooks: users' hooks on parameters.
        updater: optimizer of this rank's parameters.
        targets: number of this rank's targets, as in `agree`.
        grid: device meshes of the plan.
        factor: ratio of the gradients to those of the summed losses, as in `agree`.
    """
    hooks.collect(updater.parameters)
    if not hooks:
        return
    count = targets.detach().double().clone()
    if grid.plan.world_size > 1:
        dist.all_reduce(count)
    if count > 0:
        hooks.call(updater.parameters, 1.0 / (float(count) * factor), grid.device)


def _largest(updater: Updater, grid: Grid) -> float:
    """Return the magnitude of the largest element of the gradients of all ranks."""
    largest = torch.zeros((), device=grid.device)
    gradients = [local_part(gradient) for gradient in updater.gradients()]
    if held := [gradient for gradient in gradients if gradient.numel() > 0]:
        largest = torch.stack(torch._foreach_norm(held, math.inf)).max().to(largest)
    if grid.plan.world_size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def agree_again(agreement: Agreement, updater: Updater, grid: Grid, summed: Summed) -> Agreement:
    """Return the numbers for more gradients in the same step, which all sites share.

    Args:
        agreement: numbers of the step.
        updater: optimizer of this rank's parameters.
        grid: device meshes of the plan.
        summed: normalisation of the gradients.
    """
    square = squared_norm_share(updater.counted_gradients(), grid.plan).to(grid.device)
    if grid.plan.world_size > 1:
        dist.all_reduce(square)
    of = agreement.targets if summed.targets is None else summed.targets
    correction = 1.0 / (of * summed.factor)
    norm = math.sqrt(float(square) / grid.plan.sites) * correction
    return replace(agreement, gradient_norm=norm, site_norm=norm, correction=correction, has_gradients=True)


def apply_update(
    agreement: Agreement,
    updater: Updater,
    train: TrainSection,
    rate: float,
    scale: LossScale,
    left_out: bool = False,
) -> bool:
    """Clip the gradients and update the weights.

    Args:
        agreement: numbers of the step.
        updater: optimizer of this rank's parameters.
        train: `[train]` of the job.
        rate: learning rate of the step.
        scale: loss scale, which follows overflows.
        left_out: true if the weights are to stay as they are.

    Returns:
        False when they do, or the gradient is not finite: the step was skipped. True also where there is no
            gradient yet to take.
    """
    if not agreement.is_finite:
        scale.overflowed()
    if left_out or not agreement.is_finite:
        updater.zero_gradients()
        return False
    if not agreement.has_gradients:
        return True
    factor = agreement.correction
    if train.gradient_clip > 0:
        norm = agreement.gradient_norm if agreement.site_norm is None else agreement.site_norm
        factor *= min(1.0, train.gradient_clip / (norm + 1e-6))
    gradients = [local_part(gradient) for gradient in updater.gradients()]
    if gradients and not math.isclose(factor, 1.0, rel_tol=1e-15):
        torch._foreach_mul_(gradients, factor)
    updater.step(rate)
    updater.zero_gradients()
    scale.succeeded()
    return True


def what_is_not_finite(
    agreement: Agreement, loss_sum: Tensor, updater: Updater, grid: Grid, broken: list[str]
) -> str:
    """Return a text that names the ranks whose loss, or else whose gradient, is not finite.

    The reduction has already spread a broken gradient to every rank that shares the parameter, so the loss,
    which is still local, is the better witness. Every rank calls it.

    Args:
        agreement: numbers of the step.
        loss_sum: sum of this rank's losses, as in `agree`.
        updater: optimizer of this rank's parameters.
        grid: device meshes of the plan.
        broken: names of this rank's samples that are not finite themselves.
    """
    share = squared_norm_share(updater.counted_gradients(), grid.plan)
    mine = (not bool(torch.isfinite(loss_sum)), not bool(torch.isfinite(share)), broken)
    verdicts = [mine] * grid.plan.world_size
    if grid.plan.world_size > 1:
        dist.all_gather_object(verdicts, mine)
    by_loss = [rank for rank, (loss_broke, _, _) in enumerate(verdicts) if loss_broke]
    by_gradient = [rank for rank, (_, gradient_broke, _) in enumerate(verdicts) if gradient_broke]
    ranks = by_loss or by_gradient
    samples = list(dict.fromkeys(name for _, _, names in verdicts for name in names))
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    because = f"; {', '.join(samples[:_NAMED])}{more}: NaN or infinity in the data" if samples else ""
    return (
        f"the loss is {agreement.loss} and the gradient norm {agreement.gradient_norm}; "
        f"seen on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{because}"
    )
