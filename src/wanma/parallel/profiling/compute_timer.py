"""Timer of a rank's compute seconds per step, without its waits for other ranks.

A rank's pace, and which rank is slow, follow from it. Every wait is timed where it happens, and left out. A
kernel of a GPU that computes beside a transfer takes longer: there the pace is that of the forward, in which
data ranks exchange nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from wanma.collectives.timing.event_clock import DeviceEvent, EventClock

STEP_TO_FORWARD_RATIO = 3.0
"""Ratio of the time of forward and backward to that of the forward.

Backward computes the gradients of inputs and of weights (Kaplan et al. 2020, section 2.1). Ranks are compared
with each other, so that an error in it cancels.
"""


class ComputeTime(NamedTuple):
    """Compute of a rank in a step, in seconds."""

    pace: float
    """Time by which ranks are compared: the compute; on a GPU `STEP_TO_FORWARD_RATIO` times the forward."""
    seconds: float | None
    """Forward and backward without waits for other ranks; None: it is unknown."""


@dataclass(frozen=True)
class _DevicePiece:
    """Forward or backward on a GPU, between two events, with the `get_waited` at each."""

    is_forward: bool
    start: DeviceEvent
    end: DeviceEvent
    start_wait: float
    end_wait: float


class ComputeTimer:
    """Timer of the pieces of a step between `start` and `stop`, or of a step's compute in one piece.

    Args:
        clock: clock of the rank's GPU; None: the host computes.
        get_waited: returns the seconds that this process has waited for other ranks so far; with a clock the
            number of its waits in this step.
        per_micro_batch: true if the rank waits for others between the pieces, untimed, as in a pipeline.

    Attributes:
        is_enabled: true if pieces count; evaluation's do not.
    """

    def __init__(
        self, clock: EventClock | None, get_waited: Callable[[], float], *, per_micro_batch: bool
    ) -> None:
        self.is_enabled = True
        self._per_micro_batch = per_micro_batch or clock is not None
        self._clock, self._get_waited = clock, get_waited
        self._seconds = 0.0
        self._host_start: tuple[float, float] | None = None
        self._device_start: tuple[DeviceEvent, float] | None = None
        self._device_pieces: list[_DevicePiece] = []

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
        if self._clock is not None:
            self._device_start = (self._clock.now(), self._get_waited())
        else:
            self._host_start = (time.perf_counter(), self._get_waited())

    def stop(self, *, is_forward: bool) -> None:
        """Stop the timer: the forward or backward has ended, or on a GPU is queued."""
        if not self.is_enabled:
            return
        if self._clock is not None and self._device_start is not None:
            event, position = self._device_start
            piece = _DevicePiece(is_forward, event, self._clock.now(), position, self._get_waited())
            self._device_pieces.append(piece)
            self._device_start = None
        elif self._host_start is not None:
            start, start_wait = self._host_start
            self._seconds += max(time.perf_counter() - start - (self._get_waited() - start_wait), 0.0)
            self._host_start = None

    def pop(self, waits: Sequence[float] | None = ()) -> ComputeTime:
        """Return the compute since the last call; on a GPU, call it when all that was queued has ended.

        Args:
            waits: on a GPU the seconds of its first n waits, by n; None: they are unknown.
        """
        if self._clock is None:
            seconds, self._seconds = self._seconds, 0.0
            return ComputeTime(seconds, seconds)
        pieces, self._device_pieces = self._device_pieces, []
        times = [self._clock.seconds(piece.start, piece.end) for piece in pieces]
        pace = STEP_TO_FORWARD_RATIO * sum(
            seconds for piece, seconds in zip(pieces, times, strict=True) if piece.is_forward
        )
        if waits is None or not pieces:
            return ComputeTime(pace, None)
        waited = sum(waits[int(piece.end_wait)] - waits[int(piece.start_wait)] for piece in pieces)
        return ComputeTime(pace, max(sum(times) - waited, 0.0))
