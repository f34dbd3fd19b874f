"""One collective that was asked for: what torch waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

Waiting = Callable[[int], None]
"""Takes nanoseconds, 0 for as long as it takes; returns when all is done, or raises."""


class SharedWork(dist.Work):
    """Of a `SharedGroup`.

    Args:
        wait: until it is done.
        done: whether it is.
        outputs: what `result` and the future give.
        later: where futures are brought to their end.
    """

    def __init__(
        self, wait: Waiting, done: Callable[[], bool], outputs: list[Any], later: Completions
    ) -> None:
        super().__init__()
        self._wait, self._done, self._outputs, self._later = wait, done, outputs, later
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is done; for at most `timeout`, where that is not 0.

        Raises:
            SharedMemoryError: it failed, or the time is over.
        """
        self._wait(round(timeout.total_seconds() * 1e9))
        return True

    def is_completed(self) -> bool:
        return self._done()

    def is_success(self) -> bool:
        return self._done() and self.exception() is None

    def exception(self) -> Exception | None:
        """What `wait` raises, where it is over and has failed."""
        if not self._done():
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
        """Gets the outputs when it is done; somebody else waits for it then."""
        if self._future is None:
            self._future = Future()
            self._later.put(self, self._future)
        return self._future

    # What torch's own works are called by.
    getFuture = get_future  # noqa: N815


class Completions:
    """A thread that waits for works of which somebody has taken the future, in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[SharedWork, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: SharedWork, future: Future[Any]) -> None:
        if work.is_completed():
            _complete(work, future)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wanma-futures", daemon=True)
                self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """The thread ends after what is in its queue."""
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _complete(*item)
            del item


def _complete(work: SharedWork, future: Future[Any]) -> None:
    try:
        work.wait()
    except Exception as error:  # a thread has nobody to raise to: whoever waits for the future gets it
        future.set_exception(error)
    else:
        future.set_result(work.result())
