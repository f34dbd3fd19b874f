"""Handle of one collective over shared memory, as torch's callers wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

WaitFunction = Callable[[int], None]
"""Function that waits for a number of nanoseconds, 0 without limit; returns at completion, or raises."""


class SharedMemoryWork(dist.Work):
    """Handle of a collective of a `SharedMemoryProcessGroup`.

    Args:
        wait: waits until the collective is complete.
        is_done: returns True if it is complete.
        outputs: value of `result` and of the future.
        completer: thread that completes futures.
    """

    def __init__(
        self, wait: WaitFunction, is_done: Callable[[], bool], outputs: list[Any], completer: FutureCompleter
    ) -> None:
        super().__init__()
        self._wait, self._is_done, self._outputs, self._completer = wait, is_done, outputs, completer
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective is complete, for at most `timeout` unless that is 0.

        Raises:
            SharedMemoryError: it failed, or the time is over.
        """
        self._wait(round(timeout.total_seconds() * 1e9))
        return True

    def is_completed(self) -> bool:
        return self._is_done()

    def is_success(self) -> bool:
        return self._is_done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error that `wait` raises if the collective has ended and failed, else None."""
        if not self._is_done():
            return None
        try:
            self._wait(0)
        except dist.DistBackendError as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return self._outputs

    def get_future(self) -> Future[Any]:
        """Return a future that gets the outputs at completion; a thread waits for it."""
        if self._future is None:
            self._future = Future()
            self._completer.put(self, self._future)
        return self._future

    # Torch's name of this method.
    getFuture = get_future  # noqa: N815


class FutureCompleter:
    """Thread that waits for the collectives whose futures were requested, in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[SharedMemoryWork, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: SharedMemoryWork, future: Future[Any]) -> None:
        if work.is_completed():
            _complete(work, future)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wanma-futures", daemon=True)
                self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """End the thread after the futures in its queue."""
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _complete(*item)
            del item


def _complete(work: SharedMemoryWork, future: Future[Any]) -> None:
    try:
        work.wait()
    except Exception as error:  # the thread has no caller: the future gets the error
        future.set_exception(error)
    else:
        future.set_result(work.result())
