"""MLflow's server and W&B's offline files, fed by the process of trackers, read by their own libraries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.networks import free_port
from support.waiting import wait_until
from wanma.job.run.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-trackers" / "bin" / "python"
"""Interpreter that has mlflow and wandb."""
TIME = 1.7e9

READ_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("wanma").experiment_id])
history = {tag: [m.step for m in client.get_metric_history(run.info.run_id, tag)] for tag in run.data.metrics}
print(json.dumps([run.info.run_name, run.info.status, run.data.params["train.steps"], history]))
"""
READ_WANDB = """
import json, pathlib, sys
from wandb.proto import wandb_internal_pb2
from wanma.observe.trackers.wandb_tracker import _records
rows = []
for path in sorted(pathlib.Path(sys.argv[1]).rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime):
    for text in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(text)
        if record.HasField("history"):
            cells = record.history.item
            items = {(cell.nested_key or [cell.key])[0]: json.loads(cell.value_json) for cell in cells}
            rows.append([items["step"], sorted(items)])
print(json.dumps(rows))
"""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PYTHON.exists(), reason="without mlflow and wandb: make trackers"),
    pytest.mark.timeout(600),
]


def write_steps(run: RunDirectory, first: int, last: int) -> None:
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "time": TIME + step, "loss": 1.0 / step}) + "\n")


def write_event(run: RunDirectory, **values: Any) -> None:
    with run.events.open("a") as file:
        file.write(json.dumps(values) + "\n")


def arrived(run: RunDirectory, tracker: str) -> int:
    state = run.path / "trackers" / tracker / "state.json"
    return json.loads(state.read_text())["steps"]["step"] if state.exists() else 0


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    port = free_port()
    options = ["--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/store.db", "--workers", "1"]
    with (folder / "server.log").open("w") as log:
        command = [PYTHON, "-m", "mlflow", "server", "--host", "127.0.0.1", *options]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_every_record_arrives_once_though_the_process_is_killed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "gpt")
    run.create()
    run.job.write_text('[model]\npreset = "gpt-10m"\n[train]\nsteps = 100\n')
    write_event(run, kind="start", time=TIME, step=0, steps=100)
    write_steps(run, 1, 50)
    write_event(run, kind="validation", time=TIME + 50.5, step=50, loss=3.0)
    with mlflow_server(tmp_path) as url:
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "MLFLOW_TRACKING_URI": url,
            "WANDB_MODE": "offline",
        }

        def start() -> subprocess.Popen[bytes]:
            command = [PYTHON, "-m", "wanma.observe.trackers.process", str(run.path), "mlflow", "wandb"]
            return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

        def read(program: str, *words: object) -> Any:
            output = subprocess.check_output([PYTHON, "-c", program, *map(str, words)], env=environment)
            return json.loads(output.splitlines()[-1])

        process = start()
        for tracker in ("mlflow", "wandb"):
            wait_until(lambda tracker=tracker: arrived(run, tracker) == 50, f"50 steps in {tracker}")  # type: ignore[misc]
        process.kill()
        process.wait()
        write_steps(run, 51, 60)
        write_event(run, kind="finish", time=TIME + 61, step=60, outcome="finished")
        process = start()
        process.communicate()
        assert process.returncode == 0
        name, status, steps, history = read(READ_MLFLOW)
        rows = read(READ_WANDB, run.path / "trackers")
    assert (name, status, steps) == ("gpt", "FINISHED", "100")
    assert history["train/loss"] == list(range(1, 61))
    assert history["validation/loss"] == [50]
    assert [step for step, tags in rows if "train/loss" in tags] == list(range(1, 61))
    assert [step for step, tags in rows if "validation/loss" in tags] == [50]
