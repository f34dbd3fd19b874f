"""The examples of a first week do what they say; each trains in this process, which saves starting others."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import wanma
from wanma.api.run.callback_thread import CallbackThread
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, NullSupervisorClient, WorkerContext
from wanma.job.sections.job import Job
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import train

EXAMPLES = Path(__file__).parents[2] / "examples"


class _Control(NullSupervisorClient):
    """Passes events to callbacks, and their wish to stop on to the loop."""

    def __init__(self, called: CallbackThread) -> None:
        self.called, self.stops = called, False

    def send_event(self, event: Event) -> None:
        self.stops = bool(self.called.on_event(event)) or self.stops

    def is_drain_requested(self) -> bool:
        return self.stops


@pytest.fixture
def example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs an example; its jobs have one rank, in this process."""

    def train_job(
        job: Job,
        *,
        run_directory: Path,
        user_objects: dict[str, Any],
        callbacks: list[wanma.Callback],
        **_: Any,
    ) -> int:
        run = RunDirectory(run_directory)
        run.create()
        given = cloudpickle.loads(cloudpickle.dumps(user_objects))
        with CallbackThread(callbacks, run) as called:
            worker = WorkerContext.single_process(run.path, _Control(called))
            outcome = train(
                worker, TrainRequest(job, Plan(micro_batch=job.train.global_batch), user_objects=given)
            )
            exit_code = 0 if outcome == "finished" else 130
            called.end_run(exit_code, None)
        assert not called.failure
        run.job.write_text(job_to_toml(job))
        return exit_code

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wanma.api.train.train_job", train_job)
    return run


def test_metrics_of_ones_own(example: Callable[[str], str]) -> None:
    found = re.search(r"accuracy (\S+), near (\S+)", example("own_metrics.py"))
    assert 0.9 < float(found[1]) <= float(found[2]) <= 1


def test_callbacks_that_keep_curves_and_stop(example: Callable[[str], str]) -> None:
    told = example("callbacks.py")
    assert re.search(r"gradients of step 20: \{'0': [\d.e-]+, '2': [\d.e-]+, '4': [\d.e-]+\}", told)
    found = re.search(r"(\d+) losses, best accuracy (\S+)", told)
    assert 20 <= int(found[1]) <= 400
    assert float(found[2]) > 0.9
    assert "wanma.load('runs/callbacks', step=" in told


def test_an_optimizer_and_a_schedule_of_ones_own(example: Callable[[str], str]) -> None:
    found = re.search(r"0.5 \* -0.6 is (\S+)", example("own_optimizer.py"))
    assert abs(float(found[1]) + 0.3) < 0.1


def test_data_that_can_only_be_iterated_over(example: Callable[[str], str]) -> None:
    told = example("stream.py")
    found = re.search(r"0.1 \+ 2 \* 0.5 - 0.3 is (\S+)", told)
    assert abs(float(found[1]) - 0.8) < 0.1
    steps = [json.loads(line)["step"] for line in Path("runs/stream/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 241))


def test_several_inputs(example: Callable[[str], str]) -> None:
    found = re.search(r"0.1 \* 2 is (\S+)", example("several_inputs.py"))
    assert abs(float(found[1]) - 1.3) < 0.1


def test_several_targets(example: Callable[[str], str]) -> None:
    found = re.search(r"accuracy (\S+), radius off by (\S+)", example("several_targets.py"))
    assert float(found[1]) > 0.9
    assert float(found[2]) < 0.15
