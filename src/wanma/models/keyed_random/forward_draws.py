"""Random numbers of a user's forward and loss: detected in the first forward, keyed from then on.

A model without any only pays for a check of the generators' states, by which later draws are detected.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.models.keyed_random.call_counter import CallCounter
from wanma.models.keyed_random.dropout import bind_samples
from wanma.models.keyed_random.operator_draws import KeyedDrawMode, SampleDimPosition


class RandomDraws:
    """Keeper of one model's random numbers, the same on every layout.

    Args:
        seed: the job's.
        per_sample_obstacle: reason why per-sample numbers cannot be keyed under this plan ("parallel.tp =
            2"); or None.
        per_step_obstacle: reason why per-step numbers cannot be keyed; None: they can.
        sees_operators: True if forwards run operator by operator; compiled ones only reveal that they drew.
    """

    def __init__(
        self,
        seed: int,
        *,
        per_sample_obstacle: str | None = None,
        per_step_obstacle: str | None = None,
        sees_operators: bool = True,
    ) -> None:
        self.seed, self.sees_operators = seed, sees_operators
        self.per_sample_obstacle, self.per_step_obstacle = per_sample_obstacle, per_step_obstacle
        self.is_checking = True
        """Switch of all checks; off for forwards on tensors without content, which draw nothing real."""
        self.step = 0
        """Optimizer step that the next forwards belong to."""
        self.single_draw_kinds: dict[int, str] = {}
        """Kinds of single numbers by the number of their draw, as in `KeyedDrawMode`."""
        self._module_draws: dict[tuple[int, bool], bool] = {}
        """Flag by (module, training mode): its operators are answered with keyed numbers.

        Empty before the first forward.
        """
        self._forward_count = 0

    def forward(
        self, module: nn.Module, sample_indices: Tensor, positions: Tensor | None = None
    ) -> KeyedForward:
        """Return the context of a micro-batch's forward, its loss, and its backward.

        Args:
            module: the model.
            sample_indices: (rows,) int64, on the activations' device.
            positions: as of `bind_samples`.
        """
        self._forward_count += 1
        return KeyedForward(self, module, sample_indices, positions, CallCounter(self._forward_count))

    def dispatch_mode(
        self, module: nn.Module, sample_indices: Tensor, call_counter: CallCounter
    ) -> KeyedDrawMode | None:
        """Return the dispatch mode that answers a forward's operators; None: it is known to draw nothing."""
        if not (self.is_checking and self.sees_operators) or not self._module_draws.get(
            (id(module), module.training), True
        ):
            return None
        return KeyedDrawMode(
            self.seed,
            self.step,
            sample_indices,
            call_counter,
            self.single_draw_kinds,
            self.per_sample_obstacle,
            self.per_step_obstacle,
        )

    def record_forward(self, module: nn.Module, drew: bool) -> bool:
        """Record whether a forward drew; return True if any has."""
        kind = id(module), module.training
        self._module_draws[kind] = self._module_draws.get(kind, False) or drew
        return self._module_draws[kind]


class KeyedForward:
    """Forward of one micro-batch, in which every draw is keyed."""

    def __init__(
        self,
        draws: RandomDraws,
        module: nn.Module,
        sample_indices: Tensor,
        positions: Tensor | None,
        call_counter: CallCounter,
    ) -> None:
        self._draws, self._module, self._sample_indices, self._positions = (
            draws,
            module,
            sample_indices,
            positions,
        )
        self._call_counter = call_counter
        self._sample_contexts, self._call_counting, self._dispatch_modes = (
            ExitStack(),
            ExitStack(),
            ExitStack(),
        )
        self._mode: KeyedDrawMode | None = None
        self._start_offset = 0
        """Offset of the GPU's generator at the start."""

    def __enter__(self) -> KeyedForward:
        draws, calls = self._draws, self._call_counter
        self._call_counting.enter_context(calls)
        bound_samples = bind_samples(self._module, draws.seed, self._sample_indices, self._positions, calls)
        self._sample_contexts.enter_context(bound_samples)
        self._start_offset = _generator_offset(self._sample_indices.device)
        self._mode = draws.dispatch_mode(self._module, self._sample_indices, calls)
        if self._mode is not None:
            self._dispatch_modes.enter_context(self._mode)
            self._dispatch_modes.enter_context(_track_sample_dim(self._module, self._mode))
        return self

    def end_forward(self) -> None:
        """Mark the end of the forward and the loss; backward may follow.

        Raises:
            WanmaError: something has drawn that was not keyed.
        """
        self._dispatch_modes.close()
        calls, mode = self._call_counter, self._mode
        calls.has_forward_ended = True
        if not self._draws.is_checking:
            return
        if calls.has_drawn or _generator_offset(self._sample_indices.device) != self._start_offset:
            raise self._unkeyed_draw_error()
        if mode is not None and self._draws.record_forward(self._module, mode.draw_count > 0):
            self._dispatch_modes.enter_context(mode)  # backward may recompute parts of the forward

    def end_backward(self) -> None:
        """Mark the end of backward: later draws are not training's."""
        self._dispatch_modes.close()
        self._call_counting.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._sample_contexts:
            self.end_backward()

    def _unkeyed_draw_error(self) -> WanmaError:
        if self._mode is not None:
            reason, remedy = (
                "they are drawn in a compiled function",
                "draw outside functions that torch.compile compiles",
            )
        elif self._draws.sees_operators:
            reason = "earlier forwards drew none"
            remedy = "draw in the first forward too (multiply the result by 0 if it is not needed)"
        else:
            reason, remedy = "parallel.compile = true hides them", "set parallel.compile = false"
        return WanmaError(
            "the forward draws random numbers that depend on rank and micro-batch, because wanma cannot key "
            f"them by sample: {reason}",
            f"{remedy}, or use random numbers only in nn.Dropout modules",
        )


def _generator_offset(device: torch.device) -> int:
    """Return the offset of a GPU's generator; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.default_generators[device.index or 0].get_offset())


def _track_sample_dim(model: nn.Module, mode: KeyedDrawMode) -> ExitStack:
    """Tell `mode` where torch's own modules have the sample dim in their draws, until the stack is closed."""
    stack = ExitStack()

    def arrange(modules: Iterable[nn.Module], arrangement: SampleDimPosition) -> None:
        def begin(*_: object) -> None:
            mode.sample_dim_position = arrangement

        def end(*_: object) -> None:
            mode.sample_dim_position = "batch first"

        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)

    def those(kind: type[nn.Module]) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, kind) and module.dropout]

    arrange(those(nn.RNNBase), "batch second")
    arrange(those(nn.MultiheadAttention), "heads folded in")
    return stack
