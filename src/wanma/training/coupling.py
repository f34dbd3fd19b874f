"""A check before the first step that the loss of a sample does not depend on its micro-batch.

A plain loop computes the loss of a sample beside all others of the global batch. A layout that cuts the batch
would compute it beside others, and so train another model without a word: it is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.data.batch import IGNORED, Batch
from wanma.data.data import Data
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan import Plan
from wanma.models.statistics import GroupedBatchNorm, noting_modules
from wanma.parallel.global_batch import GlobalBatch, announce
from wanma.parallel.parallelize import Parallel
from wanma.training.trainer import Trainer
from wanma.training.undisturbed import undisturbed

Losses = Callable[[Batch], tuple[Tensor, Tensor]]
"""From a batch to (sum of the losses of its real rows, their number)."""

_ROWS = 8
"""Samples that are enough to see it."""
_SAME_SHAPE, _SAME_SHAPE_LOW = 1e-5, 1e-2
"""Relative difference that rounding may make between batches of one shape, in fp32 and in 16 bits."""
_OTHER_SHAPE = 5e-2
"""Likewise between batches of other sizes: what depends on their size at all differs by far more."""


@dataclass(frozen=True)
class Checked:
    """A user's code, as it is to be checked."""

    losses: Losses
    model_is_own: bool = True
    """False: the model is one of wanma's, of which only the loss is in question."""
    loss_is_own: bool = True
    """False: the loss is wanma's, and integer targets say which rows count."""
    others: tuple[object, ...] = ()
    """Objects beside the model that a forward may change."""


def refuse_coupling(trainer: Trainer, data: Data, checked: Checked, gathering: GlobalBatch) -> None:
    """Compare the losses of some samples beside different other ones.

    Every rank computes the same few samples, without gradients, and nothing of it stays. Nothing is computed
    where one rank has the whole global batch in one micro-batch: there any loss is that of a plain loop.

    Raises:
        JobError: they differ; all ranks raise it.
    """
    plan, state, samples = trainer.plan, trainer.state, trainer.job.train.global_batch
    if not is_cut(trainer):
        return
    found: tuple[bool, bool] | None = None
    with ExitStack() as stack:
        if plan.compile or "torch._dynamo" in sys.modules:
            # Compiled code is made for the shapes of the steps.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        for rows in _rows(plan, samples):
            batch = data.batch(range(state.samples, state.samples + rows)).to(trainer.grid.device)
            recorded = _Recorded(lambda: gathering.refuse(plan, samples))
            found = _compare(state.parallel, batch, checked, recorded, plan)
            if found is not None:
                break
    state.parallel.begin_steps()
    refuse_together(trainer, *(found or (False, False)))


def is_cut(trainer: Trainer) -> bool:
    """Whether steps are to come whose samples are not all computed beside each other."""
    plan, samples = trainer.plan, trainer.job.train.global_batch
    whole = plan.data_ranks == 1 and plan.accumulation(samples) == 1
    return not whole and samples > 1 and trainer.state.step < trainer.job.train.steps


def _rows(plan: Plan, samples: int) -> list[int]:
    """Numbers of rows to try: few, and as many as a micro-batch has, if a user's code takes no others."""
    if plan.pp > 1:  # whose stages are told their shapes
        return [plan.micro_batch] if plan.micro_batch > 1 else []
    largest = min(max(math.ceil(plan.most_rows(samples) / plan.accumulation(samples)), 2), samples)
    return list(dict.fromkeys((min(_ROWS, largest), largest)))


def _compare(
    parallel: Parallel, batch: Batch, checked: Checked, recorded: _Recorded, plan: Plan
) -> tuple[bool, bool] | None:
    """Whether the first half's losses depend on which other samples there are, and on how many.

    None where a user's code does not take so many rows.
    """
    rows = torch.arange(batch.rows, device=batch.samples.device)
    half = batch.rows // 2
    batches = [
        _selected(batch, chosen, half, ignores=not checked.loss_is_own)
        for chosen in (rows, torch.where(rows < half, rows, rows % half), rows[:half])
    ]
    if plan.pp > 1:
        del batches[2]
    numbers: list[tuple[float, float]] = []
    with undisturbed(parallel.parts, checked.others) as kept, announce(recorded):
        try:
            for given in batches:
                with _uncoupling(parallel.parts, evaluates=not checked.model_is_own):
                    total, count = checked.losses(given)
                numbers.append((float(total), float(count)))
                for part in parallel.parts:
                    for module in noting_modules(part).values():
                        module.take()
                parallel.rest()
                parallel.settle()
                kept.put_back()
                recorded.rewind()
        except WanmaError:
            raise
        except Exception:
            if not numbers:
                return None
    while len(numbers) < 3:  # what this code does not take, no layout will give it
        numbers.append(numbers[0])
    whole, beside_others, fewer = numbers
    return _differ(whole, beside_others, _tolerance(plan)), _differ(whole, fewer, _OTHER_SHAPE)


class _Recorded:
    """Answers `global_batch` with the rows at hand, and in later passes with those of the first: losses that
    gather the global batch then depend on nothing else of the batch."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._given: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """Begin the next pass."""
        self._next = 0

    def gather(self, x: Tensor) -> Tensor:
        self._refuse()
        if self._next == len(self._given):
            self._given.append(x.detach().clone())
        self._next += 1
        return self._given[self._next - 1]

    def indices(self, x: Tensor) -> Tensor:
        self._refuse()
        return torch.arange(len(x), device=x.device)


@contextmanager
def _uncoupling(parts: Iterable[nn.Module], *, evaluates: bool) -> Iterator[None]:
    """Put in evaluation mode what couples samples by groups that the job fixes; `evaluates`: everything."""
    were = [(module, module.training) for part in parts for module in part.modules()]
    for module, _ in were:
        if evaluates or isinstance(module, GroupedBatchNorm):
            module.training = False
    try:
        yield
    finally:
        for module, training in were:
            module.training = training


def _selected(batch: Batch, rows: Tensor, half: int, *, ignores: bool) -> Batch:
    """The content of other rows, of which the first half counts; which samples they are said to be stays.

    Args:
        ignores: where targets are classes, `IGNORED` says what does not count.
    """
    targets = batch.targets[rows]
    if ignores and targets.dtype == torch.int64:
        targets[half:] = IGNORED
    return replace(
        batch,
        inputs=tuple(tensor[rows] for tensor in batch.inputs),
        targets=targets,
        samples=batch.samples[: len(rows)],
        real=torch.arange(len(rows), device=rows.device) < half,
        keywords={name: tensor[rows] for name, tensor in batch.keywords.items()},
    )


def _tolerance(plan: Plan) -> float:
    return _SAME_SHAPE_LOW if plan.precision in ("bf16", "fp16") or plan.fp8 else _SAME_SHAPE


def _differ(one: tuple[float, float], other: tuple[float, float], tolerance: float) -> bool:
    return any(
        math.isfinite(a) and math.isfinite(b) and abs(a - b) > tolerance * max(abs(a), abs(b))
        for a, b in zip(one, other, strict=True)
    )


def refuse_together(trainer: Trainer, by_content: bool, by_number: bool) -> None:
    """Refuse what any rank has found; every rank calls it.

    Args:
        by_content: losses depend on which other samples there are.
        by_number: they depend on how many.
    """
    plan, samples = trainer.plan, trainer.job.train.global_batch
    verdict = torch.tensor([by_content, by_number], dtype=torch.float64, device=trainer.grid.device)
    if plan.world_size > 1:
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    by_content, by_number = (bool(value) for value in verdict.tolist())
    if not by_content and not by_number:
        return
    what = "which other samples share" if by_content else "how many samples share"
    count = plan.accumulation(samples)
    cut = f"{plan.data_ranks} data ranks" if plan.data_ranks > 1 else f"one rank in {count} micro-batches"
    raise JobError(
        f"the loss of a sample depends on {what} its micro-batch, and {cut} would train another model than a "
        f"loop over the global batch of {samples} samples",
        "let the loss or the model see all of it by wanma.global_batch (docs/python.md), and divide by no "
        "number of rows: wanma divides once by all targets; or train on one rank with "
        f"parallel.micro_batch = {samples}",
    )
