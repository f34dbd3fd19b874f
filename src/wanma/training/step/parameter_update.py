"""End of an optimizer step: all-reduce of its sums over the world, normalization, clipping, update.

All numbers on which ranks must agree per step travel in one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import WanmaError, first_names
from wanma.job.sections.train import TrainSection
from wanma.parallel.gradients.gradient_hooks import GradientHooks
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.torch_internals.operators import foreach_mul_, foreach_norm
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import NamedOptimizer
from wanma.training.sites.delayed_gradients import GradientNormalization

_MAX_NAMES_IN_MESSAGE = 5
"""Largest number of samples named in one message."""


@dataclass(frozen=True)
class StepTotals:
    """Numbers of a step that all ranks agree on after its backward."""

    loss: float
    """Mean loss over the global batch's targets; NaN without targets."""
    target_count: float
    gradient_norm: float
    """Norm of the mean loss's gradient before clipping; infinite where fp16's loss scale is too large."""
    gradient_multiplier: float
    """Factor from the gradients as they stand to the gradient of the mean loss."""
    is_drain_requested: bool
    """True if some rank was asked to end the run in order."""
    is_suspend_requested: bool = False
    """True if some rank was asked to suspend, for a resize that continues from this step."""
    extra_sums: tuple[float, ...] = ()
    """Sums over the ranks of the further numbers that each gave."""
    device_numbers: tuple[float, ...] = ()
    """Numbers that follow from the sums on the device."""
    site_gradient_norm: float | None = None
    """Norm of the gradient that this rank's site takes; None: the same as `gradient_norm`.

    Where sites take different gradients, `gradient_norm` is the mean over them.
    """
    site_target_counts: tuple[float, ...] = ()
    """Number of targets of every site."""
    has_gradients: bool = True
    """True if the gradients of the update have arrived; false while they are still on their way."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def reduce_step_totals(
    loss_sum: Tensor,
    target_count: Tensor,
    is_drain_requested: bool,
    named_optimizer: NamedOptimizer,
    parallel_mesh: ParallelMesh,
    *,
    step: int,
    effective_loss_multiplier: float,
    device_terms: Tensor,
    read_device_sums: Callable[[Tensor], Tensor],
    is_suspend_requested: bool = False,
    extra_terms: Sequence[float] = (),
    normalization: GradientNormalization | None = None,
    loss_scale: LossScale | None = None,
) -> StepTotals:
    """Sum the ranks' numbers of a step.

    Each site has its place in them, so that one message contains the totals and each site's own part.

    Args:
        loss_sum: sum of this rank's losses; zero on ranks that do not count.
        target_count: their number; zero likewise.
        is_drain_requested: true if this rank was asked to end the run.
        named_optimizer: optimizer of this rank's parameters.
        parallel_mesh: device meshes of the plan.
        step: step, counted from 1.
        effective_loss_multiplier: ratio of the gradients to those of the summed losses.
        device_terms: (terms,) float64 of the device, whose sums stay there; as many on every rank.
        read_device_sums: function from these sums to the numbers (numbers,) that the host reads.
        is_suspend_requested: true if this rank was asked to suspend.
        extra_terms: more numbers to add up; as many on every rank.
        normalization: normalization of gradients summed over all sites; None: they are of this step and site.
        loss_scale: scale of the loss, which may be too large for the gradients.

    Raises:
        WanmaError: no sample has a target, while gradients of earlier steps are due; the same on all ranks.
    """
    share = named_optimizer.squared_norm(parallel_mesh.plan).to(parallel_mesh.device)
    sites = parallel_mesh.plan.sites
    by_site = torch.zeros(2, sites, dtype=torch.float64, device=parallel_mesh.device)
    by_site[:, parallel_mesh.site] = torch.stack([share, target_count.double()])
    local_requests = [float(is_drain_requested), float(is_suspend_requested), *extra_terms]
    added = torch.tensor(local_requests, dtype=torch.float64, device=parallel_mesh.device)
    numbers = torch.cat([by_site.view(-1), loss_sum.detach().double().view(1), added, device_terms])
    if parallel_mesh.plan.world_size > 1:
        dist.all_reduce(numbers)
    read, device_sums = numbers.split([len(numbers) - len(device_terms), len(device_terms)])
    totals = torch.cat([read, read_device_sums(device_sums)]).tolist()  # the host waits once
    squares, counts = totals[:sites], totals[sites : 2 * sites]
    total_loss, drain_requests, suspend_requests, *extra_sums = totals[2 * sites : len(read)]
    total_targets = sum(counts)
    if total_targets == 0 and normalization is not None:
        raise WanmaError(
            f"step {step}: no sample of the global batch has a target, and sites exchange delayed gradients",
            "give the samples targets or remove them, or set parallel.synchronize = 'every_step'",
        )
    corrections = _gradient_multipliers(counts, effective_loss_multiplier, normalization)
    norms = [math.sqrt(square) * correction for square, correction in zip(squares, corrections, strict=True)]
    if (
        loss_scale is not None
        and loss_scale.enabled
        and loss_scale.is_too_large_for(_largest(named_optimizer, parallel_mesh))
    ):
        norms = [math.inf] * sites
    mean = sum(norm * count for norm, count in zip(norms, counts, strict=True)) / (total_targets or 1.0)
    return StepTotals(
        loss=total_loss / total_targets if total_targets else math.nan,
        target_count=total_targets,
        gradient_norm=mean if sites > 1 else norms[0],
        gradient_multiplier=corrections[parallel_mesh.site],
        is_drain_requested=drain_requests > 0,
        is_suspend_requested=suspend_requests > 0,
        extra_sums=tuple(extra_sums),
        device_numbers=tuple(totals[len(read) :]),
        site_gradient_norm=norms[parallel_mesh.site],
        site_target_counts=tuple(counts),
        has_gradients=normalization is None or normalization.target_count != 0,
    )


def _gradient_multipliers(
    counts: Sequence[float], effective_loss_multiplier: float, normalization: GradientNormalization | None
) -> list[float]:
    """Return each site's factor from its gradients to those of the mean loss, by the sites' target counts."""
    if normalization is None:
        return [1.0 / (count * effective_loss_multiplier) if count else 0.0 for count in counts]
    target_count = sum(counts) if normalization.target_count is None else normalization.target_count
    return [1.0 / (target_count * normalization.effective_loss_multiplier) if target_count else 0.0] * len(
        counts
    )


def call_gradient_hooks(
    hooks: GradientHooks,
    named_optimizer: NamedOptimizer,
    target_count: Tensor,
    parallel_mesh: ParallelMesh,
    effective_loss_multiplier: float,
) -> None:
    """Call users' hooks with the step's gradients, before `reduce_step_totals`; every rank calls it.

    Args:
        hooks: users' hooks on parameters.
        named_optimizer: optimizer of this rank's parameters.
        target_count: number of this rank's targets, as in `reduce_step_totals`.
        parallel_mesh: device meshes of the plan.
        effective_loss_multiplier: ratio of the gradients to those of the summed losses, as in
            `reduce_step_totals`.
    """
    hooks.collect(named_optimizer.parameters)
    if not hooks:
        return
    count = target_count.detach().double().clone()
    if parallel_mesh.plan.world_size > 1:
        dist.all_reduce(count)
    if count > 0:
        hooks.call(
            named_optimizer.parameters, 1.0 / (float(count) * effective_loss_multiplier), parallel_mesh.device
        )


def _largest(named_optimizer: NamedOptimizer, parallel_mesh: ParallelMesh) -> float:
    """Return the magnitude of the largest element of the gradients of all ranks."""
    largest = torch.zeros((), device=parallel_mesh.device)
    gradients = [local_tensor(gradient) for gradient in named_optimizer.gradients()]
    if non_empty := [gradient for gradient in gradients if gradient.numel() > 0]:
        largest = torch.stack(foreach_norm(non_empty, math.inf)).max().to(largest)
    if parallel_mesh.plan.world_size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def reduce_delayed_gradient_norm(
    totals: StepTotals,
    named_optimizer: NamedOptimizer,
    parallel_mesh: ParallelMesh,
    normalization: GradientNormalization,
) -> StepTotals:
    """Return the numbers for more gradients in the same step, which all sites share.

    Args:
        totals: numbers of the step.
        named_optimizer: optimizer of this rank's parameters.
        parallel_mesh: device meshes of the plan.
        normalization: normalization of the gradients.
    """
    square = named_optimizer.squared_norm(parallel_mesh.plan).to(parallel_mesh.device)
    if parallel_mesh.plan.world_size > 1:
        dist.all_reduce(square)
    target_count = totals.target_count if normalization.target_count is None else normalization.target_count
    correction = 1.0 / (target_count * normalization.effective_loss_multiplier)
    norm = math.sqrt(float(square) / parallel_mesh.plan.sites) * correction
    return replace(
        totals,
        gradient_norm=norm,
        site_gradient_norm=norm,
        gradient_multiplier=correction,
        has_gradients=True,
    )


def apply_update(
    totals: StepTotals,
    named_optimizer: NamedOptimizer,
    train: TrainSection,
    learning_rate: float,
    loss_scale: LossScale,
    skip: bool = False,
) -> bool:
    """Clip the gradients and update the weights.

    Args:
        totals: numbers of the step.
        named_optimizer: optimizer of this rank's parameters.
        train: `[train]` of the job.
        learning_rate: learning rate of the step.
        loss_scale: loss scale, which follows overflows.
        skip: true if the weights are to stay as they are.

    Returns:
        False when they do, or the gradient is not finite: the step was skipped. True also where there is no
            gradient yet to take.
    """
    if not totals.is_finite and totals.target_count:
        loss_scale.record_overflow()
    if skip or not totals.is_finite:
        named_optimizer.zero_gradients()
        return False
    if not totals.has_gradients:
        return True
    factor = totals.gradient_multiplier
    if train.gradient_clip > 0:
        norm = totals.gradient_norm if totals.site_gradient_norm is None else totals.site_gradient_norm
        factor *= min(1.0, train.gradient_clip / (norm + 1e-6))
    gradients = [local_tensor(gradient) for gradient in named_optimizer.gradients()]
    if gradients and not math.isclose(factor, 1.0, rel_tol=1e-15):
        foreach_mul_(gradients, factor)
    named_optimizer.step(learning_rate)
    named_optimizer.zero_gradients()
    loss_scale.record_success()
    return True


def describe_non_finite(
    totals: StepTotals,
    loss_sum: Tensor,
    named_optimizer: NamedOptimizer,
    parallel_mesh: ParallelMesh,
    non_finite_sample_names: list[str],
) -> tuple[str, list[int], str]:
    """Return (a text, the ranks whose loss, or else whose gradient, is not finite, their broken samples).

    The reduction has already spread a broken gradient to every rank that shares the parameter, so the loss,
    which is still local, is the better witness. Every rank calls it.

    Args:
        totals: numbers of the step.
        loss_sum: sum of this rank's losses, as in `reduce_step_totals`.
        named_optimizer: optimizer of this rank's parameters.
        parallel_mesh: device meshes of the plan.
        non_finite_sample_names: names of this rank's samples that are not finite themselves.
    """
    share = named_optimizer.squared_norm(parallel_mesh.plan)
    local_verdict = (
        not bool(torch.isfinite(loss_sum)),
        not bool(torch.isfinite(share)),
        non_finite_sample_names,
    )
    verdicts = all_gather_objects(local_verdict, parallel_mesh.plan.world_size)
    by_loss = [rank for rank, (loss_broke, _, _) in enumerate(verdicts) if loss_broke]
    by_gradient = [rank for rank, (_, gradient_broke, _) in enumerate(verdicts) if gradient_broke]
    ranks = by_loss or by_gradient
    samples = _list_samples(names for _, _, names in verdicts)
    cause = f"; {samples}: NaN or infinity in the data" if samples else ""
    text = (
        f"the loss is {totals.loss} and the gradient norm {totals.gradient_norm}; non-finite on "
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{cause}"
    )
    return text, ranks, samples


def describe_missing_targets(parallel_mesh: ParallelMesh, sample_names: list[str]) -> str:
    """Return a text that names the samples of a global batch without a target. Every rank calls it.

    Args:
        parallel_mesh: device meshes of the plan.
        sample_names: names of this rank's samples.
    """
    names = all_gather_objects(sample_names, parallel_mesh.plan.world_size)
    return f"no sample of the global batch has a target: {_list_samples(names)}"


def _list_samples(names_by_rank: Iterable[list[str]]) -> str:
    """Return the names of samples as text, each once; empty without any."""
    names = list(dict.fromkeys(name for names in names_by_rank for name in names))
    return first_names(names, _MAX_NAMES_IN_MESSAGE)
