"""Progress of a run, folded from its stream of events, and texts of events; independent of terminals."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from wanma.job.run.worker import Event
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text

WINDOW_STEPS = 50
"""Steps over which speed is averaged: long enough to be calm, short enough to follow a change."""
SPARKLINE_CHARACTERS = "▁▂▃▄▅▆▇█"
MAX_SERIES_POINTS = 64


class DownsampledSeries:
    """Series of a run's values in at most `MAX_SERIES_POINTS` points; neighbours are averaged as it grows."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._stride = 1
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.points.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.points) >= MAX_SERIES_POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._stride *= 2


def sparkline(values: list[float], width: int) -> str:
    """Return the values as at most `width` block characters; lowest to highest fills the height."""
    if not values or width < 1:
        return ""
    buckets = min(width, len(values))
    edges = [index * len(values) // buckets for index in range(buckets + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    heights = (round((mean - low) / span * (len(SPARKLINE_CHARACTERS) - 1)) for mean in means)
    return "".join(SPARKLINE_CHARACTERS[height] for height in heights)


@dataclass
class RunProgress:
    """State of a run; `steps` is its last step."""

    steps: int
    first_step: int = 1
    source: str = ""
    """Name of the checkpoint, on disk or in memory, from which the run continues."""
    is_rank_0_remote: bool = False
    """True if another node has rank 0, and shows the steps."""
    rate_unit: str = "tokens/s"
    """Unit of the steps' `tokens_per_second`, which counts targets: "samples/s" if a sample has one."""
    last_step_event: Event | None = None
    """Newest step record."""
    validation_event: Event | None = None
    checkpoint_event: Event | None = None
    finish_event: Event | None = None
    losses: DownsampledSeries = field(default_factory=DownsampledSeries)
    _window: deque[Event] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def update(self, event: Event) -> None:
        """Update the state by one event of the stream; kinds unrelated to progress are ignored."""
        kind = event["kind"]
        if kind == "step":
            self.last_step_event = event
            self._window.append(event)
            loss = event.get("loss")
            if loss is not None and math.isfinite(loss):
                self.losses.add(loss)
        elif kind == "start":
            self.first_step = event.get("step", 0) + 1
            self.source = event.get("source", "")
            self.steps = event.get("steps", self.steps)
            self.rate_unit = event.get("rate_unit", self.rate_unit)
            self._window.clear()  # a run that starts again begins a new measurement
        elif kind == "validation":
            self.validation_event = event
        elif kind == "checkpoint":
            self.checkpoint_event = event
        elif kind == "finish":
            self.finish_event = event
        elif kind == "joined":
            self.is_rank_0_remote = not event["shows_the_run"]

    @property
    def step(self) -> int:
        """Newest finished step."""
        return int(self.last_step_event["step"]) if self.last_step_event else self.first_step - 1

    def tokens_per_second(self) -> float | None:
        """Return the mean rate over the last steps, weighted by their time."""
        key = "tokens_per_second"
        pairs = [(e[key], e["step_seconds"]) for e in self._window if e.get(key)]
        seconds = sum(pair[1] for pair in pairs)
        return sum(rate * time for rate, time in pairs) / seconds if seconds else None

    def remaining_seconds(self) -> float | None:
        """Return the seconds to the last step at the recent pace, validations and checkpoints included."""
        if self.last_step_event is None:
            return None
        first, last = self._window[0], self.last_step_event
        finished_steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
        step_seconds = seconds / finished_steps if finished_steps > 0 else last["step_seconds"]
        return max(self.steps - self.step, 0) * float(step_seconds)

    def exposed_communication_share(self) -> float | None:
        """Return rank 0's exposed communication as a share of the last steps' time; None if unknown."""
        key = "exposed_communication_seconds"
        pairs = [(sum(e[key].values()), e["step_seconds"]) for e in self._window if e.get(key)]
        seconds = sum(pair[1] for pair in pairs)
        return sum(pair[0] for pair in pairs) / seconds if seconds else None

    def metric_texts(self) -> list[str]:
        """Return texts of loss, speed, MFU, exposed communication and memory, as far as they are known."""
        last = self.last_step_event
        if last is None:
            return []
        loss = math.nan if last["loss"] is None else last["loss"]
        words = [f"loss {number_text(loss) if math.isfinite(loss) else loss}"]
        if (rate := self.tokens_per_second()) is not None:
            words.append(f"{number_text(rate)} {self.rate_unit}")
        if last.get("mfu") is not None:
            words.append(f"MFU {percent_text(last['mfu'])}")
        if (waiting := self.exposed_communication_share()) is not None:
            words.append(f"exposed communication {percent_text(waiting)}")
        if last.get("memory_bytes"):
            words.append(f"memory {bytes_text(last['memory_bytes'])}")
        return words


def validation_text(event: Event) -> str:
    """Return a text such as 'validation loss 3.214, perplexity 24.87 (step 100)'."""
    known = (key for key in ("loss", "perplexity") if event.get(key) is not None)
    values = [f"{key} {number_text(event[key])}" for key in known]
    if event.get("accuracy") is not None:
        values.append(f"accuracy {percent_text(event['accuracy'])}")
    values += [f"{name} {number_text(value)}" for name, value in event.get("metrics", {}).items()]
    return f"validation {', '.join(values) or 'without a value'} (step {event['step']:,})"


RECOVERY_SOURCE_TEXTS = {
    "memory": "the in-memory checkpoint",
    "partner": "the in-memory checkpoint",
    "checkpoint": "the checkpoint",
}


def recovery_text(event: Event) -> str:
    """Return 'recovered from: rank 1 failed: ...' with the source, the repeated steps and the time."""
    repeated = int(event["repeated_steps"])
    cost = "no step is repeated" if not repeated else f"{count_text(repeated, 'step')} repeated"
    source = RECOVERY_SOURCE_TEXTS.get(event["source"])
    restart_text = f"from {source} of step {event['step']:,}" if source is not None else "from the beginning"
    if event["source"] == "partner":
        restart_text += " (lost node: from its partner)"
    text = f"recovered from: {event['failure']}\n  resumed {restart_text}, {cost}"
    text += f"; {event['seconds']:.2f} s from the failure to the next finished step"
    if event["attempt"] > 1:
        text += f" (attempt {event['attempt']})"
    return f"{text}\n  {resize_text(event['change'])}" if event.get("change") else text


def resize_event_text(event: Event) -> str:
    """Return 'resized: 4 of at most 8 nodes (2 before): ...' with the time that the resize took."""
    duration = f"{event['seconds']:.2f} s from the last step before the resize to the first after it"
    change_text = resize_text(event["change"]) if event.get("change") else "resized: nodes and plan unchanged"
    return f"{change_text}\n  resumed after step {event['step']:,}; {duration}"


def resize_text(resize: dict[str, Any]) -> str:
    """Return 'resized: 3 of at most 4 nodes (4 before): PLAN -> PLAN' with the reason."""
    nodes = f"{resize['machines']} of at most {resize['most_machines']} nodes"
    text = f"resized: {nodes} ({resize['machines_before']} before)"
    if resize["plan"] != resize["plan_before"]:
        text += f": {resize['plan_before']} -> {resize['plan']}"
    return f"{text}\n  {resize['reason']}"


def checkpoint_text(event: Event) -> str:
    """Return a text such as 'checkpoint of step 100, 120 MiB in 0.42 s'."""
    text = f"checkpoint of step {event['step']:,}"
    if event.get("bytes") is not None:
        text += f", {bytes_text(event['bytes'])}"
    if event.get("write_seconds") is not None:
        text += f" in {duration_text(event['write_seconds'])}"
    return text


def finish_text(event: Event) -> str:
    """Return a text such as 'finished at step 300' or 'failed: rank 1 ...'."""
    text = str(event["outcome"])
    if event.get("step") is not None:
        text += f" at step {event['step']:,}"
    return f"{text}: {event['text']}" if event.get("text") else text
