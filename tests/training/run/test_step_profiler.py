"""Profile of some steps of a run that goes on."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanma.job.run.profile_request import (
    MAX_NUMBER,
    ProfileRequest,
    read_profile_request,
    request_profile,
    trace_file,
)
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.job.run.worker import NullSupervisorClient, WorkerContext
from wanma.training.run.step_profiler import StepProfiler


class Supervisor(NullSupervisorClient):
    number = 0

    def profile_request(self) -> int:
        return self.number


def worker(folder: Path, supervisor: Supervisor, rank: int = 0) -> WorkerContext:
    return replace(WorkerContext.single_process(folder, supervisor), rank=rank)


def train(profiler: StepProfiler, steps: range) -> None:
    for step in steps:
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step(step)
    profiler.close(failed=False)


def test_the_steps_after_a_request_are_in_the_trace(tmp_path: Path) -> None:
    run, supervisor = RunDirectory(tmp_path), Supervisor()
    profiler = StepProfiler(worker(tmp_path, supervisor), is_on_gpu=False)
    train(profiler, range(1, 3))
    request = request_profile(run, 2, [0])
    supervisor.number = request.number
    train(profiler, range(3, 8))
    trace = json.loads(gzip.decompress(trace_file(run, request.number, 0).read_bytes()))
    products = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    assert len(products) == 2
    assert not [path for path in (tmp_path / "profiles").iterdir() if path.name.startswith(".")]


def test_only_the_ranks_that_were_asked_for_record(tmp_path: Path) -> None:
    run, supervisor = RunDirectory(tmp_path), Supervisor()
    profiler = StepProfiler(worker(tmp_path, supervisor, rank=1), is_on_gpu=False)
    supervisor.number = request_profile(run, 1, [0]).number
    train(profiler, range(1, 4))
    assert not trace_file(run, supervisor.number, 1).exists()


def test_a_request_of_before_the_start_is_not_answered_again(tmp_path: Path) -> None:
    run, supervisor = RunDirectory(tmp_path), Supervisor()
    supervisor.number = request_profile(run, 1, [0]).number
    train(StepProfiler(worker(tmp_path, supervisor), is_on_gpu=False), range(1, 4))
    assert not trace_file(run, supervisor.number, 0).exists()


def test_a_rank_that_ends_writes_the_steps_so_far_and_one_that_fails_nothing(tmp_path: Path) -> None:
    run, supervisor = RunDirectory(tmp_path), Supervisor()
    for failed in (False, True):
        profiler = StepProfiler(worker(tmp_path, supervisor), is_on_gpu=False)
        supervisor.number = request_profile(run, 50, [0]).number
        profiler.after_step(1)
        profiler.close(failed)
        assert trace_file(run, supervisor.number, 0).exists() is not failed


def test_a_profile_that_fails_is_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, supervisor = RunDirectory(tmp_path), Supervisor()
    profiler = StepProfiler(worker(tmp_path, supervisor), is_on_gpu=False)
    supervisor.number = request_profile(run, 1, [0]).number
    with torch.profiler.profile():
        train(profiler, range(1, 4))
    assert "no profile: " in capfd.readouterr().err
    supervisor.number = request_profile(run, 1, [0]).number
    trace_file(run, supervisor.number, 0).mkdir()
    train(profiler, range(4, 7))
    assert "no profile: " in capfd.readouterr().err
    assert not [path for path in (tmp_path / "profiles").iterdir() if path.name.startswith(".")]


def test_requests_have_numbers_of_their_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first, second = [request_profile(run, 1, [0]).number for _ in range(2)]
    assert second == first % MAX_NUMBER + 1
    write_json(run.path / "profiles" / "request.json", {"number": MAX_NUMBER, "steps": 1, "ranks": [0]})
    assert request_profile(run, 1, [0]).number == 1
    assert read_profile_request(run, 2) is None
    assert read_profile_request(run) == ProfileRequest(1, 1, [0])


@pytest.mark.parametrize("number", [0, 256, "1"])
def test_a_damaged_request_is_none(number: object, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    request_profile(run, 1, [0])
    write_json(run.path / "profiles" / "request.json", {"number": number, "steps": 1, "ranks": [0]})
    assert read_profile_request(run) is None
