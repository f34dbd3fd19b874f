"""Recorder of a run: the one stream of events, written by rank 0 into every sink.

Recording must never end a training: a sink whose disk is full or whose reader is gone is reported once as a
message, its records are counted as lost, and it is tried again with the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, SupervisorClient
from wanma.observe.units import count_text

STEP_KEYS = (
    "step",
    "loss",
    "tokens_per_second",
    "step_seconds",
    "grad_norm",
    "samples",
    "learning_rate",
    "phases",
    "memory_bytes",
    "mfu",
)
"""Required keys of a step record, defined in docs/reference/run-directory.md."""


class Sink(Protocol):
    """Destination of the event stream."""

    output_name: str
    """Name in messages: the data that the user loses when this sink fails."""

    def open(self, run: RunDirectory, first_step: int) -> None:
        """Open the sink; drop records of an earlier run for `first_step` and later.

        Raises:
            WanmaError: this sink cannot work at all.
        """

    def write(self, event: Event) -> None:
        """Write one event.

        Raises:
            OSError: the event could not be written; the next call may succeed.
        """

    def close(self) -> None:
        """Close the sink; no event follows."""


class SupervisorSink:
    """Sink that passes events on to the supervisor, which opens and closes its console itself."""

    output_name = "the console"

    def __init__(self, supervisor_client: SupervisorClient) -> None:
        self._supervisor_client = supervisor_client

    def open(self, run: RunDirectory, first_step: int) -> None:
        """Open nothing."""

    def write(self, event: Event) -> None:
        self._supervisor_client.send_event(event)

    def close(self) -> None:
        """Close nothing."""


class Recorder:
    """Writer of the event stream on rank 0.

    Args:
        sinks: sinks, opened here and closed by `close`.
        first_step: number of the first step to be recorded: 1, or the one after the checkpoint.
        check_fence: called before each record; raises if another process records the run now.

    Raises:
        WanmaError: a sink cannot start (an optional package is missing, a file cannot be opened); also,
            from every method, the error of `check_fence`.
    """

    def __init__(
        self,
        run: RunDirectory,
        sinks: Sequence[Sink],
        first_step: int,
        check_fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_fence = check_fence
        check_fence()
        self._sinks: list[Sink] = []
        self._lost_events: dict[str, int] = {}
        """Events lost since a sink began to fail, by the name of the sink."""
        try:
            for sink in sinks:
                sink.open(run, first_step)
                self._sinks.append(sink)
        except BaseException:
            self.close()
            raise

    def step(self, record: dict[str, Any]) -> None:
        """Record one optimizer step; `record` has at least `STEP_KEYS`."""
        if missing := [key for key in STEP_KEYS if key not in record]:
            raise ValueError(f"a step record lacks {', '.join(missing)}")
        self._write({"kind": "step", "time": time.time(), **record})

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event other than a step: start, validation, checkpoint, message, finish."""
        if kind == "start":  # lets a reader tell a run that goes on from one that died
            fields = {"process": os.getpid(), "host": socket.gethostname(), **fields}
        self._write({"kind": kind, "time": time.time(), **fields})

    def message(self, text: str, level: str = "info") -> None:
        """Record a message for the user; `level` is info, warning or error."""
        self.event("message", level=level, text=text)

    def close(self) -> None:
        """Close every sink; one that cannot be finished is reported to those still open."""
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except OSError as error:
                self._tell(f"{sink.output_name} may be cut short: {_error_text(error)}", "warning")

    def _write(self, event: Event) -> None:
        for sink in self._sinks:
            name, lost = sink.output_name, self._lost_events.get(sink.output_name, 0)
            try:
                self._check_fence()  # where that cannot be told, the record is lost like any other
                sink.write(event)
            except OSError as error:
                self._lost_events[name] = lost + 1
                if not lost:
                    text = f"{name} cannot be written: {_error_text(error)}; training continues"
                    self._tell(text, "warning", failing=sink)
            else:
                if lost:
                    del self._lost_events[name]
                    self._tell(f"{name} is writable again; missing: {count_text(lost, 'record')}", "info")

    def _tell(self, text: str, level: str, failing: Sink | None = None) -> None:
        """Write a message into all sinks but the one that fails."""
        message = {"kind": "message", "time": time.time(), "level": level, "text": text}
        for sink in self._sinks:
            # Another one that fails is reported when the next event reaches it.
            with contextlib.suppress(OSError):
                if sink is not failing:
                    sink.write(message)


def _error_text(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
