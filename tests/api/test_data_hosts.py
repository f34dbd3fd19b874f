"""Hosts that have read the data of a job before, by the records of earlier runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wanma.api.engines.data_hosts import hosts_of_data
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job

BOTH = ["s3://bucket/x", "s3://bucket/y"]


def job_of(folder: Path, engine: str = "slurm", **data: Any) -> Job:
    return to_job(
        {
            "model": {"preset": "gpt-1m"},
            "data": {"sequence_length": 8, **data},
            "cluster": {"engine": engine, "nodes": 2},
            "observe": {"runs": str(folder), "name": "next"},
        }
    )


def add_run(folder: Path, hosts: list[str], engine: str = "slurm", **data: Any) -> None:
    """Add a run, newer than those before, whose nodes are on `hosts`."""
    number = len(list(folder.iterdir()))
    run = RunDirectory(folder / str(number))
    run.create()
    run.job.write_text(job_to_toml(job_of(folder, engine, **data)))
    os.utime(run.job, (number, number))
    for node, host in enumerate(hosts):
        lines = [json.dumps({"time": 1.0, "host": one, "ranks": []}) for one in ("another", host)]
        run.node_usage(node).write_text("\n".join(lines) + '\n{"time": 2.0, "ho')


def test_hosts_with_most_entries_come_first_then_those_of_the_newest_run(tmp_path: Path) -> None:
    add_run(tmp_path, ["a", "b"], text=["s3://bucket/x"])
    add_run(tmp_path, ["c", "d"], text=BOTH)
    add_run(tmp_path, ["e", "a"], text=["s3://bucket/y"])
    add_run(tmp_path, ["other-data"], text=["s3://bucket/z"])
    add_run(tmp_path, ["other-cache"], text=BOTH, cache="/scratch")
    add_run(tmp_path, ["other-engine"], engine="ray", text=BOTH)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "job.toml").write_text("[")
    assert hosts_of_data(job_of(tmp_path, text=BOTH)) == ("c", "d", "e", "a", "b")
    assert hosts_of_data(job_of(tmp_path, text=BOTH, cache="/scratch")) == ("other-cache",)
    assert hosts_of_data(job_of(tmp_path, engine="ssh", text=BOTH)) == ()


def test_local_data_count_as_parts_alone(tmp_path: Path) -> None:
    add_run(tmp_path, ["a"], text=["/data"], placement="parts")
    assert hosts_of_data(job_of(tmp_path, text=["/data"])) == ()
    assert hosts_of_data(job_of(tmp_path, text=["/data"], placement="parts")) == ("a",)
