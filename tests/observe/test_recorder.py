"""The recorder: every event in every sink, and no sink can end a training."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, NullSupervisorClient
from wanma.observe.recorder import Recorder, SupervisorSink
from wanma.observe.sinks.jsonl import JsonLinesSink


class FullSink:
    """A sink whose disk is full for the first `failures` events."""

    output_name = "full.txt"

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.seen: list[Event] = []
        self.closed = False

    def open(self, run: RunDirectory, first_step: int) -> None:
        pass

    def write(self, event: Event) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.seen.append(event)

    def close(self) -> None:
        self.closed = True


def test_steps_go_to_metrics_and_the_rest_to_events_and_all_to_the_supervisor(
    run: RunDirectory, step_record: Callable[..., dict[str, Any]]
) -> None:
    forwarded: list[Event] = []
    recorder = Recorder(run, [JsonLinesSink(), SupervisorSink(NullSupervisorClient(forwarded.append))], 1)
    recorder.event("start", step=0, steps=2, world_size=1)
    recorder.step(step_record(1))
    recorder.message("look", "warning")
    recorder.close()
    assert [event["kind"] for event in forwarded] == ["start", "step", "message"]
    (metric,) = map(json.loads, run.metrics.read_text().splitlines())
    assert metric["step"] == 1
    assert metric["samples"] == 32
    assert "kind" not in metric
    start, message = map(json.loads, run.events.read_text().splitlines())
    assert start["process"] == os.getpid()
    assert (message["level"], message["text"]) == ("warning", "look")
    assert metric["time"] >= start["time"] > 1.7e9


def test_a_step_record_that_lacks_a_key_is_a_mistake_in_the_program(
    run: RunDirectory, step_record: Callable[..., dict[str, Any]]
) -> None:
    record = step_record(1)
    del record["grad_norm"], record["mfu"]
    recorder = Recorder(run, [], 1)
    with pytest.raises(ValueError, match="grad_norm, mfu"):
        recorder.step(record)


def test_a_full_disk_is_reported_once_and_again_when_there_is_room(
    run: RunDirectory, step_record: Callable[..., dict[str, Any]]
) -> None:
    forwarded: list[Event] = []
    full = FullSink(failures=3)
    recorder = Recorder(run, [full, SupervisorSink(NullSupervisorClient(forwarded.append))], 1)
    for step in range(1, 6):
        recorder.step(step_record(step))
    recorder.close()
    texts = [event["text"] for event in forwarded if event["kind"] == "message"]
    assert texts == [
        "full.txt cannot be written: No space left on device; training continues",
        "full.txt is writable again; missing: 3 records",
    ]
    assert [event["step"] for event in forwarded if event["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert [event.get("step", event.get("text")) for event in full.seen] == [4, texts[1], 5]
    assert full.closed


def test_a_sink_that_cannot_start_stops_the_start_and_closes_the_others(run: RunDirectory) -> None:
    class Absent(FullSink):
        def open(self, run: RunDirectory, first_step: int) -> None:
            raise WanmaError("absent")

    first = FullSink(0)
    with pytest.raises(WanmaError, match="absent"):
        Recorder(run, [first, Absent(0)], 1)
    assert first.closed
