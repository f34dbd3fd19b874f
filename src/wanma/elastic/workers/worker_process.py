"""Worker process of one rank, from its start to the entry function of the job.

Forked by the fork server (`run_worker`), or started by exec when a fork would be unsafe (`python -m
wanma.elastic.workers.worker_process ORDER PARENT`). It ends by `os._exit` after the interpreter's usual last
steps, because the forked stack below it belongs to the fork server.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from wanma.elastic.claims.claim_stores import open_claim_store
from wanma.elastic.failure import Failure, failure_from_exception
from wanma.elastic.protocol.framing import Framer, decode
from wanma.elastic.protocol.local_messages import EventReport, ExecArguments, WorkerSpec
from wanma.elastic.protocol.messages import (
    CompletionReport,
    FailureReport,
    Message,
    RankStatusRequest,
    SuspendReport,
)
from wanma.elastic.workers.flight_recorder import FLIGHT_RECORDER_ENTRIES, read_collective_state
from wanma.elastic.workers.linux_processes import set_process_name
from wanma.elastic.workers.progress_board import ProgressBoard, ProgressWriter
from wanma.elastic.workers.signal_dispositions import configure_child_process
from wanma.elastic.workers.store_server import serve_store
from wanma.elastic.workers.worker_output import exception_line, start_line
from wanma.job.file.import_path import import_object
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, MemoryFilePaths, WorkerContext


def run_worker(spec: WorkerSpec, descriptors: list[int], start_method: str) -> NoReturn:
    """Run one rank to its end; the exit code is 0 only if the entry function returned."""
    try:
        channel = SupervisorChannel(socket.socket(fileno=descriptors[0]), spec.generation)
        code = _run(spec, descriptors[1:], start_method, channel)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


class SupervisorChannel:
    """Worker's channel to its supervisor: blocking, safe from any thread."""

    def __init__(self, sock: socket.socket, generation: int) -> None:
        self._socket = sock
        self._framer = Framer()
        self._framer.generation = generation
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        line = self._framer.frame(message)
        with self._lock:
            self._socket.sendall(line)

    def serve_status_requests(self) -> None:
        """Answer every `RankStatusRequest` until the supervisor closes the channel; called in a thread."""
        while data := self._socket.recv(1 << 16):
            self._framer.feed(data)
            while (message := self._framer.read_message()) is not None:
                if isinstance(message, RankStatusRequest):
                    self.send(read_collective_state())


class WorkerSupervisorClient:
    """Implementation of `SupervisorClient` for a supervised rank: progress board and channel."""

    def __init__(self, channel: SupervisorChannel, board: ProgressBoard, writer: ProgressWriter) -> None:
        self._channel = channel
        self.report_progress = writer.report_progress
        self.report_finished_step = writer.report_finished_step
        self.report_work = writer.report_work
        self.is_drain_requested = board.is_drain_requested
        self.is_suspend_requested = board.is_suspend_requested
        self.profile_request = board.profile_request
        self.kill_deadline = board.kill_deadline
        self.report_drain = writer.report_drain

    def send_event(self, event: Event) -> None:
        self._channel.send(EventReport(event))

    def report_suspend(self) -> None:
        self._channel.send(SuspendReport())


def _run(spec: WorkerSpec, descriptors: list[int], start_method: str, channel: SupervisorChannel) -> int:
    board_descriptor, payload, stacks, *listener = descriptors
    log = RunDirectory(Path(spec.run_directory)).rank_log(spec.rank)
    failure: Failure | None = None
    try:
        _redirect(log)
        set_process_name(f"wanma rank {spec.rank}", f"rank {spec.rank}")
        print(start_line(spec, start_method), flush=True)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
        _configure_process(spec)
        board = ProgressBoard(board_descriptor, spec.local_world_size)
        control = WorkerSupervisorClient(channel, board, board.writer(spec.local_rank))
        threading.Thread(target=channel.serve_status_requests, daemon=True, name="wanma-inspect").start()
        store = serve_store(listener[0], spec.store_host, spec.store_port) if listener else None
        entry = import_object(spec.entry, "entry")
        worker = WorkerContext(
            rank=spec.rank,
            local_rank=spec.local_rank,
            world_size=spec.world_size,
            local_world_size=spec.local_world_size,
            node_rank=spec.node_rank,
            generation=spec.generation,
            run_directory=Path(spec.run_directory),
            store_host=spec.store_host,
            store_port=spec.store_port,
            store=store,
            supervisor_client=control,
            memory_files=_memory_files(spec),
            restart=spec.restart,
            local_world_sizes=spec.local_world_sizes,
            rank_addresses=spec.rank_addresses,
            fence=open_claim_store(spec.claims, Path(spec.run_directory)).fence(spec.generation)
            if spec.claims is not None
            else None,
        )
        entry(worker, os.pread(payload, os.fstat(payload).st_size, 0))
    except SystemExit as leave:
        if leave.code not in (None, 0):
            failure = _failure(spec, leave, log)
    except BaseException as error:
        failure = _failure(spec, error, log)
    if failure is not None:
        channel.send(FailureReport(failure))
        sys.stdout.flush()
        return 1
    # As an interpreter does at its end: wait for threads, call registered functions, flush.
    threading._shutdown()  # type: ignore[attr-defined]  # the only way that also ends idle executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(CompletionReport())
    return 0


def _memory_files(spec: WorkerSpec) -> MemoryFilePaths | None:
    if not spec.memory_file_paths:
        return None
    one, other = spec.memory_file_paths
    restore_paths = {int(rank): paths for rank, paths in spec.restore_paths.items()}
    backup_paths = {int(rank): paths for rank, paths in spec.backup_paths.items()}
    return MemoryFilePaths((one, other), restore_paths, spec.restore_step, backup_paths)


def _failure(spec: WorkerSpec, error: BaseException, log: Path) -> Failure:
    error = error.with_traceback(_strip_own_frames(error.__traceback__))
    print(exception_line(spec.rank), flush=True)
    traceback.print_exception(error)
    return failure_from_exception(error, spec.rank, spec.node_rank, socket.gethostname(), str(log))


def _strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames below the entry function of a script, or of other code that runs here."""
    launchers = tuple(f"/wanma/api/launch/{name}.py" for name in ("script_worker", "script_main"))
    own_files = (__file__, *launchers, "<frozen runpy>", "/runpy.py")
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(own_files):
        trace = trace.tb_next
    return trace


def _redirect(log: Path) -> None:
    """Redirect standard output and error, of Python and of native code, to the rank's log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.close(null)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _configure_process(spec: WorkerSpec) -> None:
    """Set environment and threads, before the job's code runs and before any parallel region of torch."""
    os.environ.update(spec.environment)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(spec.threads_per_rank)


def main() -> None:
    """Run a worker started by exec."""
    order, parent = int(sys.argv[1]), int(sys.argv[2])
    configure_child_process(parent)
    _, message = decode(os.pread(order, os.fstat(order).st_size, 0))
    os.close(order)
    if not isinstance(message, ExecArguments):
        raise SystemExit("the order is no Spawn message")
    for descriptor in message.descriptors:
        os.set_inheritable(descriptor, False)
    sys.path[:] = message.sys_path
    run_worker(message.spec, list(message.descriptors), "spawned")


if __name__ == "__main__":
    main()
