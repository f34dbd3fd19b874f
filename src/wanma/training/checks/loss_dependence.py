"""Check of a user's own loop on its first micro-batch: losses must not depend on other samples.

It follows the gradient of the losses as far as the model's outputs, and runs the loop's operators outside of
the model on exchanged rows (`exchanged_rows`). It sees nothing within the model, which `carried_state` does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.torch_internals.uncompiled import uncompiled
from wanma.training.checks.exchanged_rows import ExchangedRows
from wanma.training.checks.sample_coupling import is_batch_split, is_coupled_by_content, refuse_if_coupled
from wanma.training.loss.foreign_weights import refuse_foreign_weights
from wanma.training.loss.model_outputs import map_tensors
from wanma.training.loss.target_counting import Losses
from wanma.training.run.trainer import Trainer


class SampleDependenceCheck:
    """Outputs of the model in one micro-batch, to which the gradient of its losses is compared.

    Where one rank has the global batch at once, samples may depend on each other, as in a plain loop. Its
    hooks come before those of other checks, whose passes through the model are none of the loop's.
    """

    def __init__(self, trainer: Trainer, gatherer: GlobalBatchGatherer) -> None:
        self._trainer, self._gatherer, self._is_batch_split = trainer, gatherer, is_batch_split(trainer)
        self._outputs: list[Tensor] = []
        self._exchanged_rows: ExchangedRows | None = None
        self._inputs_mix_samples = False
        """True if the loop has given the model rows that are made of several samples."""
        self._depth = 0
        self._rows_of_output: Any = None
        module = trainer.state.parallel_model.module
        begin, end = uncompiled(self._begin), uncompiled(self._end)
        self._hooks = (
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        )

    def follow(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return the context in which the loop's own code for a batch is followed."""
        if self._exchanged_rows is not None or not self._is_batch_split:
            return nullcontext()
        tensors = (*batch.inputs, batch.targets, *batch.keywords.values())
        self._exchanged_rows = ExchangedRows(batch.rows, tensors, batch.samples.device)
        return self._exchanged_rows

    def check(self, losses: Losses) -> None:
        """Check the losses before backward, and remove the hooks; every rank calls it.

        Raises:
            JobError: losses depend on weights that are not the model's; or on some rank the losses of some
                samples on others, and all ranks raise it.
        """
        for hook in self._hooks:
            hook.remove()
        outputs, self._outputs = self._outputs, []
        exchanged, self._exchanged_rows = self._exchanged_rows, None
        couples = False
        if exchanged is not None:
            exchanged.is_active = False
        plain = losses[0] if isinstance(losses, tuple) else losses
        refuse_foreign_weights(plain, outputs, self._trainer.state.parallel_model, len(plain))
        if not self._is_batch_split:
            return
        if not self._gatherer.is_used:
            couples = _couples(plain, outputs)
            if exchanged is not None and not exchanged.is_unsupported:
                couples = (
                    couples or self._inputs_mix_samples or self._is_coupled_by_content(losses, exchanged)
                )
        refuse_if_coupled(self._trainer, couples, False)

    def _begin(self, module: nn.Module, arguments: Any, keywords: Any) -> None:  # noqa: ARG002  # a hook's
        self._depth += 1
        exchanged = self._exchanged_rows
        if self._depth > 1 or exchanged is None or exchanged.is_unsupported:
            return
        exchanged.is_active = False
        self._rows_of_output = exchanged.rows_of_arguments((arguments, keywords))
        self._inputs_mix_samples |= self._rows_of_output is None

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> Any:  # noqa: ARG002  # a hook's
        self._depth -= 1
        if self._depth > 0:
            return output

        def note(tensor: Tensor) -> Tensor:
            if exchanged is not None and self._rows_of_output is not None:
                exchanged.follow([tensor], self._rows_of_output)
            if not tensor.requires_grad or tensor.ndim == 0:
                return tensor
            # Another tensor than what is watched by the hooks that gather parameters for a backward.
            view = tensor.view_as(tensor)
            self._outputs.append(view)
            return view

        exchanged = self._exchanged_rows
        watched_output = map_tensors(note, output)
        if exchanged is not None:
            exchanged.is_active = True
        return watched_output

    def _is_coupled_by_content(self, losses: Losses, exchanged: ExchangedRows) -> bool:
        """Return whether losses of exchanged rows do not add up."""
        parts = losses if isinstance(losses, tuple) else (losses,)
        exchanged_values = [exchanged.exchanged_values(part) for part in parts]
        if all(values is None for values in exchanged_values):
            return False
        sums = [_sums(*(part.detach() for part in parts))]
        for number in range(len(exchanged.halves)):
            exchanged_parts = [
                part.detach() if values is None else values[number]
                for part, values in zip(parts, exchanged_values, strict=True)
            ]
            sums.append(_sums(*exchanged_parts))
        ab, ba, aa, bb = sums
        return is_coupled_by_content((ab, ba), (aa, bb), self._trainer.plan)


def _sums(losses: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    """Return the sum of the losses that count, and the sum of their weights."""
    if weights is not None and weights.dtype == torch.bool:
        losses = losses * weights.expand_as(losses)
    return float(losses.double().sum()), 1.0 if weights is None else float(weights.double().sum())


def _couples(losses: Tensor, outputs: list[Tensor]) -> bool:
    """Return whether the sum of the losses is no sum of functions of the outputs' two halves.

    The gradient of a half's losses reaches the outputs of the other, and the gradient with respect to those
    depends on the first. An average that is added to each loss does only the one.
    """
    rows = len(losses)
    outputs = [output for output in outputs if len(output) == rows]
    if rows < 2 or not outputs:
        return False
    half_rows = rows // 2
    try:
        reaches_other_half = _reaches(losses[:half_rows], outputs, slice(half_rows, None)) or _reaches(
            losses[half_rows:], outputs, slice(half_rows)
        )
        if not reaches_other_half:
            return False
        gradients = torch.autograd.grad(losses.sum(), outputs, create_graph=True, allow_unused=True)
        halves = [gradient[:half_rows].flatten() for gradient in gradients if gradient is not None]
        # No constants: the rows of a softmax's derivative add up to zero.
        weighed = [half @ torch.arange(len(half), device=half.device).cos().to(half.dtype) for half in halves]
        total = torch.stack(weighed).sum()
        return total.requires_grad and _reaches(total.view(1), outputs, slice(half_rows, None))
    except RuntimeError:  # a graph that is made to be gone through once, or has no second derivative
        return False


def _reaches(losses: Tensor, outputs: list[Tensor], rows: slice) -> bool:
    """Return whether the gradient of losses reaches some rows of the outputs."""
    gradients = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, allow_unused=True)
    row_gradients = [gradient[rows] for gradient in gradients if gradient is not None]
    return any(bool(((row_gradient != 0) & row_gradient.isfinite()).any()) for row_gradient in row_gradients)
