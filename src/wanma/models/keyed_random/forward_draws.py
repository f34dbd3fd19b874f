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
from wanma.models.keyed_random.call_counter import Calls
from wanma.models.keyed_random.dropout import keyed_samples
from wanma.models.keyed_random.operator_draws import Arrangement, KeyedDraws


class RandomDraws:
    """Keeper of one model's random numbers, the same on every layout.

    Args:
        seed: the job's.
        unable: reason why per-sample numbers cannot be keyed under this plan ("parallel.tp = 2"); or None.
        unable_single: reason why per-step numbers cannot be keyed; None: they can.
        sees_operators: True if forwards run operator by operator; compiled ones only reveal that they drew.
    """

    def __init__(
        self,
        seed: int,
        *,
        unable: str | None = None,
        unable_single: str | None = None,
        sees_operators: bool = True,
    ) -> None:
        self.seed, self.sees_operators = seed, sees_operators
        self.unable, self.unable_single = unable, unable_single
        self.is_watching = True
        """Switch of all checks; off for forwards on tensors without content, which draw nothing real."""
        self.step = 0
        """Optimizer step that the next forwards belong to."""
        self.known: dict[int, str] = {}
        """Kinds of single numbers by the number of their draw, as in `KeyedDraws`."""
        self._keys: dict[tuple[int, bool], bool] = {}
        """Flag by (module, training mode): its operators are answered with keyed numbers.

        Empty before the first forward.
        """
        self._forwards = 0

    def forward(self, module: nn.Module, samples: Tensor, positions: Tensor | None = None) -> Forward:
        """Return the context of a micro-batch's forward, its loss, and its backward.

        Args:
            module: the model.
            samples: (rows,) int64, on the activations' device.
            positions: as of `keyed_samples`.
        """
        self._forwards += 1
        return Forward(self, module, samples, positions, Calls(self._forwards))

    def mode(self, module: nn.Module, samples: Tensor, calls: Calls) -> KeyedDraws | None:
        """Return the dispatch mode that answers a forward's operators; None: it is known to draw nothing."""
        if not (self.is_watching and self.sees_operators) or not self._keys.get(
            (id(module), module.training), True
        ):
            return None
        return KeyedDraws(self.seed, self.step, samples, calls, self.known, self.unable, self.unable_single)

    def note(self, module: nn.Module, drew: bool) -> bool:
        """Record whether a forward drew; return True if any has."""
        kind = id(module), module.training
        self._keys[kind] = self._keys.get(kind, False) or drew
        return self._keys[kind]


class Forward:
    """Forward of one micro-batch, in which every draw is keyed."""

    def __init__(
        self, draws: RandomDraws, module: nn.Module, samples: Tensor, positions: Tensor | None, calls: Calls
    ) -> None:
        self._draws, self._module, self._samples, self._positions = draws, module, samples, positions
        self._calls = calls
        self._announced, self._numbered, self._answered = ExitStack(), ExitStack(), ExitStack()
        self._mode: KeyedDraws | None = None
        self._given = 0
        """Offset of the GPU's generator at the start."""

    def __enter__(self) -> Forward:
        draws, calls = self._draws, self._calls
        self._numbered.enter_context(calls)
        announced = keyed_samples(self._module, draws.seed, self._samples, self._positions, calls)
        self._announced.enter_context(announced)
        self._given = _given(self._samples.device)
        self._mode = draws.mode(self._module, self._samples, calls)
        if self._mode is not None:
            self._answered.enter_context(self._mode)
            self._answered.enter_context(_arranging(self._module, self._mode))
        return self

    def end(self) -> None:
        """Mark the end of the forward and the loss; backward may follow.

        Raises:
            WanmaError: something has drawn that was not keyed.
        """
        self._answered.close()
        calls, mode = self._calls, self._mode
        calls.ended = True
        if not self._draws.is_watching:
            return
        if calls.has_drawn or _given(self._samples.device) != self._given:
            raise self._drawn()
        if mode is not None and self._draws.note(self._module, mode.draws > 0):
            self._answered.enter_context(mode)  # backward may recompute parts of the forward

    def finish(self) -> None:
        """Mark the end of backward: later draws are not training's."""
        self._answered.close()
        self._numbered.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._announced:
            self.finish()

    def _drawn(self) -> WanmaError:
        if self._mode is not None:
            why, remedy = "a compiled function draws", "draw outside of what torch.compile compiles"
        elif self._draws.sees_operators:
            why = "it is the first forward that draws"
            remedy = "draw in the first forward too (multiply by 0 what is not to count yet)"
        else:
            why, remedy = "parallel.compile = true hides them", "set parallel.compile = false"
        return WanmaError(
            "the forward draws random numbers that wanma cannot key by sample, so that other ranks and "
            f"micro-batches would draw others, and train another model: {why}",
            f"{remedy}, or draw by nn.Dropout modules only",
        )


def _given(device: torch.device) -> int:
    """Return the offset of a GPU's generator; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.default_generators[device.index or 0].get_offset())


def _arranging(model: nn.Module, mode: KeyedDraws) -> ExitStack:
    """Tell `mode` where torch's own modules have the sample dim in their draws, until the stack is closed."""
    stack = ExitStack()

    def arrange(modules: Iterable[nn.Module], arrangement: Arrangement) -> None:
        def begin(*_: object) -> None:
            mode.arrangement = arrangement

        def end(*_: object) -> None:
            mode.arrangement = "batch first"

        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)

    def those(kind: type[nn.Module]) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, kind) and module.dropout]

    arrange(those(nn.RNNBase), "batch second")
    arrange(those(nn.MultiheadAttention), "heads folded in")
    return stack
