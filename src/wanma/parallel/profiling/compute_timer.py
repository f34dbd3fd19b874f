"""Timer of a rank's compute seconds per step, without its waits for other ranks.

A rank's pace, and which rank is slow, follow from it. On a CPU every wait is timed where it happens, and left
out. A GPU waits within its queue: there the device's own clock times the forward alone, in which data ranks
exchange nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEP_TO_FORWARD_RATIO = 3.0
"""Ratio of the time of forward and backward to that of the forward.

Backward computes the gradients of inputs and of weights (Kaplan et al. 2020, section 2.1). Ranks are compared
with each other, so that an error in it cancels.
"""


class ComputeTimer:
    """Timer of the pieces of a step between `start` and `stop`, or of a step's compute in one piece.

    Args:
        device: "cpu" or "cuda".
        get_waited_seconds: returns the seconds that this process has waited for other ranks so far; not
            called on GPUs.
        per_micro_batch: true if the rank waits for others between the pieces, untimed, as in a pipeline.

    Attributes:
        is_enabled: true if pieces count; evaluation's do not.
    """

    def __init__(
        self, device: str, get_waited_seconds: Callable[[], float], *, per_micro_batch: bool
    ) -> None:
        self.is_enabled = True
        self._per_micro_batch = per_micro_batch or device == "cuda"
        self._device, self._get_waited_seconds = device, get_waited_seconds
        self._seconds = 0.0
        self._start: tuple[float, float] | None = None
        self._event_pairs: list[tuple[Any, Any]] = []
        self._event: Any = None

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Time all of a step's forwards and backwards, and what is between them, in one piece if possible."""
        if self._per_micro_batch:
            yield
            return
        self.start()
        self.is_enabled = False
        try:
            yield
        finally:
            self.is_enabled = True
            self.stop(is_forward=False)

    def start(self) -> None:
        """Start the timer: a forward or a backward of this rank begins."""
        if not self.is_enabled:
            return
        if self._device == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._start = (time.perf_counter(), self._get_waited_seconds())

    def stop(self, *, is_forward: bool) -> None:
        """Stop the timer: the forward or backward has ended, or on a GPU is queued."""
        if not self.is_enabled:
            return
        if self._device == "cuda":
            if self._event is not None and is_forward:
                end: Any = torch.cuda.Event(enable_timing=True)
                end.record()
                self._event_pairs.append((self._event, end))
            self._event = None
        elif self._start is not None:
            start, start_wait = self._start
            self._seconds += max(time.perf_counter() - start - (self._get_waited_seconds() - start_wait), 0.0)
            self._start = None

    def pop_seconds(self) -> float:
        """Return the seconds since the last call; on a GPU, call it when all that was queued has ended."""
        if self._device == "cuda":
            event_pairs, self._event_pairs = self._event_pairs, []
            forwards: float = sum(begin.elapsed_time(end) for begin, end in event_pairs)
            return STEP_TO_FORWARD_RATIO * forwards / 1e3  # from milliseconds
        seconds, self._seconds = self._seconds, 0.0
        return seconds
