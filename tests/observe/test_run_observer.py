"""Observer of a run on one node: what it records where, and that no fault of it ends the training."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.endpoint import TARGETS_FOLDER
from wanma.observe.run_observer import RunObserver

START = {"kind": "start", "time": 1.0, "step": 0, "steps": 100, "world_size": 2, "plan": "2 ranks"}


class Shown:
    """Events that an observer shows."""

    def __init__(self) -> None:
        self.shown: list[Event] = []

    @property
    def alerts(self) -> list[str]:
        return [event["alert"] for event in self.shown if event["kind"] == "alert"]

    @property
    def warnings(self) -> list[str]:
        return [event["text"] for event in self.shown if event["kind"] == "message"]


def usage(node: int, time: float = 2.0, **values: Any) -> Event:
    return {"kind": "usage", "time": time, "node": node, "ranks": [], **values}


@contextmanager
def observed(run: RunDirectory, node: int | None, **settings: Any) -> Iterator[tuple[RunObserver, Shown]]:
    shown = Shown()
    with RunObserver(
        run,
        ObserveSection(**settings),
        node=node,
        checkpoint_interval_steps=0,
        plan={},
        show=shown.shown.append,
    ) as observer:
        yield observer, shown


def test_a_fault_of_the_observer_is_told_once_and_raises_nothing(run: RunDirectory) -> None:
    with observed(run, 0) as (observer, shown):
        for _ in range(2):
            observer.on_event({"kind": "step"})
        observer.on_event(START)
    assert len(shown.warnings) == 1
    assert "KeyError" in shown.warnings[0]


def test_a_node_takes_its_number_from_its_first_usage(run: RunDirectory) -> None:
    folder = run.path.parent / TARGETS_FOLDER
    with observed(run, None, metrics_port=0, name="job") as (observer, _):
        assert not folder.exists()
        observer.on_event(usage(1))
        (entry,) = json.loads((folder / "gpt-1.json").read_text())
        labels = entry["labels"]
        assert (labels["host"], labels["job"]) == (socket.gethostname(), "job"), "the run is `gpt`"
        observer.on_event(usage(0))  # the first node was lost
        assert [path.name for path in folder.iterdir()] == ["gpt-0.json"]


@pytest.mark.parametrize(("node", "is_told"), [(0, True), (1, False)])
def test_the_node_of_rank_0_tells_its_sinks_of_a_failure(run: RunDirectory, node: int, is_told: bool) -> None:
    program = f"import sys; open({str(run.path / 'told.json')!r}, 'w').write(sys.stdin.read())"
    with observed(run, None, alert_command=[sys.executable, "-c", program]) as (observer, shown):
        observer.on_event(usage(node))
        observer.end("rank 1 died")
    told = json.loads((run.path / "told.json").read_text())["alert"] if is_told else ""
    assert told == "RunFailed" * is_told
    assert (run.path / "told.json").exists() == is_told
    assert shown.alerts == [], "the command ends with the failure"
    assert not run.events.exists()


def test_alerts_are_shown_and_recorded(run: RunDirectory) -> None:
    with observed(run, 0) as (observer, shown):
        for time in (2.0, 400.0):
            observer.on_event(usage(0, time=time, disk_bytes=100, disk_free_bytes=1))
    recorded = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert shown.alerts == [event["alert"] for event in recorded] == ["DiskFull"]


def test_nothing_is_evaluated_without_alerts(run: RunDirectory) -> None:
    with observed(run, 0, alerts=False) as (observer, shown):
        observer.on_event(usage(0, disk_bytes=100, disk_free_bytes=1))
        observer.on_event(usage(0, time=100.0, disk_bytes=100, disk_free_bytes=1))
        assert not observer._monitor._history._points
        observer.end("rank 1 died")
    assert shown.shown == []


def test_totals_of_a_resumed_run_are_read_from_its_records(run: RunDirectory) -> None:
    records = [{"step": step, "time": 1.0 + step, "step_seconds": 0.5} for step in range(1, 5)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 5, "ti')
    run.events.write_text(json.dumps(START) + "\n")
    with observed(run, 0, metrics_port=0) as (observer, _):
        observer.on_event({**START, "step": 2, "time": 11.0})
        values = {sample.metric: sample.value for sample in observer._samples()}
    assert (values["starts"], values["repeated_steps"], values["goodput_ratio"]) == (2, 2, 0.1)


def test_a_secret_itself_is_refused_without_its_text() -> None:
    for key in ("alert_webhook", "metrics_token"):
        with pytest.raises(JobError, match=key) as caught:
            to_job({"model": {"preset": "gpt-10m"}, "observe": {key: "https://hooks.example/abc"}})
        assert "hooks.example" not in str(caught.value)
