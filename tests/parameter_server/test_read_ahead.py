"""Steps of a worker of parameter servers, loaded ahead as those of any other rank."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.server_runs import Run
from wanma.data import step_loader
from wanma.data.step_loader import StepBatches, StepLoader
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.training.loop.server_training import train_with_servers
from wanma.training.loop.train_request import TrainRequest

JOB = {
    "model": {
        "family": "recommender",
        "kind": "matrix_factorization",
        "recommender": {"embedding": 8},
    },
    "data": {"path": "synthetic:100x150x4000", "interactions": {"split": "random"}},
    "train": {"steps": 9, "global_batch": 16, "validate_every_steps": 4},
    "checkpoint": {"every_steps": 4},
    "servers": {"count": 2},
}


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_threads_load_the_steps_of_a_worker_each_once_and_count_their_requests(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_loader, "_HANDOVER_SECONDS", 0.0)  # else a loop loads quick steps itself
    loaded: list[tuple[int, str]] = []
    load = StepLoader.load

    def note(loader: StepLoader, step: int) -> StepBatches:
        loaded.append((step, threading.current_thread().name))
        return load(loader, step)

    monkeypatch.setattr(StepLoader, "load", note)
    worker = WorkerContext.single_process(tmp_path)
    prepared = Counter({("store_requests", "s3"): 3})
    request = TrainRequest(to_job(JOB), Plan(micro_batch=16), prepared_traffic=prepared)
    assert train_with_servers(worker, request, run(1, mode).clients[0], request) == "finished"
    assert sorted(step for step, _ in loaded) == list(range(9))
    assert {name.partition("_")[0] for _, name in loaded} == {"wanma-loader"}
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 10))
    assert sum(record.get("store_requests", {}).get("s3", 0) for record in records) == 3
