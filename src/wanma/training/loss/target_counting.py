"""Sum and target count of a user's losses; a target counts where torch's own mean would count it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, Batch, widen_integers
from wanma.job.errors import WanmaError
from wanma.torch_internals.autograd import nll_loss_arguments

Losses = Tensor | tuple[Tensor, Tensor]
"""One loss per sample or target, leading dimension the batch's rows; or a pair of these and their weights.

Weights are a mask (bool), or numbers by whose sum the sum of the losses is divided.
"""

UserLoss = Callable[[Any, Any], Losses]
"""Function (model output, targets) -> their losses."""

_NODES = 256
"""Number of autograd nodes, from the losses back, among which a cross entropy is searched."""


class TargetCounter:
    """Rule by which the targets of one loss count, found out once.

    A target is left out if it is the `ignore_index` that the loss declares (an attribute of a module, a
    keyword of a `functools.partial`) or that the first losses' graph shows a cross entropy of torch's to have
    used; such a class that the loss itself makes of other targets is refused. Where neither says anything, a
    target of `IGNORE_INDEX` is left out whose loss is zero: a regression may have such a target, and then has
    a loss.

    Args:
        loss: the user's function, if it is known.
    """

    def __init__(self, loss: object = None) -> None:
        self._ignore_index = declared_ignore_index(loss)
        self._reads_graph = True
        """True if the graph of the next losses is to be read: the first ones; all, if targets are copied."""
        self._shifted_ignore_index: int | None = None
        """Value of `ignore_index` of a cross entropy with another number of positions than the targets."""
        self._may_have_others = True

    def __call__(self, losses: object, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum and number of the losses of `batch`'s real targets.

        Args:
            losses: `Losses`.
            batch: batch of samples.

        Returns:
            (sum, number of targets or sum of weights).

        Raises:
            WanmaError: the loss was already averaged, which no layout could undo; or cannot be counted.
        """
        losses, counted = losses if isinstance(losses, tuple) and len(losses) == 2 else (losses, None)
        checked = _checked_losses(losses, batch)
        is_real = batch.real.reshape(-1, *[1] * (checked.ndim - 1)).expand_as(checked)
        if counted is not None:
            return _weighted_sum(checked, counted, is_real)
        if batch.named_targets is not None:  # whose loss is of several: every sample counts
            return torch.where(is_real, checked, 0.0).sum(), is_real.sum()
        if self._reads_graph and checked.requires_grad:
            self._read_graph(checked, batch)
        targets = batch.wide_targets
        if targets.is_floating_point() or targets.is_complex():
            pass
        elif targets.shape == checked.shape:
            if self._ignore_index is not None:
                is_real = is_real & (targets != self._ignore_index)
            else:
                is_real = is_real & ~((targets == IGNORE_INDEX) & (checked == 0))
        elif targets.ndim == checked.ndim and checked.ndim > 1:
            self._refuse_ignored_shifted_targets(checked, targets)
        return torch.where(is_real, checked, 0.0).sum(), is_real.sum()

    def _read_graph(self, losses: Tensor, batch: Batch) -> None:
        """Find the `ignore_index` of cross entropies of the batch's targets; refuse it for converted ones."""
        found = [
            (index, targets)
            for index, targets in _cross_entropies(losses)
            if targets.numel() == batch.targets.numel()
        ]
        if self._ignore_index is None:
            self._ignore_index = _common_ignore_index({index for index, _ in found})
        given = batch.targets.untyped_storage().data_ptr()
        copied = [entry for entry in found if entry[1].untyped_storage().data_ptr() != given]
        self._reads_graph = bool(copied)
        for index, targets in copied:
            ignored = int((widen_integers(targets) == index).sum())
            if ignored != int((batch.wide_targets == index).sum()):
                raise WanmaError(
                    f"the loss converts targets and then ignores {ignored} of class {index}, but the batch's "
                    "own targets do not show which: validation would count them",
                    "return (losses, mask), with mask true for the targets that count; or convert the "
                    "targets in the dataset",
                )

    def _refuse_ignored_shifted_targets(self, losses: Tensor, targets: Tensor) -> None:
        """Refuse losses of other positions than the targets', if a cross entropy leaves some of them out."""
        index, ignores_targets = self._shifted_ignore_index, False
        if losses.requires_grad and self._may_have_others:
            for index, entropy_targets in _cross_entropies(losses):
                if entropy_targets.numel() == losses.numel():
                    self._shifted_ignore_index, ignores_targets = (
                        index,
                        ignores_targets or bool((widen_integers(entropy_targets) == index).any()),
                    )
            self._may_have_others = self._shifted_ignore_index is not None
        elif index is not None:
            ignores_targets = bool((targets == index).any())
        if ignores_targets:
            raise WanmaError(
                f"the loss has shape {tuple(losses.shape)} and ignores targets of class "
                f"{self._shifted_ignore_index}, but the batch's targets of shape {tuple(targets.shape)} "
                "do not show which values of the loss are ignored",
                "return (losses, mask), e.g. (losses, labels[:, 1:] != -100)",
            )


def sum_and_count_losses(losses: object, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum and number of losses of an unknown function."""
    return TargetCounter()(losses, batch)


def declared_ignore_index(loss: object) -> int | None:
    """Return the class that a loss declares to leave out; None if it declares none."""
    ignore_index = getattr(loss, "ignore_index", None)
    if ignore_index is None and isinstance(loss, partial):
        ignore_index = loss.keywords.get("ignore_index")
        if ignore_index is None:
            return declared_ignore_index(loss.func)
    return ignore_index if isinstance(ignore_index, int) and not isinstance(ignore_index, bool) else None


def _checked_losses(losses: object, batch: Batch) -> Tensor:
    if not isinstance(losses, Tensor):
        raise WanmaError(
            f"the losses are {type(losses).__name__}, not a tensor",
            f"return one value per sample ({batch.rows} rows here), as reduction='none' does; or a pair "
            "(losses, mask) or (losses, weights)",
        )
    if losses.ndim == 0 or losses.shape[0] != batch.rows:
        raise WanmaError(
            f"the loss has shape {tuple(losses.shape)}, but must keep one value per sample "
            f"({batch.rows} rows here)",
            "return unreduced losses (reduction='none'): wanma divides once by the target count of the "
            "global batch. For a transformers model, use session.losses(output, batch) instead of its "
            "`loss`",
        )
    return losses


def _weighted_sum(losses: Tensor, counted: object, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and divisor of losses by the user's weights."""
    try:
        weights = expand_weights(counted, losses)
    except (TypeError, RuntimeError) as error:
        raise WanmaError(
            f"the loss returned a pair, but its second part is not a mask or weights: {error}",
            f"return (losses, mask) or (losses, weights), both of shape {tuple(losses.shape)}",
        ) from error
    if weights.dtype == torch.bool:
        is_real = is_real & weights
        return torch.where(is_real, losses, 0.0).sum(), is_real.sum()
    return torch.where(is_real, losses, 0.0).sum(), torch.where(is_real, weights, 0).double().sum()


def expand_weights(weights: object, values: Tensor) -> Tensor:
    """Return the weights of `values` in their shape, without gradient.

    Raises:
        TypeError: the weights are not a tensor.
        RuntimeError: their shape does not fit.
    """
    if not isinstance(weights, Tensor):
        raise TypeError(f"it is {type(weights).__name__}")
    return weights.detach().expand_as(values)


def _common_ignore_index(ignore_indices: set[int]) -> int | None:
    """Return the only `ignore_index` of some cross entropies; None without any."""
    if len(ignore_indices) > 1:
        raise WanmaError(
            f"the loss ignores the classes {sorted(ignore_indices)} by different ignore_index values, so its "
            "target count is unknown",
            "return (losses, mask), with mask true for the targets that count",
        )
    return ignore_indices.pop() if ignore_indices else None


def _cross_entropies(losses: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (ignore_index, targets) of torch's cross entropies near the end of a graph."""
    pending: list[Any] = [losses.grad_fn]
    visited: set[Any] = set()
    while pending and len(visited) < _NODES:
        node = pending.pop(0)
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().startswith("NllLoss"):
            yield nll_loss_arguments(node)
        else:
            pending += [before for before, _ in node.next_functions]
