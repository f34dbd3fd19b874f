"""Feed of a tracker: all records arrive once, whatever the tracker does."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wanma.job.errors import JobError, WanmaError, missing_extra_error
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.console import record_follower
from wanma.observe.trackers import feed as feed_module
from wanma.observe.trackers.feed import Feed
from wanma.observe.trackers.tracker import check_trackers, find_tracker

START = {"kind": "start", "time": 1.0, "step": 0, "steps": 100}


class Fake:
    """Tracker that keeps what it gets; `failures` calls fail first."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.points, self.outcomes, self.runs = failures, [], [], []
        self.arrived: dict[str, int] | None = None

    def __call__(self) -> Fake:
        return self

    def open(self, run: Any) -> dict[str, int] | None:
        self._fail()
        run.state.setdefault("id", len(self.runs))
        self.runs.append(run.state["id"])
        return self.arrived

    def log(self, scalars: Any) -> None:
        self._fail()
        self.points += [(entry.step, tag) for entry in scalars for tag in entry.values]

    def finish(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no route")


class Missing(Fake):
    """Tracker whose library is not installed."""

    def __call__(self) -> Fake:
        raise missing_extra_error("wandb", "wandb", "a tracker")


class Writer:
    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "gpt")
        self.run.create()

    def steps(self, first: int, last: int, begin: float = 10.0) -> None:
        with self.run.metrics.open("a") as file:
            for step in range(first, last + 1):
                file.write(json.dumps({"step": step, "time": begin + step, "loss": 1.0}) + "\n")

    def event(self, **values: Any) -> None:
        with self.run.events.open("a") as file:
            file.write(json.dumps(values) + "\n")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "FIRST_RETRY_SECONDS", "LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(feed_module, name, 0.01)


def feed(writer: Writer, tracker: Fake) -> list[str]:
    """Feed a tracker with what the run has recorded; return what the feed says."""
    said: list[str] = []
    end = threading.Event()
    end.set()
    Feed("fake", tracker, writer.run, {}, end, said.append).run()
    return said


def losses(tracker: Fake) -> list[int]:
    return [step for step, tag in tracker.points if tag == "train/loss"]


def test_records_arrive_as_they_come(writer: Writer) -> None:
    tracker, end = Fake(), threading.Event()
    thread = threading.Thread(target=Feed("fake", tracker, writer.run, {}, end, print).run)
    thread.start()
    writer.event(**START)
    writer.steps(1, 3)
    while losses(tracker) != [1, 2, 3]:
        time.sleep(0.01)
    writer.steps(4, 5)
    writer.event(kind="finish", time=50.0, step=5, outcome="finished")
    end.set()
    thread.join()
    assert losses(tracker) == [1, 2, 3, 4, 5]
    assert tracker.outcomes == ["finished"]


def test_a_tracker_that_was_away_gets_what_it_missed(writer: Writer) -> None:
    tracker = Fake(failures=4)
    writer.event(**START)
    writer.steps(1, 5)
    said = feed(writer, tracker)
    assert losses(tracker) == [1, 2, 3, 4, 5]
    assert len(said) == 4
    assert "no route" in said[0]


def test_a_tracker_that_stays_away_does_not_hold_the_process_for_ever(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PATIENCE_SECONDS", 0.05)
    writer.event(**START)
    writer.steps(1, 5)
    assert "next start" in feed(writer, Fake(failures=1000))[-1]
    tracker = Fake()
    feed(writer, tracker)
    assert losses(tracker) == [1, 2, 3, 4, 5]


def test_steps_that_a_resume_repeats_arrive_once(writer: Writer) -> None:
    writer.event(**START)
    writer.steps(1, 5)
    feed(writer, first := Fake())
    assert first.outcomes == ["crashed"]
    lines = writer.run.metrics.read_text().splitlines(keepends=True)
    writer.run.metrics.write_text("".join(lines[:3]))
    writer.event(**{**START, "step": 3, "time": 20.0})
    writer.steps(4, 8)
    feed(writer, second := Fake())
    assert second.runs == first.runs
    assert losses(second) == [6, 7, 8]


def test_what_the_tracker_itself_has_counts_more_than_the_record(writer: Writer) -> None:
    writer.event(**START)
    writer.steps(1, 5)
    tracker = Fake()
    tracker.arrived = {"step": 4, "validation": 0}
    feed(writer, tracker)
    assert losses(tracker) == [5]


def test_a_fresh_training_is_another_run_of_the_tracker(writer: Writer) -> None:
    writer.event(**START)
    writer.steps(1, 5)
    feed(writer, Fake())
    writer.run.metrics.write_text("")
    writer.event(**{**START, "time": 20.0})
    writer.steps(1, 2, begin=20.0)
    tracker = Fake()
    feed(writer, tracker)
    assert losses(tracker) == [1, 2]


def test_validations_of_the_training_before_a_fresh_one_are_not_its_own(writer: Writer) -> None:
    writer.event(**START)
    writer.event(kind="validation", time=15.0, step=1000, loss=3.0)
    writer.event(**{**START, "time": 20.0})
    for step in (5, 10):
        writer.event(kind="validation", time=20.0 + step, step=step, loss=3.0)
    feed(writer, tracker := Fake())
    assert [step for step, tag in tracker.points if tag == "validation/loss"] == [5, 10]


def test_validations_arrive_once_too(writer: Writer) -> None:
    writer.event(**START)
    writer.steps(1, 2)
    writer.event(kind="validation", time=12.5, step=2, loss=3.0)
    feed(writer, first := Fake())
    feed(writer, second := Fake())
    assert (2, "validation/loss") in first.points
    assert second.points == []


def test_all_records_arrive_after_the_end(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_follower, "READ_BYTES", 256)
    writer.event(**START)
    writer.steps(1, 50)
    feed(writer, tracker := Fake())
    assert losses(tracker) == list(range(1, 51))


def test_a_library_that_is_missing_is_told_at_the_start(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B makes it where it runs
    monkeypatch.syspath_prepend(tmp_path)
    if importlib.util.find_spec("wandb").origin is not None:  # type: ignore[union-attr]
        pytest.skip("wandb is installed")
    with pytest.raises(WanmaError, match="wandb"):
        check_trackers(["wandb"])
    writer.event(**START)
    writer.steps(1, 5)
    said = feed(writer, Missing())
    assert len(said) == 1


def test_an_unknown_tracker() -> None:
    with pytest.raises(JobError, match=r"observe\.trackers.* 'mlfow'.*mlflow"):
        find_tracker("mlfow")


def test_another_package_brings_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "aim_wanma-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: aim-wanma\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[wanma.trackers]\naim = aim_wanma:Aim\n")
    (tmp_path / "aim_wanma.py").write_text("class Aim:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_tracker("aim").__name__ == "Aim"  # type: ignore[attr-defined]
