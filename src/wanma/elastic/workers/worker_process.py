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

from wanma.elastic.failure import Failure, failure_of_exception
from wanma.elastic.protocol.framing import Framer, decode
from wanma.elastic.protocol.local_messages import Happened, Spawn, WorkerSpec
from wanma.elastic.protocol.messages import (
    Failed,
    Finished,
    Inspect,
    Message,
    Paused,
)
from wanma.elastic.workers.flight_recorder import RECORDED, whereabouts
from wanma.elastic.workers.linux_processes import be_called
from wanma.elastic.workers.progress_board import Board, BoardWriter
from wanma.elastic.workers.signal_dispositions import in_child
from wanma.elastic.workers.store_server import serve_store
from wanma.elastic.workers.worker_output import born_line, ending_line
from wanma.job.file.import_path import import_object
from wanma.job.run.generation_claims import Fence
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, Images, Worker


def run_worker(spec: WorkerSpec, descriptors: list[int], born: str) -> NoReturn:
    """Run one rank to its end; the exit code is 0 only if the entry function returned."""
    try:
        channel = Channel(socket.socket(fileno=descriptors[0]), spec.generation)
        code = _run(spec, descriptors[1:], born, channel)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


class Channel:
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

    def answer(self) -> None:
        """Answer every `Inspect` until the supervisor closes the channel; runs in a thread of its own."""
        while data := self._socket.recv(1 << 16):
            self._framer.feed(data)
            while (message := self._framer.next()) is not None:
                if isinstance(message, Inspect):
                    self.send(whereabouts())


class Supervised:
    """Implementation of `Control` for a supervised rank: progress board and channel."""

    def __init__(self, channel: Channel, board: Board, writer: BoardWriter) -> None:
        self._channel = channel
        self.progress = writer.write
        self.step_done = writer.step_done
        self.worked = writer.worked
        self.stop_requested = board.stop_requested
        self.pause_requested = board.pause_requested
        self.stop_until = board.stop_until
        self.leaving = writer.leave

    def event(self, event: Event) -> None:
        self._channel.send(Happened(event))

    def pausing(self) -> None:
        self._channel.send(Paused())


def _run(spec: WorkerSpec, descriptors: list[int], born: str, channel: Channel) -> int:
    board_descriptor, payload, stacks, *listener = descriptors
    log = RunDirectory(Path(spec.run_directory)).log(spec.rank)
    failure: Failure | None = None
    try:
        _redirect(log)
        be_called(f"wanma rank {spec.rank}", f"rank {spec.rank}")
        print(born_line(spec, born), flush=True)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
        _settle(spec)
        board = Board(board_descriptor, spec.local_world_size)
        control = Supervised(channel, board, board.writer(spec.local_rank))
        threading.Thread(target=channel.answer, daemon=True, name="wanma-inspect").start()
        store = serve_store(listener[0], spec.store_host, spec.store_port) if listener else None
        entry = import_object(spec.entry, "entry")
        worker = Worker(
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
            control=control,
            images=_images(spec),
            restart=spec.restart,
            ranks_by_node=spec.ranks_by_node,
            fence=Fence(Path(spec.run_directory), spec.generation) if spec.claimed else None,
        )
        entry(worker, os.pread(payload, os.fstat(payload).st_size, 0))
    except SystemExit as leave:
        if leave.code not in (None, 0):
            failure = _failure(spec, leave, log)
    except BaseException as error:
        failure = _failure(spec, error, log)
    if failure is not None:
        channel.send(Failed(failure))
        sys.stdout.flush()
        return 1
    # As an interpreter does at its end: wait for threads, call registered functions, flush.
    threading._shutdown()  # type: ignore[attr-defined]  # the only way that also ends idle executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(Finished())
    return 0


def _images(spec: WorkerSpec) -> Images | None:
    if not spec.images:
        return None
    one, other = spec.images
    found = {int(rank): paths for rank, paths in spec.found.items()}
    guests = {int(rank): paths for rank, paths in spec.guests.items()}
    return Images((one, other), found, spec.restore_step, guests)


def _failure(spec: WorkerSpec, error: BaseException, log: Path) -> Failure:
    error = error.with_traceback(_below_us(error.__traceback__))
    print(ending_line(spec.rank), flush=True)
    traceback.print_exception(error)
    return failure_of_exception(error, spec.rank, spec.node_rank, socket.gethostname(), str(log))


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames below the entry function of a script, or of other code that runs here."""
    ours = (__file__, "/wanma/api/launch/script_worker.py", "<frozen runpy>", "/runpy.py")
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(ours):
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


def _settle(spec: WorkerSpec) -> None:
    """Set environment and threads, before the job's code runs and before any parallel region of torch."""
    os.environ.update(spec.environment)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(spec.threads)


def main() -> None:
    """Run a worker started by exec."""
    order, parent = int(sys.argv[1]), int(sys.argv[2])
    in_child(parent)
    _, message = decode(os.pread(order, os.fstat(order).st_size, 0))
    os.close(order)
    if not isinstance(message, Spawn):
        raise SystemExit("the order is no Spawn message")
    for descriptor in message.descriptors:
        os.set_inheritable(descriptor, False)
    sys.path[:] = message.path
    run_worker(message.spec, list(message.descriptors), "spawned")


if __name__ == "__main__":
    main()
