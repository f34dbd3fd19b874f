"""Commands of trainings and their records: wanma by `wanma train`, others by scripts on the same job."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, Start, clean_environment, run_command
from wanma.data.opening import prepare_job_data
from wanma.job.file.loading import load_job

TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Command:
    """Command of a contender; `job.toml`, `run` and `result.json` are in a folder of the sample's own."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), shlex.join(self.arguments)])


def prepare_data(job: str) -> None:
    """Build the token files of a job, once, for all contenders."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job)
        prepare_job_data(load_job(path).data)


def wanma_command() -> Command:
    return Command(("wanma", "train", "job.toml", "--run-dir", "run"), {})


def train_once(command: Command, job: str, steps: int, venv: Path, folder: Path) -> dict[str, Any]:
    """Run a contender on a job of `steps` steps; return its record: times, losses and facts.

    Args:
        folder: an empty folder.

    Raises:
        BenchmarkError: the contender failed or did not record every step.
    """
    start = prepare_start(command, job, venv, folder)
    finished = run_command(start.command, start.environment, start.log, TIMEOUT_SECONDS)
    return {**read_record(command, steps, folder), "command_seconds": round(finished.seconds, 2)}


def prepare_start(command: Command, job: str, venv: Path, folder: Path) -> Start:
    """Write the job into the contender's folder; return its start there."""
    (folder / "job.toml").write_text(job)
    places = {name: str(folder / name) for name in ("job.toml", "run", "result.json")}
    return Start(
        [places.get(argument, argument) for argument in command.arguments],
        {**clean_environment(venv), **command.environment},
        folder / "output.log",
    )


def read_record(command: Command, steps: int, folder: Path) -> dict[str, Any]:
    """Return times and losses of all steps, and facts.

    Raises:
        BenchmarkError: a step is missing.
    """
    result = folder / "result.json"
    record: dict[str, Any] = json.loads(result.read_text()) if result.exists() else _read_run(folder / "run")
    if len(record["times"]) != steps:
        raise BenchmarkError(f"{command}\nrecorded {len(record['times'])} of {steps} steps")
    return record


def with_speed(record: dict[str, Any], warmup: int, steps: int, tokens_per_step: int) -> dict[str, Any]:
    """Return a record with tokens per second of `steps` steps after `warmup` ones, instead of its times."""
    times = record.pop("times")
    window = times[warmup + steps - 1] - times[warmup - 1]
    return {"tokens_per_second": round(steps * tokens_per_step / window, 1), **record}


def _read_run(run: Path) -> dict[str, Any]:
    """Return times and losses of a wanma run, from its metrics."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run / "plan.json").read_text())["plan"]
    return {
        "times": [step["time"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "threads": plan["threads_per_rank"],
    }
