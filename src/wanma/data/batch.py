"""Micro-batch of samples as tensors: the interface between `data` and `training`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from wanma.job.errors import WanmaError

IGNORE_INDEX = -100
"""Integer target that every loss ignores."""


@dataclass(frozen=True)
class BadSample:
    """Sample that cannot be read, and that did not end the run (`data.bad_data`)."""

    sample: int
    """Index in the run's order."""
    place: str
    cause: str
    is_substituted: bool
    """True: another sample has its position; False: its position is a padding row."""


@dataclass(frozen=True)
class Batch:
    """Micro-batch: `rows` samples of one data rank.

    A rank whose share of a micro-batch is empty gets one padding row (`real` false, integer targets
    `IGNORE_INDEX`), because collectives inside the model need every rank to take part.
    """

    inputs: tuple[Tensor, ...]
    """Positional arguments of the model; text: tokens (rows, sequence) int64."""
    targets: Tensor
    """Targets; text: (rows, sequence) int64; classes: (rows,) int64; otherwise as the dataset gives them."""
    samples: Tensor
    """Sample index of each row in the run's order, (rows,) int64; keys every random draw."""
    real: Tensor
    """Mask of real rows, (rows,) bool: false for padding rows."""
    keywords: dict[str, Tensor] = field(default_factory=dict)
    """Keyword arguments of the model; text with document masks: `documents`, `positions` (rows, sequence)."""
    target_key: str | None = None
    """Key under which a dict sample gives the target; None: samples are not dicts."""
    named_targets: dict[str, Tensor] | None = None
    """Targets by name, of samples whose target is a dict; `targets` is then the first of them."""
    class_range: tuple[int, int] | None = None
    """Minimum and maximum integer target other than `IGNORE_INDEX`; None: unknown, or no targets.

    Stored on the host, so that a loss can check it without waiting for a device.
    """
    bad_samples: tuple[BadSample, ...] = ()

    @property
    def rows(self) -> int:
        return self.samples.shape[0]

    @cached_property
    def wide_targets(self) -> Tensor:
        """`targets` as `widen_integers` gives them: those that are compared with `IGNORE_INDEX`."""
        return widen_integers(self.targets)

    @property
    def given_targets(self) -> Tensor | dict[str, Tensor]:
        """Targets as the samples give them: a tensor, or a dict of tensors."""
        return self.targets if self.named_targets is None else self.named_targets

    def to(self, device: torch.device) -> Batch:
        return map_batch(self, lambda tensor: tensor.to(device, non_blocking=True))


def map_batch(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch with `function` of each tensor of another."""

    def mapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: function(tensor) for name, tensor in tensors.items()}

    return replace(
        batch,
        inputs=tuple(map(function, batch.inputs)),
        targets=function(batch.targets),
        samples=function(batch.samples),
        real=function(batch.real),
        keywords=mapped(batch.keywords),
        named_targets=None if batch.named_targets is None else mapped(batch.named_targets),
    )


def widen_integers(tensor: Tensor) -> Tensor:
    """Return integers as int64, and any other tensor as it is.

    `IGNORE_INDEX` has no place in the unsigned ones: as a byte it is 156, a class like others.
    """
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return tensor.long() if is_integer else tensor


def find_nonfinite_samples(batch: Batch) -> list[int]:
    """Return the indices of the real samples with a NaN or infinity among their inputs or targets."""
    is_nonfinite = torch.zeros(batch.rows, dtype=torch.bool, device=batch.samples.device)
    named_targets = batch.named_targets or {}
    for tensor in (*batch.inputs, batch.targets, *batch.keywords.values(), *named_targets.values()):
        if tensor.is_floating_point() and len(tensor) == batch.rows:
            is_nonfinite |= ~tensor.reshape(batch.rows, -1).isfinite().all(1).to(is_nonfinite.device)
    return [int(number) for number in batch.samples[is_nonfinite & batch.real]]


def concatenate_padded(batches: list[Batch], row_count: int) -> Batch:
    """Join `batches`, each padded to `row_count` rows, for schedules that require equal sizes.

    Only for batches with integer targets, which are int64 in the result.

    Raises:
        WanmaError: their target is a dict.
    """
    if any(batch.named_targets is not None for batch in batches):
        raise WanmaError(
            "data: the target of the samples is a dict, but a pipeline needs a single target tensor",
            "return one target tensor, or set parallel.pp = 1 and give a loss function",
        )
    padded_batches = [_pad_rows(batch, row_count) for batch in batches]
    return Batch(
        keywords={
            name: torch.cat([batch.keywords[name] for batch in padded_batches])
            for name in padded_batches[0].keywords
        },
        inputs=tuple(
            torch.cat(tensors) for tensors in zip(*(batch.inputs for batch in padded_batches), strict=True)
        ),
        targets=torch.cat([batch.wide_targets for batch in padded_batches]),
        samples=torch.cat([batch.samples for batch in padded_batches]),
        real=torch.cat([batch.real for batch in padded_batches]),
    )


def _pad_rows(batch: Batch, row_count: int) -> Batch:
    missing = row_count - batch.rows
    if missing == 0:
        return batch

    def repeat(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])

    def constant(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])

    return replace(
        batch,
        inputs=tuple(repeat(tensor) for tensor in batch.inputs),
        targets=constant(batch.wide_targets, IGNORE_INDEX),
        samples=constant(batch.samples, -1),
        real=constant(batch.real, 0),
        keywords={name: repeat(tensor) for name, tensor in batch.keywords.items()},
    )
