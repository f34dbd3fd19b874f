"""Stream of a GPU that is not there: work takes no time on the host; events can be read when it has ended."""

from __future__ import annotations

from wanma.collectives.timing.event_clock import EventClock


class FakeStream:
    """Queue of work.

    Attributes:
        seconds: time at which all work that has been queued will have ended.
        reached: time of the work that the host has waited for.
        recorded: number of events queued so far.
        events: events created, in their order.
    """

    def __init__(self) -> None:
        self.seconds = self.reached = 0.0
        self.recorded = 0
        self.events: list[FakeEvent] = []
        self.clock = EventClock(lambda: FakeEvent(self))

    def work(self, seconds: float) -> None:
        """Queue work, or a wait for another rank."""
        self.seconds += seconds

    def synchronize(self) -> None:
        """Wait for all that has been queued: only a test does; product code has nothing here to wait with."""
        self.reached = self.seconds


class FakeEvent:
    """Event with the methods of `torch.cuda.Event` that do not wait, and no other."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.at: float | None = None
        stream.events.append(self)

    def record(self) -> None:
        self._stream.recorded += 1
        self.at = self._stream.seconds

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            assert event.at is not None, "never recorded"
            assert event.at <= self._stream.reached, "not reached yet"
        assert self.at is not None
        assert end_event.at is not None
        return 1e3 * (end_event.at - self.at)
