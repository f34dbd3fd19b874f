"""Step statistics of modules, and batch normalization over fixed sample groups.

The job fixes the groups, so that the layout does not change their numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.torch_internals.modules import BatchNormBase, InstanceNormBase


@runtime_checkable
class StepStatistics(Protocol):
    """Protocol of modules that collect statistics of samples and are updated by their sums over a step."""

    @property
    def statistics_numel(self) -> int:
        """Number of elements in the result of `pop_sums`."""

    def pop_sums(self) -> tuple[Tensor, ...]:
        """Return the statistics since the last call, as sums over samples; start again from zero."""

    def apply_sums(self, *sums: Tensor) -> None:
        """Update once per optimizer step, by `pop_sums` summed over ranks with different samples."""


class GroupedBatchNorm(BatchNormBase):
    """Batch normalization whose training statistics are those of `group_size` consecutive samples.

    Parameters, buffers, attributes and state-dict keys are those of `nn.BatchNorm2d`. Running
    statistics do not move in forward: it only adds up the groups' means and variances, and
    `apply_sums` applies one update per optimizer step, whatever ranks and micro-batches saw the groups.

    Args:
        features: size of dim 1.
        group_size: samples per statistic ("ghost batches", Hoffer et al. 2017).
        epsilon: added to the variance.
        momentum: weight of a step in the running statistics; None: every step weighs the same.
        affine: if True, there are a weight and a bias.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    original_class: ClassVar[type[BatchNormBase] | None] = None
    """Class of a converted module before its conversion; None: it was made as a grouped one."""

    def __init__(
        self,
        features: int,
        group_size: int,
        *,
        epsilon: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(features, epsilon, momentum, affine)
        self._init_grouped(group_size)

    def _init_grouped(self, group_size: int) -> None:
        """Set the attributes that torch's own batch normalization lacks."""
        self.group_size = group_size
        self._mean_sum: Tensor | None = None
        self._variance_sum: Tensor | None = None
        self._group_count = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.original_class is None:
            return super().__reduce_ex__(protocol)
        return _new_empty_grouped, (self.original_class,), self.__dict__

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, features, ...) to the same shape.

        Raises:
            WanmaError: training with a number of rows that is no multiple of the group.
        """
        compute_dtype = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(compute_dtype)
        bias = None if self.bias is None else self.bias.to(compute_dtype)
        if not self.training:
            mean, variance = self.running_mean.to(compute_dtype), self.running_var.to(compute_dtype)
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)
        if x.shape[0] % self.group_size:
            raise WanmaError(
                f"batch normalization over groups of {self.group_size} samples is not possible with "
                f"{x.shape[0]} rows",
                "make the micro-batch of every rank a multiple of model.batch_norm_group "
                "(parallel.micro_batch, train.global_batch), or change model.batch_norm_group",
            )
        normalized, means, variances = [], [], []
        # A single group is used as it is: gradients of slices would be copied together.
        for samples in [x] if x.shape[0] == self.group_size else torch.split(x, self.group_size):
            # With momentum 1 torch's running statistics become this group's: the mean and, as in
            # nn.BatchNorm2d, the unbiased variance.
            mean = torch.zeros(self.num_features, dtype=compute_dtype, device=x.device)
            variance = torch.zeros_like(mean)
            normalized.append(F.batch_norm(samples, mean, variance, weight, bias, True, 1.0, self.eps))
            means.append(mean)
            variances.append(variance)
        self._accumulate(means, variances)
        return normalized[0] if len(normalized) == 1 else torch.cat(normalized)

    @property
    def statistics_numel(self) -> int:
        return 2 * self.num_features + 1

    def pop_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over groups since the last call; start again from zero.

        Returns:
            Sum of means (features,), sum of variances (features,), number of groups () int64.
        """
        zero = torch.zeros_like(self.running_mean)
        mean_sum = zero if self._mean_sum is None else self._mean_sum
        variance_sum = zero.clone() if self._variance_sum is None else self._variance_sum
        groups = torch.full((), self._group_count, device=zero.device)
        self._mean_sum, self._variance_sum, self._group_count = None, None, 0
        return mean_sum, variance_sum, groups

    @torch.no_grad()
    def apply_sums(self, mean_sum: Tensor, variance_sum: Tensor, group_count: Tensor | int) -> None:
        """Update the running statistics once, by the average over a step's groups.

        Args:
            mean_sum: (features,), from `pop_sums`, summed over all ranks with different samples.
            variance_sum: (features,), likewise.
            group_count: number of groups, likewise; with 0, nothing changes.
        """
        # All on the device: a check for groups would make the host wait for it.
        count = torch.as_tensor(group_count, device=self.running_mean.device)
        is_updated = (count > 0).to(self.running_mean)
        count = count.clamp(min=1)
        self.num_batches_tracked += is_updated.to(torch.int64)
        momentum = (
            is_updated / self.num_batches_tracked.clamp(min=1)
            if self.momentum is None
            else is_updated * self.momentum
        )
        self.running_mean.lerp_((mean_sum / count).to(self.running_mean), momentum)
        self.running_var.lerp_((variance_sum / count).to(self.running_var), momentum)

    def reset_buffers(self) -> None:
        """Set the running statistics to their initial values, after allocation without any."""
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        return f"{self.num_features}, group={self.group_size}, eps={self.eps}, momentum={self.momentum}"

    @torch.no_grad()
    def _accumulate(self, means: list[Tensor], variances: list[Tensor]) -> None:
        # Where backward recomputes forward every group is counted twice, which does not change the average.
        mean, variance = torch.stack(means).sum(0), torch.stack(variances).sum(0)
        self._mean_sum = mean if self._mean_sum is None else self._mean_sum + mean
        self._variance_sum = variance if self._variance_sum is None else self._variance_sum + variance
        self._group_count += len(means)


def find_step_statistics_modules(model: nn.Module) -> dict[str, StepStatistics]:
    """Return the modules whose statistics must be committed after each optimizer step, by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StepStatistics)}


def find_sample_coupling_modules(model: nn.Module) -> list[str]:
    """List the modules whose result depends on which samples share a micro-batch.

    Only one process with one micro-batch per step computes such a model as its author meant; other
    layouts need `convert_batch_norm`.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and not isinstance(module, GroupedBatchNorm)
    ]


def find_instance_norm_statistics(model: nn.Module) -> list[str]:
    """List the instance normalizations whose running statistics cover only the samples of one rank."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, InstanceNormBase) and module.track_running_stats
    ]


def convert_batch_norm(model: nn.Module, group_size: int) -> nn.Module:
    """Convert torch's batch normalizations to grouped ones, in place.

    The modules stay the same objects, with their hooks and attributes, and only change their class. A
    subclass keeps its own forward, whose `super().forward` is the grouped one; one whose forward does not
    call it is left as it is, and `find_sample_coupling_modules` names it.

    Args:
        model: the model.
        group_size: samples per statistic.

    Returns:
        `model`.

    Raises:
        WanmaError: a module keeps no running statistics, so that evaluation would couple samples too.
    """
    for name, module in model.named_modules():
        if not isinstance(module, BatchNormBase) or isinstance(module, GroupedBatchNorm):
            continue
        if not module.track_running_stats or isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise WanmaError(
                f"cannot convert {type(module).__name__} '{name}': it has no running statistics",
                "set track_running_stats=True and the number of features",
            )
        if _calls_torch_forward(type(module)):
            module.__class__ = _grouped_class(type(module))  # type: ignore[arg-type]  # a class is hashable
            assert isinstance(module, GroupedBatchNorm)
            module._init_grouped(group_size)
    return model


def _torch_class(kind: type[BatchNormBase]) -> type[BatchNormBase]:
    """Return torch's class that `kind` is or derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == BatchNormBase.__module__)


def _calls_torch_forward(kind: type[BatchNormBase]) -> bool:
    """Return True if every forward between `kind` and torch's own calls the next by `super()`."""
    user_classes = kind.__mro__[: kind.__mro__.index(_torch_class(kind))]
    return all(
        "super" in forward.__code__.co_names
        for base in user_classes
        if (forward := vars(base).get("forward"))
    )


@cache
def _grouped_class(kind: type[BatchNormBase]) -> type[GroupedBatchNorm]:
    """Return a subclass of `kind` whose normalization is the grouped one."""
    torchs = _torch_class(kind)
    bases = (GroupedBatchNorm, kind) if kind is torchs else (kind, _grouped_class(torchs))  # type: ignore[arg-type]
    return type(f"Grouped{kind.__name__}", bases, {"__module__": kind.__module__, "original_class": kind})


def _new_empty_grouped(kind: type[BatchNormBase]) -> GroupedBatchNorm:
    """Return a grouped module without content, to be filled by `copy` and `pickle`."""
    grouped = _grouped_class(kind)  # type: ignore[arg-type]  # a class is hashable
    return grouped.__new__(grouped)
