"""Programs of Slurm that give recorded answers, and a run of job 7 to ask about."""

from __future__ import annotations

from pathlib import Path

from wanma.engines.engine import Submission
from wanma.engines.engine_record import make_engine_record, write_engine_record
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection


def answer(programs: Path, name: str, lines: str) -> Path:
    """Let a program answer by a shell script; return the file in which it notes its calls."""
    calls = programs / f"{name}.calls"
    (programs / name).write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{lines}\n')
    (programs / name).chmod(0o755)
    return calls


def submitted(tmp_path: Path, nodes: int | str = 2, command: tuple[str, ...] = ("train",)) -> RunDirectory:
    """Return the run of job 7."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.engine_files.mkdir()
    section = ClusterSection.model_validate({"engine": "slurm", "nodes": nodes})
    handle = {"jobs": ["7"], "run_directory": str(run.path)}
    write_engine_record(run, make_engine_record("slurm", submission(run, section, command), handle))
    return run


def submission(
    run: RunDirectory, section: ClusterSection, command: tuple[str, ...] = ("train",)
) -> Submission:
    return Submission(
        name="run",
        run_directory=run.path,
        folder=run.path,
        command=command,
        nodes=section.nodes,
        min_nodes=section.min_nodes or section.nodes,
        ranks_per_node=1,
        gpus_per_node=0,
        cores_per_node=1,
        settings=section,
        secret="",
    )
