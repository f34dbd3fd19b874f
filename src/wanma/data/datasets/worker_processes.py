"""Loader processes, which read batches where Python of users or other packages holds the interpreter's lock.

Each process has a copy of the dataset and reads one batch at a time. They come from a fork server of their
own, which has imported torch and has neither threads nor devices. A batch comes back in a file in memory, as
between ranks (`handover`), and is not pickled. A process ends when its parent does, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import weakref
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

import cloudpickle
import torch
import torch.multiprocessing

from wanma.data.batch import Batch
from wanma.data.datasets.load_times import LoadTimes, LoadWork
from wanma.data.handover.batch_layout import UnsupportedTensorError
from wanma.data.handover.shared_batches import BatchFile, map_batch
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError, WanmaError
from wanma.torch_internals.pickling import dumps_by_value

_END_SECONDS = 5.0


class BatchReader(Protocol):
    """Function (of validation, rows, sample indices) that reads a batch in a process."""

    def __call__(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray, /) -> Batch: ...

    @property
    def load_times(self) -> LoadTimes:
        """Work of reading in that process."""


class WorkerProcesses:
    """Processes that read batches; started with the first batch, and anew in a forked process.

    Args:
        reader: function that reads a batch in a process; pickled by value.
        load_times: work of loading of this rank, to which that of the processes is added.
    """

    def __init__(self, reader: BatchReader, count: int, name: str, load_times: LoadTimes) -> None:
        self._reader, self._count, self._name = reader, count, name
        self._load_times = load_times
        self._lock = threading.Lock()
        self._process_id = 0
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def read(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        """Read a batch in an idle process; wait for one.

        Raises:
            Exception: the exception that reading raised there.
            WanmaError: the process has died.
        """
        with self._lock:
            if self._process_id != os.getpid():
                self._start()
        worker = self._idle.get()
        if worker.is_interrupted:
            worker = worker.replacement()
        try:
            batch, work = worker.read(is_validation, rows, sample_indices)
        finally:
            self._idle.put(worker)
        self._load_times.add_work(work)
        return batch

    def _start(self) -> None:
        try:
            payload = dumps_by_value(self._reader)
        except Exception as error:  # a dataset may hold anything
            raise JobError(
                f"data.worker_processes: {self._name} cannot be pickled: {type(error).__name__}: {error}",
                "open files and connections when a sample is read, or set data.worker_processes = false",
            ) from error
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__, type(self._reader).__module__])
        self._idle = queue.SimpleQueue()
        for number in range(self._count):
            self._idle.put(_Worker(context, payload, f"loader process {number} of {self._name}"))
        self._process_id = os.getpid()


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, context: Any, payload: bytes, name: str) -> None:
        self._name, self._context, self._payload = name, context, payload
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, payload), name=name, daemon=True)
        self._process.start()
        theirs.close()
        weakref.finalize(self, _end, self._connection, self._process)

    @property
    def is_interrupted(self) -> bool:
        """True if a request was interrupted: the process is given up, and ends by itself."""
        return bool(self._connection.closed)

    def replacement(self) -> _Worker:
        """Start another process like this one."""
        return _Worker(self._context, self._payload, self._name)

    def read(
        self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray
    ) -> tuple[Batch, LoadWork]:
        try:
            self._connection.send((is_validation, rows, sample_indices))
            answer, note = self._connection.recv()
            if isinstance(answer, dict):
                answer = _receive_batch(self._connection, answer)
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            code = self._process.exitcode
            end = (
                f"was killed by {signal.Signals(-code).name}"
                if code is not None and code < 0
                else (f"ended with code {code}")
            )
            raise WanmaError(
                f"data: the {self._name} {end}",
                "see its message in the rank's log; SIGKILL is often a lack of memory: lower data.workers",
            ) from error
        except BaseException:  # an interruption: the answer to come must not be that of the next request
            self._connection.close()
            raise
        if isinstance(answer, Batch):
            return answer, note
        raise _load_error(answer, note, self._name)


def _end(connection: Connection, process: Any) -> None:
    """Let a process end: it reads the end of its input."""
    with contextlib.suppress(OSError):
        connection.close()
    process.join(_END_SECONDS)


def _serve(connection: Connection, payload: bytes) -> None:
    """Read batches on request, until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    torch.set_num_threads(1)
    reader: BatchReader | None = None
    try:
        reader = pickle.loads(payload)
    except Exception as error:
        failure = _dump_error(
            WanmaError(
                "data.worker_processes: the dataset cannot be opened in another process: "
                f"{type(error).__name__}: {error}",
                "import what it needs in its module, or set data.worker_processes = false",
            )
        )
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if reader is None:
                connection.send(failure)
            else:
                _answer(connection, reader, request)
        except (BrokenPipeError, ConnectionResetError):
            return


def _answer(
    connection: Connection, reader: BatchReader, request: tuple[bool, IndexArray, IndexArray]
) -> None:
    """Read a batch and send it in a file in memory; pickle one whose tensors cannot lie in bytes."""
    file: BatchFile | None = None
    try:
        batch = reader(*request)
        work = reader.load_times.take_work()
        if hasattr(os, "memfd_create"):  # of Linux
            with contextlib.suppress(UnsupportedTensorError):
                file = BatchFile(batch)
    except Exception as error:
        connection.send(_dump_error(error))
        return
    if file is None:
        connection.send((batch, work))
        return
    connection.send((file.layout, work))
    send_handle(connection, file.descriptor, 0)  # on POSIX the process does not matter


def _receive_batch(connection: Connection, layout: dict[str, Any]) -> Batch:
    """Map the batch whose file follows its layout."""
    descriptor = recv_handle(connection)
    try:
        return map_batch(layout, descriptor)
    finally:
        os.close(descriptor)


def _dump_error(error: Exception) -> tuple[bytes | None, str]:
    """Return an exception pickled, if it can be, and as text."""
    text = f"{type(error).__name__}: {error}"
    try:
        content = cloudpickle.dumps(error)
        pickle.loads(content)
    except Exception:
        return None, text
    return content, text


def _load_error(content: bytes | None, text: str, name: str) -> Exception:
    if content is None:
        return WanmaError(f"data: the {name}: {text}")
    error: Exception = pickle.loads(content)
    return error
