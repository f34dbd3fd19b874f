"""Check before the first step that no forward carries state that depends on how the batch is cut.

A plain loop has one pass per step, over the global batch. A counter that each pass raises, running statistics
of the samples or a moving average of weights become others where a step has several passes, or each rank its
own. Where that shows in buffers, weights or outputs, it is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.data.datasets.dataset import BatchedDataset
from wanma.job.errors import AllRanksError, JobError
from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.torch_internals.dispatch import tree_map_only
from wanma.torch_internals.uncompiled import uncompiled
from wanma.training.checks.sample_coupling import (
    any_rank,
    batch_cut_text,
    eager_without_gradients,
    evaluation_of_coupling_modules,
    is_batch_split,
    refuse_if_coupled,
    select_rows,
)
from wanma.training.checks.state_restoration import SavedState, preserve_state
from wanma.training.loss.model_outputs import output_tensors
from wanma.training.run.trainer import Trainer
from wanma.training.step.forward_backward import ForwardBackward

Forward = Callable[[Tensor], Any]
"""Function from the indices of some rows of a batch, (rows,), to the model's output for them."""

_UNKEYED_DRAWS = "a random number of numpy.random or random in a forward pass"
_TRIAL_ROWS = 4
"""Number of samples that suffice to see it."""
_SAME_ROWS_TOLERANCES = 1e-5, 1e-2
"""Relative difference that rounding may make between passes over the same rows, in fp32 and in 16 bits."""
_OTHER_SHAPE_TOLERANCE = 5e-2
"""Relative difference that rounding may make between batches of different sizes."""


def first_samples_forward(
    trainer: Trainer, data: BatchedDataset, forward_backward: ForwardBackward
) -> tuple[Forward, int]:
    """Return forward passes of the model over the first samples to come, and the number of these."""
    plan, samples = trainer.plan, trainer.job.train.global_batch
    pipelined = plan.pp > 1
    rows = plan.micro_batch if pipelined else min(samples, max(plan.micro_batch, 2))
    first = trainer.state.samples
    batch = data.batch(range(first, first + rows)).to(trainer.parallel_mesh.device)

    def forward(chosen: Tensor) -> Any:
        part = select_rows(batch, chosen)
        if not pipelined:
            return forward_backward.output(part)
        return [total.view(1) for total in forward_backward.evaluate_losses([part])]

    return forward, rows


def refuse_carried_state(
    trainer: Trainer,
    forward: Forward,
    rows: int,
    *,
    other_objects: tuple[object, ...] = (),
    takes_any_rows: bool = True,
) -> None:
    """Compare passes over rows of a batch after different passes before them; every rank calls it.

    Nothing of it stays, and nothing is computed where a step is one pass of one rank.

    Args:
        trainer: this rank's run.
        forward: forward pass over some rows of the batch.
        rows: rows of the batch; a few of them are tried.
        other_objects: objects beside the model that a forward may change.
        takes_any_rows: true if `forward` takes any number of rows; False: all of them only.

    Raises:
        JobError: the passes differ; all ranks raise it.
    """
    if not is_batch_split(trainer):
        return
    part = ""
    with (
        _eager_without_gradients(trainer),
        preserve_state(trainer.state.parallel_model.model_parts, other_objects) as saved_state,
    ):
        passes = _ForwardPasses(trainer, forward, saved_state)
        with suppress(_UnsupportedRowsError):
            part = _find_carried_state(
                passes, min(rows, _TRIAL_ROWS) if takes_any_rows else rows, halves=takes_any_rows and rows > 1
            )
    trainer.state.parallel_model.reset_step_count()
    _refuse_if_found(trainer, part)


class CarriedStateCheck:
    """Check of carried state in a user's own loop, with the arguments of the model's first call.

    It also checks that outputs for a sample do not depend on the others of its micro-batch.
    """

    def __init__(
        self, trainer: Trainer, gatherer: GlobalBatchGatherer, samples: Callable[[], Tensor]
    ) -> None:
        self._trainer, self._gatherer, self._samples = trainer, gatherer, samples
        module = trainer.state.parallel_model.module
        # Outside what is compiled.
        check = uncompiled(self._check)
        self._hook = module.register_forward_pre_hook(check, prepend=True, with_kwargs=True)

    def _check(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._hook.remove()
        samples, draws = self._samples(), self._trainer.state.parallel_model.random_draws
        padded, has_company = (arguments, keywords), len(samples) > 1
        if not has_company:
            padded = tree_map_only(Tensor, lambda x: _with_company(x) if _has_rows(x, 1) else x, padded)
            samples = torch.cat([samples, samples + 1])

        def forward(rows: Tensor) -> Any:
            def select(x: Tensor) -> Tensor:
                return x[rows] if _has_rows(x, len(samples)) else x

            with draws.forward(module, samples[: len(rows)]) as drawing:
                chosen, named = tree_map_only(Tensor, select, padded)
                output = module(*chosen, **named)
                drawing.end_forward()
            return output

        coupled = self._coupled(forward, len(samples), is_real=has_company)
        if not self._gatherer.is_used:
            refuse_if_coupled(self._trainer, *coupled)
            refuse_carried_state(self._trainer, forward, len(samples) if has_company else 1)

    def _coupled(self, forward: Forward, rows: int, *, is_real: bool) -> tuple[bool, bool]:
        """Return whether outputs depend on which other rows there are, and on their number."""
        trainer, half_rows = self._trainer, max(rows // 2, 1)
        with (
            _eager_without_gradients(trainer),
            preserve_state(trainer.state.parallel_model.model_parts) as saved_state,
        ):
            passes = _ForwardPasses(trainer, forward, saved_state)
            try:
                number = torch.arange(rows)
                whole_outputs = passes.run(number, is_real=is_real).outputs
                if self._gatherer.is_used:
                    return False, False
                # Ranks may have unlike numbers of rows, but gather parameters equally often.
                repeated_outputs = passes.run(
                    torch.where(number < half_rows, number, number % half_rows)
                ).outputs
                half_outputs = passes.run(number[:half_rows]).outputs
            except _UnsupportedRowsError:
                return False, False
            finally:
                trainer.state.parallel_model.reset_step_count()
        row_outputs = [
            (whole_output[:half_rows], repeated_output[:half_rows], fewer_output)
            for whole_output, repeated_output, fewer_output in zip(
                whole_outputs, repeated_outputs, half_outputs, strict=False
            )
            # A matrix of pairs is for the loss to use or not: `SampleDependenceCheck` sees it.
            if len(whole_output) == rows
            and len(fewer_output) == half_rows
            and whole_output.shape[1:] == fewer_output.shape[1:]
        ]
        by_content = any(
            _differ(whole_output, repeated_output, passes.tolerance)
            for whole_output, repeated_output, _ in row_outputs
        )
        return by_content, any(
            _differ(whole_output, fewer_output, _OTHER_SHAPE_TOLERANCE)
            for whole_output, _, fewer_output in row_outputs
        )


def _has_rows(x: Tensor, rows: int) -> bool:
    return x.ndim > 0 and len(x) == rows


def _with_company(x: Tensor) -> Tensor:
    """Return a sample, (1, ...), with another made of it: reversed and scaled; flags stay as they are."""
    if x.dtype == torch.bool:
        return torch.cat([x, x])
    companion = x.flip(-1) if x.ndim > 1 else x
    return torch.cat([x, companion * 0.9 if x.is_floating_point() else companion])


class _UnsupportedRowsError(Exception):
    """Error of a user's code that takes no other rows than those that it was given."""


@dataclass(frozen=True)
class _PassResult:
    """Outputs of a pass, and the tensors that differ from their values before the first pass."""

    outputs: list[Tensor]
    changes: dict[str, Tensor]
    attributes_changed: bool

    @property
    def changes_anything(self) -> bool:
        return bool(self.changes) or self.attributes_changed


class _ForwardPasses:
    """Forward passes that begin from the same state."""

    def __init__(self, trainer: Trainer, forward: Forward, saved_state: SavedState) -> None:
        self.trainer, self._forward, self._saved_state = trainer, forward, saved_state
        plan = trainer.plan
        self.has_unkeyed_draws = False
        """True if a pass has drawn by numpy.random or random, whose numbers no sample keys."""
        self.tolerance = _SAME_ROWS_TOLERANCES[plan.precision in ("bf16", "fp16") or plan.fp8]
        self.has_several_data_ranks = plan.data_parallel_size > 1
        self.has_several_micro_batches = (
            plan.pp > 1 or plan.gradient_accumulation_steps(trainer.job.train.global_batch) > 1
        )

    @contextmanager
    def on_perturbed_weights(self) -> Iterator[_ForwardPasses]:
        """Make passes from changed weights: state that follows weights equals them before the first step."""
        parts = self.trainer.state.parallel_model.model_parts
        _perturb_weights(weight for part in parts for weight in part.parameters())
        with preserve_state(parts) as saved_state:
            yield _ForwardPasses(self.trainer, self._forward, saved_state)

    def run(self, *history: Tensor, is_real: bool = False) -> _PassResult:
        """Return the result of the last of several passes, one after the other.

        Args:
            history: rows of each pass.
            is_real: true if the rows are those of a step, whose refusals then count.

        Raises:
            _UnsupportedRowsError: one of them fails.
            AllRanksError: a real one uses other parts of the model than other ranks do.
        """
        output: Any = None
        try:
            for rows in history:
                torch.manual_seed(0)
                np.random.seed(0)
                random.seed(0)
                before = np.random.get_state(legacy=False)["state"]["pos"], random.getstate()
                try:
                    output = self._forward(rows)
                except AllRanksError:
                    self._clear()  # some ranks may have come to `wait_until_weights_unused`: all have left it
                    raise
                except Exception:
                    self._clear()
                    self.trainer.state.parallel_model.wait_until_weights_unused()
                    raise
                finally:
                    self.has_unkeyed_draws |= before != (
                        np.random.get_state(legacy=False)["state"]["pos"],
                        random.getstate(),
                    )
                self._clear()
                self.trainer.state.parallel_model.wait_until_weights_unused()
            outputs = [x.detach().clone() for x in output_tensors(output) if x.ndim > 0]
            return _PassResult(outputs, self._saved_state.changes(), self._saved_state.attributes_changed)
        except JobError:
            raise
        except Exception as error:
            if is_real and isinstance(error, AllRanksError):
                raise
            raise _UnsupportedRowsError from error
        finally:
            self._saved_state.restore()

    def _clear(self) -> None:
        """Discard what a pass has left: noted statistics, and unsharded parameters."""
        for part in self.trainer.state.parallel_model.model_parts:
            for module in find_step_statistics_modules(part).values():
                module.pop_sums()
        self.trainer.state.parallel_model.reshard()


@torch.no_grad()
def _perturb_weights(weights: Iterable[nn.Parameter]) -> None:
    """Change weights as steps would, the same way on all ranks that hold the same part of them."""
    for weight in weights:
        if weight.requires_grad:
            part = local_tensor(weight)
            places = torch.arange(part.numel(), device=part.device).view(part.shape)
            part.mul_(1 + 0.05 * places.cos().to(part.dtype))


def _find_carried_state(passes: _ForwardPasses, rows: int, *, halves: bool) -> str:
    """Return the name of a part that depends on the passes of a step; empty where there is none."""
    all_rows = torch.arange(rows)
    first, second = (
        (all_rows[: rows // 2], all_rows[rows // 2 :]) if halves else (all_rows, torch.zeros_like(all_rows))
    )
    changes = passes.run(all_rows).changes_anything
    if any_rank(passes.has_unkeyed_draws, passes.trainer):
        return _UNKEYED_DRAWS
    if not any_rank(changes, passes.trainer):
        return ""
    with passes.on_perturbed_weights() as passes:
        return _difference(passes, all_rows, first, second, halves=halves)


def _difference(
    passes: _ForwardPasses, all_rows: Tensor, first: Tensor, second: Tensor, *, halves: bool
) -> str:
    single_pass, tolerance = passes.run(all_rows), passes.tolerance
    outcomes = {name: passes.run(*history) for name, history in _histories(all_rows, first, second).items()}
    part = ""
    if passes.has_several_micro_batches:
        part = _first_unequal_change(single_pass, outcomes["both"], tolerance) or _outputs(
            outcomes["second"], outcomes["both"], tolerance
        )
        part = part or _outputs(outcomes["both, first"], outcomes["whole, first"], tolerance)
    if passes.has_several_data_ranks or not halves:  # a rank sees its own rows only
        part = part or _first_unequal_change(outcomes["first"], outcomes["second"], tolerance)
        part = part or _first_unequal_change(single_pass, outcomes["first"], tolerance)
        part = part or _outputs(outcomes["first, first"], outcomes["whole, first"], tolerance)
    return part


def _histories(all_rows: Tensor, first: Tensor, second: Tensor) -> dict[str, tuple[Tensor, ...]]:
    return {
        "first": (first,),
        "second": (second,),
        "both": (first, second),
        "first, first": (first, first),
        "whole, first": (all_rows, first),
        "both, first": (first, second, first),
    }


def _first_unequal_change(one: _PassResult, other: _PassResult, tolerance: float) -> str:
    """Return the name of the first tensor that two histories leave with unlike values."""
    a, b = one.changes, other.changes
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b or _differ(a[name], b[name], tolerance):
            return name
    return ""


def _outputs(one: _PassResult, other: _PassResult, tolerance: float) -> str:
    pairs = zip(one.outputs, other.outputs, strict=False)
    return "the output of the model" if any(_differ(a, b, tolerance) for a, b in pairs) else ""


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return True
    kind = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(kind), other.to(kind)
    if not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        return False
    return bool((a - b).abs().sum() > tolerance * torch.maximum(a.abs(), b.abs()).sum())


def _refuse_if_found(trainer: Trainer, part: str) -> None:
    if not any_rank(bool(part), trainer):
        return
    plan, samples = trainer.plan, trainer.job.train.global_batch
    name = next(name for name in all_gather_objects(part, plan.world_size) if name)
    cut = batch_cut_text(plan, samples)
    remedy = (
        "change no state of the model in its forward pass, or only state that depends on neither the "
        "samples nor the number of passes"
    )
    if name == _UNKEYED_DRAWS:
        remedy = "use random numbers of torch: wanma keys them by sample"
    raise JobError(
        f"{name} depends on earlier forward passes. A loop over the global batch of {samples} samples has "
        f"one pass per step, so {cut} would train another model",
        f"{remedy}; or train on one rank with parallel.micro_batch = {samples}",
    )


@contextmanager
def _eager_without_gradients(trainer: Trainer) -> Iterator[None]:
    """Disable gradients and compilation, and evaluate grouped normalization, within the context."""
    parts = trainer.state.parallel_model.model_parts
    with eager_without_gradients(trainer.plan), evaluation_of_coupling_modules(parts, evaluates=False):
        yield
