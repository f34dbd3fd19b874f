"""States of submitted runs in a list: which are asked of their engine, and which are known."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from wanma.api.engines import control
from wanma.engines.engine import Handle, RunStatus
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory

SUBMITTED = 1_700_000_000.0


class Scheduler:
    """Engine in whose queue every run waits."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def statuses(self, handles: list[Handle]) -> list[RunStatus]:
        self.asked += [handle["jobs"][0] for handle in handles]
        return [RunStatus("pending", job_ids=(handle["jobs"][0],)) for handle in handles]


def submitted(folder: Path, name: str, outcome: str | None, ended: float = SUBMITTED + 60) -> RunDirectory:
    run = RunDirectory(folder / name)
    run.create()
    record = {"engine": "slurm", "handle": {"jobs": [name]}, "submission": {}, "submitted": SUBMITTED}
    run.engine.write_text(json.dumps(record))
    events = [{"kind": "start", "time": ended - 1}]
    if outcome is not None:
        events.append({"kind": "finish", "time": ended, "outcome": outcome})
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_run_that_waits_again_is_shown_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    monkeypatch.setattr(control, "get_engine", lambda _: scheduler)
    runs = [
        submitted(tmp_path, "running", None),
        submitted(tmp_path, "requeued", "interrupted"),
        submitted(tmp_path, "finished", "finished"),
        submitted(tmp_path, "extended", "finished", ended=SUBMITTED - 60),
    ]
    placements, problems = control.run_placements(runs)
    assert problems == []
    assert scheduler.asked == ["running", "requeued", "extended"]
    assert {run.name: placements[run.path].state for run in runs} == {
        "running": "pending",
        "requeued": "pending",
        "finished": "unknown",
        "extended": "pending",
    }
    assert placements[runs[1].path].overrules("interrupted")
    assert not placements[runs[2].path].overrules("finished")


def test_an_engine_that_does_not_answer_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def statuses(self, handles: list[Handle]) -> list[RunStatus]:
            raise WanmaError(f"no answer for {len(handles)} runs")

    monkeypatch.setattr(control, "get_engine", lambda _: Silent())
    run = submitted(tmp_path, "running", None)
    damaged = submitted(tmp_path, "damaged", None)
    damaged.engine.write_text("{")
    placements, problems = control.run_placements([run, damaged])
    assert placements[run.path].state == "unknown"
    assert damaged.path not in placements
    assert [text.partition(":")[0] for text in problems] == [f"{damaged.engine} cannot be read", "slurm"]


def test_a_run_whose_hosts_do_not_answer_is_unknown_since_its_newest_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable:
        def statuses(self, handles: list[Handle]) -> list[RunStatus]:
            silent = RunStatus("unknown", None, "gpu1: it cannot be reached", ("gpu1",))
            return [silent if handle["jobs"] == ["silent"] else RunStatus("unknown") for handle in handles]

    monkeypatch.setattr(control, "get_engine", lambda _: Unreachable())
    silent, forgotten = submitted(tmp_path, "silent", None), submitted(tmp_path, "forgotten", None)
    placements, (problem,) = control.run_placements([silent, forgotten])
    assert [placements[run.path].overrules("running") for run in (silent, forgotten)] == [True, False]
    assert placements[silent.path].place.endswith("gpu1")
    newest = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(SUBMITTED + 59))
    assert problem.startswith("silent: ")
    assert newest in problem
    assert problem.endswith("gpu1: it cannot be reached")
