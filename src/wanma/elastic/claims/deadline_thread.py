"""Thread that makes the requests to a store, so that no caller waits longer than its deadline."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlineThread:
    """Thread of its own for requests, one after the other; it starts with the first.

    A request that is late goes on: what it writes arrives before what is written after it. A read that nobody
    waits for any more is not begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, operation: Callable[[], Result], seconds: float, *, is_write: bool) -> Result:
        """Return the result of `operation`, or raise its error.

        Raises:
            TimeoutError: it has not ended after `seconds`.
        """
        request = _Request(operation, is_write)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._requests.put(request)
        if not request.done.wait(seconds):
            request.is_abandoned = True
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} s")
        if request.error is not None:
            raise request.error
        result: Result = request.result
        return result

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            if request.is_abandoned and not request.is_write:
                continue
            try:
                request.result = request.operation()
            except Exception as error:  # raised by the caller
                request.error = error
            request.done.set()


class _Request:
    """Request on its way."""

    def __init__(self, operation: Callable[[], Any], is_write: bool) -> None:
        self.operation, self.is_write = operation, is_write
        self.done = threading.Event()
        self.is_abandoned = False
        self.result: Any = None
        self.error: Exception | None = None
