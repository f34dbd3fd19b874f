"""Processes that stay for many cases: starting them takes longer than training what a case trains."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.generated.case import Case, patched, program
from support.generated.optimizers import BUILT_IN
from support.generated.reference import Trained
from support.ranks import _context
from wanma.job.errors import WanmaError
from wanma.job.run.worker import NullSupervisorClient, WorkerContext

SECONDS = 150
"""After which a case that no rank has ended is said to hang."""
PATIENCE = 10
"""For the other ranks, after one has failed."""
PATIENCE_AFTER_REFUSAL = 2
"""Patience likewise, where nothing that they say goes before what one has said."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    kind: str
    """trained; refused (a WanmaError before the first update); late (after it); error; hang; crash."""
    text: str = ""
    trained: Trained | None = None


class Ranks:
    """So many processes, started when they are needed and anew after one of them has hung."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, case: Case) -> Outcome:
        if not self._processes:
            self._start()
        folder = Path(tempfile.mkdtemp(prefix="wanma-case-"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            self._send((case, store.port, folder))
            return self._collect(folder)
        finally:
            del store
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _send(self, what: Any) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(what)
        except OSError:  # one died after its last case
            self.close()
            self._start()
            for pipe in self._pipes:
                pipe.send(what)

    def _start(self) -> None:
        for rank in range(self._count):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self._count, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, folder: Path) -> Outcome:
        """Return the result of all ranks: the first failure, or rank 0's weights."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(self._pipes, range(self._count), strict=True))
        deadline = time.monotonic() + SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[rank] = Outcome("crash", f"rank {rank} is gone")
                if outcomes[rank].kind != "trained":
                    is_refused = outcomes[rank].kind == "refused"
                    patience = PATIENCE_AFTER_REFUSAL if is_refused else PATIENCE
                    deadline = min(deadline, time.monotonic() + patience)
        failed = [outcome for outcome in outcomes.values() if outcome.kind != "trained"]
        if waiting or any(outcome.kind == "crash" for outcome in failed):
            self.close()
        if not failed and waiting:
            stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*")))
            return Outcome("hang", f"no word of ranks {sorted(waiting.values())}\n{stacks}")
        # A rank that lost its peer says less than the peer.
        failed.sort(key=lambda outcome: outcome.kind in ("hang", "error", "crash") and "peer" in outcome.text)
        refused = [outcome for outcome in failed if outcome.kind == "refused"]
        return (refused or failed or [outcomes[0]])[0]


def _serve(rank: int, count: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            case, port, folder = pipe.recv()
        except EOFError:
            return
        worker = WorkerContext(
            rank, rank, count, count, 0, 1, folder, store_port=port, supervisor_client=Steps()
        )
        with (
            (folder / f"stack-{rank}").open("w") as stack,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            faulthandler.dump_traceback_later(SECONDS - 10, file=stack)
            outcome = _run(worker, case)
            faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)


class Steps(NullSupervisorClient):
    """Counts the steps that have changed the weights."""

    done = 0

    def report_finished_step(self, step: int) -> None:
        self.done = step


def _run(worker: WorkerContext, case: Case) -> Outcome:
    from wanma.elastic.failure import is_secondary_error

    control: Any = worker.supervisor_client
    try:
        own = program(case)
        if case.entry == "train":
            _train(worker, case, own)
        else:
            with patched(case):
                _own_loop(worker, case, own)
        if worker.rank > 0:
            return Outcome("trained")
        trained = _read(worker.run_directory)
        if case.entry == "train":
            _hand_back(own.make(), trained)
        return Outcome("trained", trained=trained)
    except BaseException as error:
        if is_secondary_error(error):  # as the supervisor judges it: whatever another rank says explains more
            return Outcome("error", "peer: " + traceback.format_exc())
        if isinstance(error, WanmaError):
            return Outcome("refused" if control.done == 0 else "late", str(error))
        return Outcome("error", traceback.format_exc())


def _train(worker: WorkerContext, case: Case, own: Any) -> None:
    """Work of a rank under `wanma.train`."""
    from support.generated.losses import LOSSES
    from wanma.api.run.job_run import pickle_request
    from wanma.job.run.run_directory import RunDirectory
    from wanma.job.sections.job import Job
    from wanma.planner.preparation.job_planning import complete_run_plan, initial_layout
    from wanma.training.checks.process_state import process_state
    from wanma.training.loop.train_worker import TrainRequest, train_worker

    RunDirectory(worker.run_directory).create()
    job = Job.model_validate(case.job())
    plan = complete_run_plan(job, initial_layout(job), None).plan
    objects = {"model": own.make(), "data": own.Sent()}
    if case.validates:
        objects["data"] = (own.Data(), own.Data(20))
    if not LOSSES[case.loss].default:
        objects["loss"] = own.loss
    if case.optimizer != BUILT_IN:
        objects["optimizer"] = own.Own
    with patched(case):
        state = process_state(objects.values())
    train_worker(worker, pickle_request(TrainRequest(job, plan, user_objects=objects, process_state=state)))


def _hand_back(model: Any, trained: Trained) -> None:
    """End of `wanma.train`: the user's own module takes the trained weights."""
    from wanma.api.train import _copy_weights

    _copy_weights(model, trained.tensors)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in trained.tensors:
            assert torch.equal(tensor, trained.tensors[name].to(tensor)), f"{name} was not handed back"


def _own_loop(worker: WorkerContext, case: Case, own: Any) -> None:
    """A script around `wanma.session`, as each rank of `wanma launch` runs it."""
    import wanma
    from wanma.job.run.run_directory import RunDirectory
    from wanma.job.run.worker import current_worker_context

    RunDirectory(worker.run_directory).create()
    token = current_worker_context.set(worker)
    try:
        optimizer = own.Own if case.optimizer != BUILT_IN else None
        with wanma.session(case.job(), optimizer=optimizer) as session:
            model = session.prepare(own.make())

            def losses(batch: Any) -> torch.Tensor:
                return own.loss(model(*batch.inputs), batch.targets)

            data = (own.Data(), own.Data(20)) if case.validates else own.Sent()
            for batch in session.batches(data, validate=losses if case.validates else None):
                session.step(losses(batch))
    finally:
        current_worker_context.reset(token)


def _read(run: Path) -> Trained:
    import json

    from support.ranks import Outcome as Files

    files = Files(run)
    tensors = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in files.tensors().items()
        if name.startswith("model.")
    }
    validation = None
    events = run / "events.jsonl"
    if events.exists():
        for line in events.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "validation":
                validation = event["loss"]
    return Trained(tensors, files.losses, validation)
