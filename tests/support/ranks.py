"""Run a job on N real processes without the supervisor, and read back what it did."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from wanma.collectives.shared_memory.errors import SharedMemoryError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "wanma.training.loop.train_worker",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "wanma.models.huggingface.causal_model",
        "pytest",
        "support.compare",
        "support.warm_server",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """One run as its files tell it."""

    directory: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.steps]

    def tensors(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Full tensors of the checkpoint of `step`, by default the newest."""
        from wanma.checkpoint.load.reader import load_full_tensors

        folders = sorted(self.directory.joinpath("checkpoints").glob("step-*[0-9]"))
        path = folders[-1] if step is None else self.directory / "checkpoints" / f"step-{step:08d}"
        return load_full_tensors(path)


def run_job(
    directory: Path,
    job: dict[str, Any],
    plan: Plan,
    objects: dict[str, Any] | None = None,
    seconds: float = 120,
    patch: str | None = None,
    workers: Mapping[int, dict[str, Any]] | None = None,
) -> Outcome:
    """Train `job` under `plan` in `plan.world_size` processes; raises the first rank's error.

    Args:
        patch: 'package.module:function' that each rank calls before it trains, to change what it runs.
        workers: by rank, fields of its `WorkerContext` that are not as usual.
    """
    # By value, as `wanma.train` sends them: multiprocessing alone would let ranks share the tensors' memory.
    by_value = cloudpickle.dumps(objects or {})
    run_ranks(_train_rank, plan.world_size, (directory, job, plan, by_value, patch, workers or {}), seconds)
    return Outcome(directory)


def run_here(directory: Path, job: dict[str, Any], plan: Plan, objects: dict[str, Any]) -> Outcome:
    """`run_job` of one rank in this very process, which costs no start of another; raises its error."""
    from wanma.training.loop.train_request import TrainRequest
    from wanma.training.loop.train_worker import train

    RunDirectory(directory).create()
    given = cloudpickle.loads(cloudpickle.dumps(objects))
    train(
        WorkerContext.single_process(directory),
        TrainRequest(Job.model_validate(job), plan, user_objects=given),
    )
    return Outcome(directory)


class RankCrashError(AssertionError):
    """A rank's process died of a fault in native code."""


def run_ranks(function: Any, world_size: int, arguments: tuple[Any, ...], seconds: float = 120) -> list[Any]:
    """Call `function(worker, *arguments)` in `world_size` processes that share a store.

    Returns:
        results by rank.
    """
    results: Queue[tuple[int, Any, str | None]] = _context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scratch = tempfile.TemporaryDirectory(prefix="wanma-test-")
    folder = Path(scratch.name)
    processes = [
        _context.Process(
            target=_run_rank,
            args=(function, rank, world_size, store.port, folder, arguments, results),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    try:
        for _ in processes:
            try:
                rank, value, error = results.get(timeout=seconds)
            except queue.Empty:
                _check_for_crashes(processes, "the others waited for it")
                raise
            if error is not None:
                _check_for_crashes(processes, f"rank {rank} then failed:\n{error}")
                raise AssertionError(f"rank {rank} failed:\n{error}{_cause_of(error, results)}")
            values[rank] = value
        for process in processes:
            process.join(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        scratch.cleanup()
    return [values[rank] for rank in range(world_size)]


def _cause_of(error: str, results: Queue[tuple[int, Any, str | None]]) -> str:
    """Failure of another rank, where the first one heard of was only the loss of a peer."""
    if SharedMemoryError.__name__ not in error:
        return ""
    with contextlib.suppress(queue.Empty):
        while True:
            rank, _, cause = results.get(timeout=2)
            if cause is not None:
                return f"\nrank {rank} failed:\n{cause}"
    return ""


def _check_for_crashes(processes: Sequence[BaseProcess], outcome: str) -> None:
    """Blame the rank that took the others down, which report sooner than it is seen to be gone."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if process.exitcode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
                died = signal.Signals(-process.exitcode).name
                raise RankCrashError(f"rank {rank} died of {died}; {outcome}")
        time.sleep(0.05)


def _run_rank(
    function: Any,
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    arguments: tuple[Any, ...],
    results: Queue[tuple[int, Any, str | None]],
) -> None:
    worker = WorkerContext(rank, rank, world_size, world_size, 0, 1, folder, store_port=port)
    torch.set_num_threads(1)
    try:
        results.put((rank, function(worker, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def _train_rank(
    worker: WorkerContext,
    directory: Path,
    job: dict[str, Any],
    plan: Plan,
    objects: bytes,
    patch: str | None,
    workers: Mapping[int, dict[str, Any]],
) -> str:
    from dataclasses import replace

    from wanma.job.file.import_path import import_object
    from wanma.training.loop.train_worker import TrainRequest, train

    if patch is not None:
        import_object(patch, "patch")()
    worker = replace(worker, run_directory=directory, **workers.get(worker.rank, {}))
    return train(worker, TrainRequest(Job.model_validate(job), plan, user_objects=cloudpickle.loads(objects)))
