"""The study of diagnosis: its jobs are jobs, and its page has what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.diagnosis.cases import FAULTS, HEALTHY, Case
from benchmarks.diagnosis.run import DATA, END, PAGE, START, job_of, judge, page_part

from wanma.diagnosis.finding import Finding
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job


@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=lambda case: case.name)
def test_each_case_is_a_job(case: Case) -> None:
    assert Job.model_validate(job_of(case)).observe.name == "case"


def test_the_page_has_what_was_recorded() -> None:
    recorded = json.loads(DATA.read_text())
    assert PAGE.read_text().partition(START)[2].partition(END)[0] == page_part(recorded)
    assert [entry["case"] for entry in recorded["results"]] == [case.name for case in (*FAULTS, *HEALTHY)]
    right = [entry["is_right"] for entry in recorded["results"]]
    assert sum(right[: len(FAULTS)]) >= 13
    assert all(right[len(FAULTS) :])


def finding(name: str, title: str) -> Finding:
    return Finding(name, "slow", title, (), "")


def test_the_first_finding_counts_with_its_words_and_in_a_healthy_run_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    case: Any = Case("a", "straggler", ("rank 1",))
    right = [finding("straggler", "all wait for rank 1"), finding("data", "")]
    assert judge(case, right, run).is_right
    assert not judge(case, right[::-1], run).is_right
    assert not judge(case, [finding("straggler", "all wait for rank 0")], run).is_right
    assert judge(HEALTHY[0], [], run).is_right
    assert not judge(HEALTHY[0], right, run).is_right
