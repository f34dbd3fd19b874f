"""Run a job on N real processes without the supervisor, and read back what it did."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from support.rank_state import RankState, serve_state
from wanma.collectives.shared_memory.errors import SharedMemoryError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.torch_internals.dtensor import clear_dtensor_caches

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "wanma.training.loop.train_worker",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "wanma.models.huggingface.causal_model",
        "pytest",
        "hypothesis.strategies",
        "support.compare",
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

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]

    @property
    def messages(self) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == "message"]

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "validation"]

    @property
    def validation_losses(self) -> list[float]:
        return [event["loss"] for event in self.validations]

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
    arguments = (directory, job, plan, by_value, patch, workers or {})
    run_ranks(_train_rank, plan.world_size, arguments, seconds, is_reused=patch is None)
    return Outcome(directory)


def run_here(
    directory: Path, job: dict[str, Any], plan: Plan, objects: dict[str, Any] | None = None
) -> Outcome:
    """`run_job` of one rank in this very process, which costs no start of another; raises its error."""
    from wanma.training.loop.train_request import TrainRequest
    from wanma.training.loop.train_worker import train

    RunDirectory(directory).create()
    given = cloudpickle.loads(cloudpickle.dumps(objects or {}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(
            WorkerContext.single_process(directory),
            TrainRequest(Job.model_validate(job), plan, user_objects=given),
        )
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    return Outcome(directory)


class RankCrashError(AssertionError):
    """A rank's process died of a fault in native code."""


@dataclass
class _RankProcess:
    """Process that runs one rank at a time, again and again, and its connection."""

    process: BaseProcess
    connection: Connection
    state: RankState
    runs: int = 0

    @classmethod
    def start(cls) -> _RankProcess:
        connection, its_connection = _context.Pipe()
        requests, its_requests = _context.Pipe()
        state = RankState(requests)
        arguments = (its_connection, its_requests, state.stacks_path)
        process = _context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        its_connection.close()
        its_requests.close()
        return cls(process, connection, state)

    def begin_run(self) -> None:
        """Count a run that begins now."""
        self.runs += 1
        assert self.process.pid is not None
        self.state.begin_run(self.process.pid)

    def read_position(self) -> str:
        """Return where the process is: equal at two times if it has not moved."""
        assert self.process.pid is not None
        return self.state.read_position(self.process.pid)

    def describe(self) -> str:
        """Return the state of the process in a hang, in lines."""
        assert self.process.pid is not None
        return f"run {self.runs} of process {self.process.pid}\n{self.state.describe(self.process.pid)}"

    def close(self, seconds: float) -> None:
        """Let it end; kill it if that takes longer than `seconds`."""
        self.connection.close()
        self.state.close()
        self.process.join(seconds)
        self.process.kill()
        self.process.join()


PATIENCE = 5
"""Multiple of their time that ranks get as long as one of them moves: on a loaded machine all are slow."""
MAX_RUNS = 50
"""Most runs of a process: what it keeps unseen of one run must not reach all others."""
_idle_processes: defaultdict[int, list[_RankProcess]] = defaultdict(list)
"""Processes by the rank that they run: what a process keeps of a mesh holds for its own place in it alone."""


def run_ranks(
    function: Any, world_size: int, arguments: tuple[Any, ...], seconds: float = 120, is_reused: bool = False
) -> list[Any]:
    """Call `function(worker, *arguments)` in `world_size` processes that share a store.

    Args:
        is_reused: take processes of earlier calls and leave them to later ones, which saves what a process
            does once. `function` then must leave nothing changed, as a patch of a module would.

    Returns:
        results by rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        _idle_processes[rank].pop() if is_reused and _idle_processes[rank] else _RankProcess.start()
        for rank in range(world_size)
    ]
    grace_seconds = 0.0
    try:
        with tempfile.TemporaryDirectory(prefix="wanma-test-") as scratch:
            for rank, process in enumerate(processes):
                process.begin_run()
                process.connection.send((function, rank, world_size, store.port, Path(scratch), arguments))
            values = _answers(processes, seconds)
        grace_seconds = seconds
        if is_reused:
            for rank, process in enumerate(processes):
                if process.runs < MAX_RUNS:
                    _idle_processes[rank].append(process)
            processes = [process for process in processes if process.runs >= MAX_RUNS]
    finally:
        for process in processes:
            process.connection.close()
        for process in processes:
            process.close(grace_seconds)
    return values


def _answers(ranks: Sequence[_RankProcess], seconds: float) -> list[Any]:
    """Return the results by rank; raises the first rank's error.

    Args:
        ranks: processes of the ranks.
        seconds: time without an answer after which ranks that do not move count as hung.
    """
    values: dict[int, Any] = {}
    waiting = {process.connection: rank for rank, process in enumerate(ranks)}
    waited, last_positions = 0.0, list[str]()
    while waiting:
        ready = wait(list(waiting), timeout=seconds / 2)
        if not ready:
            waited += seconds / 2
            positions = [ranks[rank].read_position() for rank in sorted(waiting.values())]
            if (moved := positions != last_positions) and waited < PATIENCE * seconds:
                last_positions = positions
                continue
            _check_for_crashes(_processes(ranks, waiting), "the others waited for it")
            raise TimeoutError(_describe_hang(ranks, sorted(waiting.values()), waited, moved=moved))
        waited, last_positions = 0.0, []
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                value, error = connection.recv()
            except EOFError:
                _check_for_crashes(
                    {rank: ranks[rank].process, **_processes(ranks, waiting)}, "it gave no answer"
                )
                raise AssertionError(f"rank {rank} ended without an answer") from None
            if error is not None:
                _check_for_crashes(_processes(ranks, waiting), f"rank {rank} then failed:\n{error}")
                raise AssertionError(f"rank {rank} failed:\n{error}{_cause_of(error, waiting)}")
            values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _processes(ranks: Sequence[_RankProcess], waiting: Mapping[Connection, int]) -> dict[int, BaseProcess]:
    """Processes of the ranks that have not answered."""
    return {rank: ranks[rank].process for rank in waiting.values()}


def _describe_hang(
    ranks: Sequence[_RankProcess], waiting: Sequence[int], seconds: float, *, moved: bool
) -> str:
    """Describe all ranks, those that have answered included: they may have left the others alone."""
    outcome = "though they still moved" if moved else "and none of them moved any more"
    parts = [f"no answer of ranks {waiting} in {seconds:g} s, {outcome}"]
    for rank, process in enumerate(ranks):
        answered = "" if rank in waiting else ", has answered"
        parts.append(f"rank {rank}{answered}: {process.describe()}")
    return "\n\n".join(parts)


def _cause_of(error: str, waiting: Mapping[Connection, int]) -> str:
    """Failure of another rank, where the first one heard of was only the loss of a peer."""
    if SharedMemoryError.__name__ not in error:
        return ""
    deadline = time.monotonic() + 2
    left = dict(waiting)
    while left and (ready := wait(list(left), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = left.pop(connection)
            with contextlib.suppress(EOFError):
                _, cause = connection.recv()
                if cause is not None:
                    return f"\nrank {rank} failed:\n{cause}"
    return ""


def _check_for_crashes(processes: Mapping[int, BaseProcess], outcome: str) -> None:
    """Blame the rank that took the others down, which report sooner than it is seen to be gone.

    Waits until all have ended, but no longer than a second: those that wait for the others do not end.

    Args:
        processes: by rank, of those that have given no result.
        outcome: end of the message.
    """
    deadline = time.monotonic() + 1
    while True:
        codes = {rank: process.exitcode for rank, process in processes.items()}
        for rank, code in codes.items():
            if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
                raise RankCrashError(f"rank {rank} died of {signal.Signals(-code).name}; {outcome}")
        if None not in codes.values() or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _serve(connection: Connection, requests: Connection, stacks: Path) -> None:
    """Run one rank after another until the other end closes the connection, or one fails.

    Args:
        connection: connection that brings functions and takes their results.
        requests: connection that asks for the state of this process.
        stacks: file of its stacks.
    """
    serve_state(requests, stacks)
    environment = dict(os.environ)
    gc.freeze()  # what is imported before a run need not be searched after it
    while True:
        try:
            function, rank, world_size, port, folder, arguments = connection.recv()
        except EOFError:
            return
        worker = WorkerContext(rank, rank, world_size, world_size, 0, 1, folder, store_port=port)
        torch.set_num_threads(1)
        try:
            # In a context of its own: scripts set the worker's there.
            value = contextvars.copy_context().run(function, worker, *arguments)
            connection.send((value, None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
            raise
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        del value, arguments
        clear_dtensor_caches()  # of functions that open a mesh without `open_mesh`
        gc.collect()


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
