"""Rank of wanma's own pipelined run, with a clock around the computation of torch's stages.

Started by torchrun: `bubble_rank.py --job JOB --folder FOLDER`; writes FOLDER/operations-RANK.json, a list of
steps, and by rank 0 FOLDER/plan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules, stage

from benchmarks.parallel.bubble import Kind, Operation
from wanma.job.file.loading import load_job
from wanma.job.run.worker import WorkerContext
from wanma.parallel.pipeline.pipeline_runner import PipelineRunner
from wanma.planner.preparation.job_planning import initial_layout, prepare_job
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = load_job(options.job)
    plan = prepare_job(job, initial_layout(job)).plan
    options.folder.mkdir(exist_ok=True)
    worker = WorkerContext(
        *(rank, rank, ranks, ranks, 0, 1, options.folder),
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
    )
    recorder = Recorder()
    recorder.attach()
    train(worker, TrainRequest(job, plan))
    steps = [[asdict(operation) for operation in step] for step in recorder.steps]
    (options.folder / f"operations-{rank}.json").write_text(json.dumps(steps))
    if rank == 0:
        (options.folder / "plan.json").write_text(json.dumps({"plan": plan.to_json()}))
    sys.stdout.flush()


class Recorder:
    """Recorder of this rank's operations, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[Operation]] = []

    def attach(self) -> None:
        """Attach clocks to torch's stages and schedules, and to wanma's pipeline, which begins the steps."""
        run = PipelineRunner.forward_backward

        @wraps(run)
        def step(*arguments: Any, **keywords: Any) -> Any:
            self.steps.append([])
            return run(*arguments, **keywords)

        PipelineRunner.forward_backward = step  # type: ignore[method-assign]  # that is the purpose
        base: Any = stage._PipelineStageBase
        base.forward_one_chunk = self._timed(base.forward_one_chunk, lambda *_, **__: "forward")
        base.backward_one_chunk = self._timed(
            base.backward_one_chunk,
            lambda *_, full_backward=True, **__: "backward" if full_backward else "input_backward",
        )
        base.backward_weight_one_chunk = self._timed(
            base.backward_weight_one_chunk, lambda *_, **__: "weight_backward"
        )
        schedule: Any = schedules._PipelineSchedule
        compute_loss = schedule._maybe_compute_loss

        @wraps(compute_loss)
        def loss(own: Any, at: Any, output: Any, targets: Any, number: int, *more: Any) -> Any:
            began, cpu = time.monotonic(), time.thread_time()
            result = compute_loss(own, at, output, targets, number, *more)
            if at.is_last:
                self._note("loss", at.stage_index, number, began, cpu)
            return result

        schedule._maybe_compute_loss = loss

    def _timed(self, function: Callable[..., Any], kind: Callable[..., Kind]) -> Callable[..., Any]:
        @wraps(function)
        def call(own: Any, number: int, *arguments: Any, **keywords: Any) -> Any:
            began, cpu = time.monotonic(), time.thread_time()
            result = function(own, number, *arguments, **keywords)
            self._note(kind(**keywords), own.stage_index, number, began, cpu)
            return result

        return call

    def _note(self, kind: Kind, number: int, micro_batch: int, began: float, cpu: float) -> None:
        ended, used = time.monotonic(), time.thread_time() - cpu
        self.steps[-1].append(Operation(kind, number, micro_batch, began, ended, used))


if __name__ == "__main__":
    main()
