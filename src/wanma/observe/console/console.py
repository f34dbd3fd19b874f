"""Console of a run: a live display on a terminal, plain lines elsewhere.

It lives in the supervisor's process and receives the events of the workers. The package rich is imported only
for the live display, when it opens.
"""

from __future__ import annotations

from typing import Self, TextIO

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.console.fault_tolerant_stream import FaultTolerantStream
from wanma.observe.console.progress import (
    RunProgress,
    checkpoint_text,
    finish_text,
    recovery_text,
    resize_event_text,
    validation_text,
)
from wanma.observe.units import count_text, duration_text

LEVEL_PREFIXES = {"info": "", "warning": "warning: ", "error": "error: "}
_LINES = {"validation": validation_text, "checkpoint": checkpoint_text, "finish": finish_text}
"""Function to the plain line of an event, by its kind."""


class Console:
    """Quiet console, and base of all others: warnings and errors are always shown."""

    def __init__(self, run: RunDirectory, steps: int, stream: TextIO) -> None:
        self.run = run
        self.stream = FaultTolerantStream(stream)
        self.progress = RunProgress(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.stream.discard_pending()

    def write(self, event: Event) -> None:
        """Handle one event of the stream."""
        self.progress.update(event)
        message = as_message(event)
        if message and (message.get("level") in ("warning", "error") or event["kind"] == "resize"):
            self.print_message(message)

    def print_message(self, event: Event) -> None:
        """Print the text of a message event."""
        self.print_line(LEVEL_PREFIXES.get(event.get("level", "info"), "") + str(event["text"]))

    def print_line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Finish the display."""


class PlainConsole(Console):
    """Console of plain lines for files: one every `log_every_steps`, and one per other event."""

    def __init__(self, run: RunDirectory, steps: int, stream: TextIO, log_every_steps: int) -> None:
        super().__init__(run, steps, stream)
        self._log_every_steps = log_every_steps

    def __enter__(self) -> Self:
        self.print_line(f"run directory: {self.run.path}")
        return self

    def write(self, event: Event) -> None:
        self.progress.update(event)
        kind = event["kind"]
        if kind == "step":
            if self._is_logged_step(event["step"]):
                self.print_line(self._step_line())
        elif kind == "start":
            if not event.get("is_restart"):  # the recovery tells it, when it is done
                self.print_line(start_text(self.progress))
        elif (message := as_message(event)) is not None:
            self.print_message(message)
        elif kind in _LINES:
            self.print_line(_LINES[kind](event))

    def close(self) -> None:
        if self.run.report.exists():
            self.print_line(f"report: {self.run.report}")

    def _is_logged_step(self, step: int) -> bool:
        return step % self._log_every_steps == 0 or step in (self.progress.first_step, self.progress.steps)

    def _step_line(self) -> str:
        progress = self.progress
        width = len(str(progress.steps))
        parts = [f"step {progress.step:>{width}}/{progress.steps}", *progress.metric_texts()]
        if progress.step < progress.steps:
            parts.append(f"ETA {duration_text(progress.remaining_seconds())}")
        return "  ".join(parts)


def as_message(event: Event) -> Event | None:
    """Return an event that is shown by its text, such as a recovery; None: it is shown otherwise."""
    match event["kind"]:
        case "resize":
            return {**event, "level": "info", "text": resize_event_text(event)}
        case "recovery":
            return {**event, "level": "warning", "text": recovery_text(event)}
        case "message" | "joined" | "batch_shares" | "alert":
            return event
    return None


def start_text(progress: RunProgress) -> str:
    """Return 'training 300 steps' or, after a resume, 'resuming from step 200 of 300 (step-00000200)'."""
    done = f"{progress.first_step - 1:,} of {progress.steps:,}"
    if progress.first_step > progress.steps:
        return f"the run is complete: step {done}; raise train.steps to continue"
    if progress.first_step > 1:
        return f"resuming from step {done}" + (f" ({progress.source})" if progress.source else "")
    return f"training {count_text(progress.steps, 'step')}"
