"""Runs whose jobs the controller has forgotten: their end is read from accounting, where there is any."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.engines.engine import RunState
from wanma.engines.slurm.engine import SlurmEngine

ACCOUNTED = """\
7|COMPLETED|0:0
8|TIMEOUT|0:0
9|CANCELLED by 1000|0:15
10|OUT_OF_MEMORY|0:125
11|FAILED|130:0
12|RUNNING|0:0
"""
"""Output of `sacct --allocations --noheader --parsable2 --format=JobIDRaw,State,ExitCode` of Slurm 22.05."""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of programs of a cluster whose controller knows job 6 alone."""
    program(tmp_path, "squeue", 'echo "6|6|PENDING||Resources"')
    program(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def statuses(*jobs: int) -> list[tuple[RunState, str]]:
    found = SlurmEngine().statuses([{"jobs": [str(job)], "run_directory": "run"} for job in jobs])
    return [(one.state, one.reason) for one in found]


def test_the_end_of_a_forgotten_job_is_read_from_accounting(programs: Path) -> None:
    (programs / "accounted").write_text(ACCOUNTED)
    program(programs, "sacct", f'echo "$@" >> {programs}/asked; cat {programs}/accounted')
    assert statuses(6, 7, 8, 9, 10, 11, 12, 13) == [
        ("pending", "Resources"),
        ("finished", ""),
        ("failed", "Slurm: job 8 TIMEOUT"),
        ("cancelled", ""),
        ("failed", "Slurm: job 10 OUT_OF_MEMORY"),
        ("cancelled", ""),  # stopped in order: exit code 130
        ("unknown", "Slurm has forgotten job 12"),  # accounting has missed its end
        ("unknown", "Slurm has forgotten job 13"),
    ]
    (asked,) = (programs / "asked").read_text().splitlines()
    assert asked.endswith("--jobs=7,8,9,10,11,12,13"), "one question for all of them"


def test_jobs_that_the_controller_knows_need_no_accounting(programs: Path) -> None:
    program(programs, "sacct", f"touch {programs}/asked")
    assert statuses(6) == [("pending", "Resources")]
    assert not (programs / "asked").exists()


def test_a_cluster_without_accounting_leaves_forgotten_jobs_unknown(programs: Path) -> None:
    program(programs, "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert statuses(7) == [("unknown", "Slurm has forgotten job 7")]


def test_the_explanation_of_a_forgotten_job_has_its_end(programs: Path) -> None:
    program(programs, "sacct", 'echo "8|TIMEOUT|0:0"')
    explained = SlurmEngine().explain({"jobs": ["8"], "run_directory": "run"})
    assert explained.summary == "job 8 does not wait: it is timeout"
