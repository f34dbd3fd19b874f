"""Gate before a store: limits of this process on requests and bytes in flight, pause after a slow-down.

A store that is overloaded answers "slow down" to many requests at once. All threads of the process then pause
together, and fewer requests run beside each other afterwards; each success admits a few more.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_REQUESTS = 32
"""Requests in flight for each store and process: enough to fill 10 Gbit/s at 30 ms and 8 MiB a request."""
MAX_BYTES = 256 << 20
"""Bytes in flight for each store and process."""
_INITIAL_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0


class RequestGate:
    """Gate that admits requests of this process to one store.

    Args:
        max_requests: requests in flight.
        max_bytes: bytes in flight; a larger request passes alone.

    Attributes:
        slow_downs: number of pauses that the store asked for.
        pause_seconds: seconds that requests have waited for such pauses, summed over threads.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self.slow_downs, self.pause_seconds = 0, 0.0
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._request_limit = float(max_requests)
        self._requests = self._bytes = 0
        self._resume_time, self._pause = 0.0, _INITIAL_PAUSE_SECONDS
        self._changed = threading.Condition()
        self._random = random.SystemRandom()  # the process's own generator belongs to the user's training

    @property
    def request_limit(self) -> int:
        """Requests that may be in flight now: fewer after a slow-down."""
        return int(self._request_limit)

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Wait until a request of `size` bytes may start, and count it until the block ends."""
        with self._changed:
            self._wait(size)
            self._requests += 1
            self._bytes += size
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._bytes -= size
                self._changed.notify_all()

    def record_success(self) -> None:
        """Admit more requests again after a success, one more for each round of successes."""
        with self._changed:
            if self._request_limit < self._max_requests:
                self._request_limit = min(self._max_requests, self._request_limit + 1 / self._request_limit)
                self._changed.notify_all()
            if time.monotonic() > self._resume_time + self._pause:
                self._pause = _INITIAL_PAUSE_SECONDS

    def slow_down(self, retry_after_seconds: float | None) -> None:
        """Pause all requests, because the store asked for it.

        Args:
            retry_after_seconds: pause that the store names; None: doubled with each slow-down in a row. Each
                pause has jitter of up to a half, so that processes do not return together.
        """
        with self._changed:
            now = time.monotonic()
            if now < self._resume_time:
                return  # an answer to a request that started before the pause
            pause = self._pause if retry_after_seconds is None else max(retry_after_seconds, 0.0)
            pause = min(pause, _MAX_PAUSE_SECONDS)
            self._resume_time = now + self._random.uniform(pause, 1.5 * pause)
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
            self._request_limit = max(1.0, self._request_limit / 2)
            self.slow_downs += 1

    def _wait(self, size: int) -> None:
        """Wait for the end of a pause and for room; the lock is held."""
        while True:
            pause = self._resume_time - time.monotonic()
            if pause > 0:
                start = time.monotonic()
                self._changed.wait(pause)
                self.pause_seconds += time.monotonic() - start
                continue
            has_room = self._requests < int(self._request_limit) and self._bytes + size <= self._max_bytes
            if has_room or not self._requests:
                return
            self._changed.wait()
