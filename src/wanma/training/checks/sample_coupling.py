"""Check before the first step that losses add up, however the global batch is cut into micro-batches.

A plain loop computes the loss of a sample beside all others of the global batch. A layout that cuts the batch
computes it beside others. Where that changes their sum, it would train another model: it is refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.models.layers.batch_norm import GroupedBatchNorm, find_step_statistics_modules
from wanma.models.user_modules.forward_error import ForwardError, is_user_error
from wanma.observe.units import count_text
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer, provide_global_batch
from wanma.parallel.parallelize import ParallelModel
from wanma.parallel.parameters.forward_changes import lost_change_error
from wanma.torch_internals.loaded import is_compiler_loaded
from wanma.training.checks.rounding_noise import NOISE_PASSES, ROUNDING_MARGIN, rounding_noise
from wanma.training.checks.state_restoration import SavedState, preserve_state
from wanma.training.run.trainer import Trainer

LossSumFunction = Callable[[Batch], tuple[Tensor, Tensor]]
"""Function from a batch to (sum of the losses of its real rows, their number)."""
LossSums = tuple[float, float]

_TRIAL_ROWS = 4
"""Number of samples that suffice to see it; in halves of one row, no row has another at a distance of two."""
_SAME_SHAPE_TOLERANCE, _SAME_SHAPE_TOLERANCE_16_BIT = 1e-5, 1e-2
"""Relative difference that rounding may make between batches of one shape, in fp32 and in 16 bits."""
_OTHER_SHAPE_TOLERANCE = 5e-2
"""Relative difference that rounding may make between batches of different sizes.

A dependence on their size makes a far larger one.
"""


@dataclass(frozen=True)
class UserCode:
    """User's code to check."""

    losses: LossSumFunction
    is_user_model: bool = True
    """True if the model is the user's; else only the loss is in question."""
    other_objects: tuple[object, ...] = ()
    """Objects beside the model that a forward may change."""


def refuse_sample_coupling(
    trainer: Trainer, data: BatchedDataset, user_code: UserCode, gatherer: GlobalBatchGatherer
) -> None:
    """Compare sums of losses of some samples beside different other samples.

    Every rank computes the same few samples, without gradients, and nothing of it stays. Nothing is computed
    where one rank has the entire global batch in one micro-batch: there any loss is that of a plain loop.

    Raises:
        JobError: the sums do not add up; all ranks raise it.
    """
    if not is_batch_split(trainer):
        return
    plan, state, samples = trainer.plan, trainer.state, trainer.job.train.global_batch
    coupling: tuple[bool, bool] | None = None
    failures: list[Exception] = []
    micro_batch_rows = _micro_batch_rows(plan, samples)
    with eager_without_gradients(plan):
        for rows in _trial_row_counts(plan, samples):
            batch = data.batch(range(state.samples, state.samples + rows)).to(trainer.parallel_mesh.device)
            recorded = _RecordedGlobalBatch(lambda: gatherer.require_gatherable(plan, samples))
            with (
                preserve_state(state.parallel_model.model_parts, user_code.other_objects) as saved_state,
                provide_global_batch(recorded),
            ):
                failures.clear()  # failures of fewer rows: those of more rows decide
                passes = _LossPasses(
                    state.parallel_model, user_code, recorded, saved_state, micro_batch_rows, failures
                )
                coupling = _compare(trainer, batch, passes)
                passes.end()
            if coupling is not None:
                break
    refuse_if_coupled(trainer, *(coupling or (False, False)))
    if failures and micro_batch_rows > 1:  # a sample alone has no others
        trainer.message(_unchecked(failures[0], trainer, coupling is None), "warning")


def is_batch_split(trainer: Trainer) -> bool:
    """Return whether later steps compute some samples apart from each other."""
    plan, samples = trainer.plan, trainer.job.train.global_batch
    is_one_micro_batch = plan.data_parallel_size == 1 and plan.gradient_accumulation_steps(samples) == 1
    return not is_one_micro_batch and samples > 1 and not trainer.state.is_over(trainer.job.train)


def _trial_row_counts(plan: Plan, samples: int) -> list[int]:
    """Return the numbers of rows to try: few, and a micro-batch's, if the user's code takes no others."""
    largest = max(_micro_batch_rows(plan, samples), 2)
    if plan.pp > 1:  # whose stages are told their shapes
        return [largest]
    largest = min(largest, samples)
    return list(dict.fromkeys((min(_TRIAL_ROWS, largest), largest)))


def _micro_batch_rows(plan: Plan, samples: int) -> int:
    """Return the largest number of rows of a step's micro-batch."""
    if plan.pp > 1:
        return plan.micro_batch
    return math.ceil(plan.max_rows_per_data_rank(samples) / plan.gradient_accumulation_steps(samples))


def _compare(trainer: Trainer, batch: Batch, passes: _LossPasses) -> tuple[bool, bool] | None:
    """Return whether the sum of losses depends on which samples are together, and on their number.

    With two halves A and B of a batch, sums that add up have f(AB) = f(A) + f(B) and f(AA) = f(A) + f(A). The
    first shows dependence on unlike samples, such as by statistics of the batch; the second shows it where
    only samples that are alike affect each other. Where both hold to rounding, nothing else is computed.

    Otherwise the cause may be rounding that depends on the shape, or a draw that no sample keys. So
    f(AB) + f(BA) = f(AA) + f(BB) decides, whatever is drawn for each row: these batches have one shape. Then
    f(AB) = f(A) + f(B) may fail by a number of rows alone, with a wide tolerance. An average over the
    micro-batch that is added to each of its losses adds up as well.

    Returns:
        None where a user's code does not take so many rows.
    """
    plan, half_rows = trainer.plan, batch.rows // 2
    rows = torch.arange(batch.rows, device=batch.samples.device)
    first, second, odd_row = rows.split([half_rows, half_rows, batch.rows - 2 * half_rows])

    def run(*parts: Tensor, start: int = 0) -> LossSums | None:
        return passes.run(batch, torch.cat(parts), start=start)

    if plan.pp > 1:
        run(rows)  # before the first, stages are run once more, to tell each other their shapes
    ab = run(rows)
    if ab is None:
        return None
    aa = run(first, first, odd_row)
    even: LossSums | None = ab
    twins = aa
    parts: tuple[LossSums | None, ...] = ()
    if plan.pp == 1:  # whose micro-batches may have any number of rows
        if len(odd_row):
            even, twins = run(first, second), run(first, first)
        parts = run(first), run(second, start=half_rows)
        add_up = _add_up(even, parts, plan)
        if not any_rank(not (add_up and _add_up(twins, (parts[0], parts[0]), plan)), trainer):
            return False, False
        moved = run(first, start=half_rows)  # other numbers may be drawn there
        if not any_rank(not (add_up and _add_up(twins, (parts[0], moved), plan)), trainer):
            return False, False
    ba, bb = run(second, first, odd_row), run(second, second, odd_row)
    by_content = is_coupled_by_content((ab, ba), (aa, bb), plan)
    rounding: LossSums | None = None
    if any_rank(by_content, trainer):  # or by rounding, where the loss is a difference of larger values
        rounding = passes.rounding(batch, rows, ab)
        _refuse_lost_changes(trainer, passes.changed_weights)
        by_content = by_content and is_coupled_by_content((ab, ba), (aa, bb), plan, rounding)
    if plan.pp > 1:
        return by_content, False
    by_number = _differ((even,), parts, _OTHER_SHAPE_TOLERANCE)
    if any_rank(by_number, trainer):  # or by rounding, or by draws that no sample keys
        other_draws = passes.run(batch, first, seed=1)
        rounding = rounding or passes.rounding(batch, rows, ab)
        by_number = _differ((even,), parts, _OTHER_SHAPE_TOLERANCE, rounding) and not _differ(
            parts[:1], (other_draws,), _SAME_SHAPE_TOLERANCE
        )
    return by_content, by_number


@dataclass(frozen=True)
class _LossPasses:
    """Forward passes that leave no trace."""

    parallel_model: ParallelModel
    user_code: UserCode
    recorded_batch: _RecordedGlobalBatch
    saved_state: SavedState
    micro_batch_rows: int
    """Rows of a step's micro-batch."""
    failures: list[Exception]
    """Exceptions of passes that the user's code did not take."""
    changed_weights: list[str] = field(default_factory=list)
    """Names of parameters of which a pass with noise has changed this rank's part."""

    def rounding(self, batch: Batch, rows: Tensor, sums: LossSums | None) -> LossSums:
        """Return the differences that rounding may make to the sums of `rows`, by noise of its size."""
        noisy = [self.run(batch, rows, noise=number) for number in range(NOISE_PASSES)]
        return rounding_of(sums, noisy)

    def run(
        self, batch: Batch, rows: Tensor, *, start: int = 0, seed: int = 0, noise: int | None = None
    ) -> LossSums | None:
        """Return the losses of `rows` of a batch in the positions from `start` on; None where that fails.

        Args:
            batch: batch of samples.
            rows: indices of the rows.
            start: first position by which draws are keyed.
            seed: seed of generators, so that all ranks draw the same.
            noise: number of the noise of the size of rounding in the model; None: without.

        Raises:
            WanmaError: training would raise it too, or it is not the fault of the user's model or loss.
        """
        parts = self.parallel_model.model_parts
        selection = select_rows(batch, rows, start)
        self.recorded_batch.begin(start)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            with (
                nullcontext() if noise is None else rounding_noise(parts, noise),
                evaluation_of_coupling_modules(parts, evaluates=not self.user_code.is_user_model),
            ):
                total, count = self.user_code.losses(selection)
            return float(total), float(count)
        except Exception as error:
            if isinstance(error, WanmaError) and not isinstance(error, ForwardError):
                raise
            if not self._is_expected(error, len(rows)):
                raise _broken(error, len(rows)) from error
            self.failures.append(error)
            return None
        finally:
            for part in parts:
                for module in find_step_statistics_modules(part).values():
                    module.pop_sums()
            if noise is not None:
                self.changed_weights.extend(self.saved_state.changed_parameters())
            self.saved_state.restore()

    def _is_expected(self, error: Exception, rows: int) -> bool:
        """Return whether a pass may fail this way.

        It may where the user's model or loss does not take these rows, or a split not so many.
        """
        if is_user_error(error):
            return True
        if isinstance(error, torch.OutOfMemoryError) or rows == self.micro_batch_rows:
            return False
        return isinstance(error, RuntimeError | ValueError)

    def end(self) -> None:
        """Restore the sharded state after the last pass; every rank calls it."""
        self.parallel_model.reshard()
        self.parallel_model.wait_until_weights_unused()
        self.parallel_model.reset_step_count()


class _RecordedGlobalBatch:
    """Stand-in for `global_batch` that returns the current rows, and in later passes those of the first.

    Losses that gather the global batch then depend on nothing else of the batch.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._gathered: list[Tensor] = []
        self._next = self._start = 0

    def begin(self, start: int) -> None:
        """Begin the next pass, of rows with the positions from `start` on."""
        self._next, self._start = 0, start

    def gather(self, x: Tensor) -> Tensor:
        self._refuse()
        if self._next == len(self._gathered):
            self._gathered.append(x.detach().clone())
        self._next += 1
        return self._gathered[self._next - 1]

    def indices(self, x: Tensor) -> Tensor:
        self._refuse()
        return torch.arange(self._start, self._start + len(x), device=x.device)


@contextmanager
def eager_without_gradients(plan: Plan) -> Iterator[None]:
    """Disable gradients, and compiled code, which is made for the shapes of the steps, within the context."""
    is_compiled = plan.compile or is_compiler_loaded()
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext(), torch.no_grad():
        yield


@contextmanager
def evaluation_of_coupling_modules(parts: Iterable[nn.Module], *, evaluates: bool) -> Iterator[None]:
    """Set modules that couple samples by groups of the job to evaluation mode; `evaluates`: all modules."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for module, _ in modes:
        if evaluates or isinstance(module, GroupedBatchNorm):
            module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def select_rows(batch: Batch, rows: Tensor, start: int = 0) -> Batch:
    """Return the content of some rows with the positions from `start` on, by which draws are keyed."""
    places = slice(start, start + len(rows))
    return replace(
        batch,
        inputs=tuple(tensor[rows] for tensor in batch.inputs),
        targets=batch.targets[rows],
        samples=batch.samples[places],
        real=batch.real[places],
        keywords={name: tensor[rows] for name, tensor in batch.keywords.items()},
        named_targets=None
        if batch.named_targets is None
        else {name: tensor[rows] for name, tensor in batch.named_targets.items()},
    )


def _refuse_lost_changes(trainer: Trainer, changed_weights: Sequence[str]) -> None:
    """Refuse a forward that changes sharded weights: it changes the losses of ranks that share their memory.

    Raises:
        JobError: names the first such weight; all ranks raise it.
    """
    if trainer.plan.shard != "none" and any_rank(bool(changed_weights), trainer):
        name = changed_weights[0] if changed_weights else "a parameter"
        raise lost_change_error(name, on_cpu=trainer.plan.device == "cpu")


def _are_finite(sums: Iterable[LossSums | None]) -> bool:
    return all(loss_sums is not None and all(map(math.isfinite, loss_sums)) for loss_sums in sums)


def rounding_of(sums: LossSums | None, noisy_sums: Sequence[LossSums | None]) -> LossSums:
    """Return the differences, in losses and in their number, that rounding may make to `sums`.

    Args:
        sums: sums without noise.
        noisy_sums: the same with noise of the size of rounding.
    """
    finite_sums = [noisy for noisy in noisy_sums if _are_finite((sums, noisy))]
    if sums is None or not finite_sums:
        return 0.0, 0.0
    losses, counts = (
        max(abs(noisy - exact) for noisy in column) * ROUNDING_MARGIN
        for exact, column in zip(sums, zip(*finite_sums, strict=True), strict=True)
    )
    return losses, counts


def _add_up(whole: LossSums | None, parts: Sequence[LossSums | None], plan: Plan) -> bool:
    """Return whether known sums of the parts of a batch are that of the batch, up to rounding."""
    return _are_finite((whole, *parts)) and not is_coupled_by_content((whole,), parts, plan)


def _differ(
    first_sums: Sequence[LossSums | None],
    second_sums: Sequence[LossSums | None],
    tolerance: float,
    rounding: LossSums | None = None,
) -> bool:
    """Return whether two sums of sums differ by more than rounding; false where one of them is not known."""
    finite_sums = [
        sums for sums in (*first_sums, *second_sums) if sums is not None and all(map(math.isfinite, sums))
    ]
    if len(finite_sums) < len(first_sums) + len(second_sums):
        return False
    totals = (
        zip(*finite_sums[: len(first_sums)], strict=True),
        zip(*finite_sums[len(first_sums) :], strict=True),
    )
    return any(
        abs(sum(a) - sum(b)) > max(tolerance * max(sum(map(abs, a)), sum(map(abs, b))), floor)
        for a, b, floor in zip(*totals, rounding or (0.0, 0.0), strict=True)
    )


def _broken(error: Exception, rows: int) -> WanmaError:
    """Return the error of a check that fails for another reason than the user's code."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        hint = (
            "lower parallel.micro_batch: the check needs no more memory than a micro-batch without gradients"
        )
    else:
        hint = "see the traceback in the log of the rank; no step was trained"
    return WanmaError(
        f"the check that losses add up over micro-batches failed on {count_text(rows, 'sample')}: "
        f"{type(error).__name__}: {error}",
        hint,
    )


def _unchecked(error: Exception, trainer: Trainer, is_whole: bool) -> str:
    """Return the warning of a check that could not be made, of all samples or of some."""
    extent = "whether" if is_whole else "for some samples whether"
    cause = (str(error).splitlines() or [""])[0]
    if not isinstance(error, WanmaError):
        cause = f"{type(error).__name__}: {cause}"
    return (
        f"could not check {extent} the loss of a sample depends on other samples of its micro-batch, "
        f"because the model or the loss does not accept the samples of the check ({cause}). If it depends "
        "on them, this layout trains another model: compare some steps with one rank and "
        f"parallel.micro_batch = {trainer.job.train.global_batch}"
    )


def is_coupled_by_content(
    ones: Sequence[LossSums | None],
    others: Sequence[LossSums | None],
    plan: Plan,
    rounding: LossSums | None = None,
) -> bool:
    """Return whether sums over batches of one shape, f(AB) + f(BA) and f(AA) + f(BB), differ.

    They differ, too, where only the sums of samples beside copies of themselves are not finite.
    """
    if None not in (*ones, *others) and _are_finite(ones) and not _are_finite(others):
        return True
    low = plan.precision in ("bf16", "fp16") or plan.fp8
    tolerance = _SAME_SHAPE_TOLERANCE_16_BIT if low else _SAME_SHAPE_TOLERANCE
    return _differ(ones, others, tolerance, rounding)


def any_rank(found: bool, trainer: Trainer) -> bool:
    """Return whether any rank has found something; every rank calls it."""
    trainer.state.parallel_model.synchronize_gathers()
    verdict = torch.tensor(float(found), device=trainer.parallel_mesh.device)
    if trainer.plan.world_size > 1:
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    return bool(verdict)


def batch_cut_text(plan: Plan, samples: int) -> str:
    """Return the cut of a global batch in words: '4 data ranks', 'one rank in 2 micro-batches'."""
    if plan.data_parallel_size > 1:
        return f"{plan.data_parallel_size} data ranks"
    return f"one rank in {plan.gradient_accumulation_steps(samples)} micro-batches"


def refuse_if_coupled(trainer: Trainer, by_content: bool, by_number: bool) -> None:
    """Refuse losses that depend on other samples on any rank; every rank calls it.

    Args:
        trainer: this rank's run.
        by_content: true if losses depend on which other samples there are.
        by_number: true if they depend on their number.
    """
    plan, samples = trainer.plan, trainer.job.train.global_batch
    by_content, by_number = any_rank(by_content, trainer), any_rank(by_number, trainer)
    if not by_content and not by_number:
        return
    cause = "which other samples share" if by_content else "how many samples share"
    cut = batch_cut_text(plan, samples)
    raise JobError(
        f"the loss of a sample depends on {cause} its micro-batch, so {cut} would train another model than "
        f"a loop over the global batch of {samples} samples",
        "gather the global batch in the loss or the model with wanma.global_batch (docs/guides/losses.md), "
        "and do not divide by the number of rows: wanma divides once by the count of all targets; or train "
        f"on one rank with parallel.micro_batch = {samples}",
    )
