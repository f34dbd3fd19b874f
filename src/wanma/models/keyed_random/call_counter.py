"""Counter of the keyed draws of one forward, which repeats its numbers where backward recomputes a part."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import numpy as np
import torch

from wanma.job.errors import WanmaError

_BASE = 1 << 62
_MAX_CALLS = 1 << 24
"""Maximum number of keyed draws of one forward."""


class CallCounter:
    """Counter of the calls of each drawing module within one forward.

    The count of all calls is kept in the seed of torch's CPU generator, which every form of
    `torch.utils.checkpoint` saves before it runs a part of a model and restores before it recomputes it
    (`preserve_rng_state`). So a call that comes with an earlier count is that earlier call.
    """

    def __init__(self, forward: int) -> None:
        """Start the count.

        Args:
            forward: number of the forward in this process.
        """
        self._base = _BASE + (forward % (1 << 38)) * _MAX_CALLS
        self._recorded_calls: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()
        self.has_forward_ended = False
        """True if the forward has ended: every further call is a repeated one."""
        self.has_backward_ended = False
        """True if backward has ended too: nothing is repeated any more."""
        self._saved_generator_state = torch.default_generator.get_state()

    def __enter__(self) -> CallCounter:
        torch.default_generator.manual_seed(self._base)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.has_backward_ended = True
        torch.default_generator.set_state(self._saved_generator_state)

    @property
    def has_drawn(self) -> bool:
        """True if the generator has been drawn from since it was last seeded here."""
        if self.is_reseeded:
            return False
        reseeded = torch.Generator().manual_seed(torch.default_generator.initial_seed())
        # Not torch.equal, which fake tensors do not support.
        return not np.array_equal(reseeded.get_state().numpy(), torch.default_generator.get_state().numpy())

    @property
    def is_reseeded(self) -> bool:
        """True if the forward has seeded the generator itself."""
        return not 0 <= torch.default_generator.initial_seed() - self._base <= len(self._recorded_calls)

    def next_index(self, name: str) -> int:
        """Return the number of calls of `name` before this one in the forward.

        Raises:
            WanmaError: the call is a repeated one and cannot be told from others of the same module.
        """
        position = torch.default_generator.initial_seed() - self._base  # as checkpointing restores it
        if 0 <= position < len(self._recorded_calls) and self._recorded_calls[position][0] == name:
            call = self._recorded_calls[position][1]
        elif self.has_forward_ended:
            if self._counts[name] != 1:
                raise WanmaError(
                    f"'{name}' draws random numbers {self._counts[name]} times in a forward, and recompute "
                    "repeats an unknown part of them",
                    "keep preserve_rng_state=True of torch.utils.checkpoint, and run the same operations in "
                    "both forwards",
                )
            return 0
        else:
            position, call = len(self._recorded_calls), self._counts[name]
            self._counts[name] += 1
            self._recorded_calls.append((name, call))
        torch.default_generator.manual_seed(self._base + position + 1)
        return call
