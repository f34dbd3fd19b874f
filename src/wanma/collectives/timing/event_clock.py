"""Clock of a GPU's stream: CUDA events, recorded while work is queued and read when it has ended.

The host of a GPU does not wait for a collective: its stream does. Two events around the wait have its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """Point in a stream's work, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Queue the event on the current stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds to another event; both have been reached."""


def create_cuda_event() -> DeviceEvent:
    """Create an event that keeps its time."""
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event


class EventClock:
    """Clock of the current stream, whose events are used again in every step.

    Args:
        create_event: constructor of an event; called in the first step, and where a step has more events.
    """

    def __init__(self, create_event: Callable[[], DeviceEvent] = create_cuda_event) -> None:
        self._create_event = create_event
        self._events: list[DeviceEvent] = []
        self._used = 0

    def now(self) -> DeviceEvent:
        """Queue an event on the current stream and return it, without a wait."""
        if self._used == len(self._events):
            self._events.append(self._create_event())
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Return the seconds between two events; call it when the host has waited for their stream."""
        return start.elapsed_time(end) / 1e3

    def restart(self) -> None:
        """Begin a step: all events are used again, and none of the last step is read any more."""
        self._used = 0
