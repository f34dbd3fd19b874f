"""Independent searches in two processes: the results of one, and whatever happens to the second."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from support.second_process import end_elsewhere, meet_reader, meet_writer, numbered, refuse
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.errors import JobError
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner import plan_search, search_process
from wanma.planner.forecast.problem import PlanningInputs
from wanma.planner.plan_search import search_plans
from wanma.planner.search.result import SearchResult
from wanma.planner.search_process import LEAST_GRIDS, SearchTask, needs_second_process, run_searches

MODEL = DecoderConfig(2, 512, 8, 8, 2048, 8192)
LONG = LEAST_GRIDS + 1


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "usable_cores", lambda: 2)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def plans_found() -> SearchResult:
    job = Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": 256},
            "train": {"global_batch": 64, "precision": "bf16"},
            "parallel": {"auto": True},
            "cluster": {"nodes": 2, "rendezvous": "a:1"},
        }
    )
    cluster = parse_shorthand("1x8 H100 + 1x8 A100, 8x200G")
    return search_plans(PlanningInputs(job, cluster, compute_decoder_workload(MODEL, 256), MODEL))


def test_a_second_process_finds_the_plans_that_this_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    here = plans_found()
    monkeypatch.setattr(search_process, "LEAST_GRIDS", 0)
    monkeypatch.setattr(search_process, "_taken", lambda _: iter(()))  # leaves all to the second process
    for search in ("search", "search_placements", "search_mesh_plans"):
        monkeypatch.setattr(plan_search, search, refuse)
    there = plans_found()
    assert replace(there, seconds=0.0) == replace(here, seconds=0.0)
    assert [one.seconds for one in there.candidates] == [one.seconds for one in here.candidates]
    assert {bool(one.plan.placement) for one in there.candidates} == {False, True}


def test_the_searches_run_at_the_same_time_in_two_processes(fifo: Path) -> None:
    tasks = [SearchTask(partial(meet_writer, fifo), LONG), SearchTask(partial(meet_reader, fifo), LONG)]
    processes = {one.plan_count for one in run_searches(tasks)}
    assert len(processes) == 2
    assert os.getpid() in processes


def test_results_come_in_the_order_of_the_searches_the_longest_of_which_begins_first() -> None:
    sizes = [5, 1, LONG, 3, LONG + 7, 2]
    tasks = [SearchTask(partial(numbered, number), size) for number, size in enumerate(sizes)]
    assert [one.plan_count for one in run_searches(tasks)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("program", ["", "/nowhere/python", "/bin/false", "/bin/true"])
def test_without_a_second_process_this_one_runs_all(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "executable", program)
    tasks = [SearchTask(partial(numbered, number), LONG) for number in range(300)]
    assert [one.plan_count for one in run_searches(tasks)] == list(range(300))


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    tasks = [SearchTask(partial(numbered, number), LONG) for number in range(2)]
    assert [one.plan_count for one in run_searches(tasks)] == [0, 1]


def test_a_search_whose_process_dies_runs_here(fifo: Path) -> None:
    dying = partial(end_elsewhere, fifo, os.getpid())
    tasks = [SearchTask(partial(meet_reader, fifo), LONG), SearchTask(dying, LONG)]
    assert [one.plan_count for one in run_searches(tasks)] == [os.getpid()] * 2


def test_an_error_of_a_search_in_the_second_process_is_raised_here() -> None:
    with pytest.raises(JobError, match="no search"):
        run_searches([SearchTask(partial(numbered, 0), LONG + 1), SearchTask(refuse, LONG)])


def test_short_searches_and_one_alone_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not needs_second_process([SearchTask(partial(numbered, 0), 10**6)])
    assert not needs_second_process(
        [SearchTask(partial(numbered, 0), size) for size in (10**6, LEAST_GRIDS - 1)]
    )
    assert needs_second_process([SearchTask(partial(numbered, 0), size) for size in (10**6, LEAST_GRIDS)])
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert plans_found().best is not None, "small enough for one process"


def test_one_core_searches_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "usable_cores", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    found = run_searches([SearchTask(partial(numbered, number), LONG) for number in range(2)])
    assert [one.plan_count for one in found] == [0, 1]


SCRIPT = """
import os, sys
from functools import partial
from pathlib import Path

sys.path[:0] = {folders!r}
print("once", flush=True)

import torch

from support.second_process import meet_reader, meet_writer
from wanma.planner import plan_search, search_process
from wanma.planner.search_process import SearchTask, run_searches

search_process.usable_cores = lambda: 2
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
for descriptor in {closed!r}:
    os.close(descriptor)
fifo = Path({fifo!r})
least = search_process.LEAST_GRIDS
meetings = [SearchTask(partial(meet, fifo), least) for meet in (meet_reader, meet_writer)]
found = run_searches(meetings)
Path({result!r}).write_text(str([one.plan_count == os.getpid() for one in found]))
"""


@pytest.mark.parametrize(
    "closed", [pytest.param((0,), id="stdin", marks=pytest.mark.full), pytest.param((0, 1, 2), id="all")]
)
def test_a_script_without_guard_with_threads_of_torch_and_closed_streams_searches_in_two(
    tmp_path: Path, fifo: Path, closed: tuple[int, ...]
) -> None:
    folders = [str(Path(search_process.__file__).parents[2]), str(Path(__file__).parents[1])]
    result, script = tmp_path / "result", tmp_path / "script.py"
    script.write_text(SCRIPT.format(folders=folders, closed=closed, fifo=str(fifo), result=str(result)))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")
    assert result.read_text() == "[True, False]"
