"""Clients of this process: one for each store, shared by its threads, made anew in a forked process."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem

from wanma.data.stores.process_threads import ProcessThreads
from wanma.data.stores.range_requests import (
    ExpiredCredentialsError,
    RangeAnswer,
    SlowDownError,
    range_reader,
)

MAX_REQUESTS = 32
"""Requests in flight for each store and process: enough to fill 10 Gbit/s at 30 ms and 8 MiB a request."""
MAX_BYTES = 256 << 20
"""Bytes in flight for each store and process."""
_INITIAL_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0

log = logging.getLogger("wanma.data")


Traffic = Counter[tuple[str, str]]
"""Amounts by (metric, name): requests and bytes of each store, blocks of node caches."""


class RequestGate:
    """Gate that admits requests of this process to one store.

    A store that is overloaded answers "slow down" to many requests at once. All threads of the process then
    pause together, and fewer requests run beside each other afterwards; each success admits a few more.

    Args:
        max_requests: requests in flight.
        max_bytes: bytes in flight; a larger request passes alone.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._request_limit = float(max_requests)
        """Requests that may be in flight now: fewer after a slow-down."""
        self._requests = self._bytes = 0
        self._resume_time, self._pause = 0.0, _INITIAL_PAUSE_SECONDS
        self._changed = threading.Condition()
        self._random = random.SystemRandom()  # the process's own generator belongs to the user's training

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

    def _wait(self, size: int) -> None:
        """Wait for the end of a pause and for room; the lock is held."""
        while True:
            pause = self._resume_time - time.monotonic()
            if pause > 0:
                self._changed.wait(pause)
                continue
            has_room = self._requests < int(self._request_limit) and self._bytes + size <= self._max_bytes
            if has_room or not self._requests:
                return
            self._changed.wait()


class StoreClient:
    """Client of one store: its connections, its gate and its counters.

    Args:
        filesystem: filesystem of a listing; the client has its own, of this process.
    """

    def __init__(self, filesystem: Any) -> None:
        self.gate = RequestGate()
        self._source = filesystem
        self._filesystem = _reading_filesystem(filesystem)
        self._read_range = range_reader(self._filesystem)
        self.map = ProcessThreads(MAX_REQUESTS, "wanma-store").map
        self._lock = threading.Lock()
        self._traffic: Traffic = Counter()
        self._is_away = False

    @property
    def protocol(self) -> str:
        """Protocol of the store, as in its URLs."""
        found: str | tuple[str, ...] = self._source.protocol
        return found if isinstance(found, str) else found[0]

    @property
    def traffic(self) -> Traffic:
        """Requests of this process to the store, failed ones included, and bytes received."""
        with self._lock:
            return self._traffic.copy()

    def request(self, path: str, start: int, end: int) -> RangeAnswer:
        """Request bytes [start, end) of a file once, when the gate admits it.

        Raises:
            Exception: the request failed. A slow-down has made the gate pause; expired credentials were
                replaced by newer ones, if the usual chain finds them.
        """
        filesystem = self._filesystem
        with self.gate.admit(end - start):
            try:
                answer = self._read_range(filesystem, path, start, end)
            except Exception as error:
                self._count(0)
                if isinstance(error, SlowDownError):
                    self.gate.slow_down(error.retry_after_seconds)
                elif isinstance(error, ExpiredCredentialsError):
                    self._renew(filesystem)
                raise
        self._count(len(answer.content))
        with self._lock:
            was_away, self._is_away = self._is_away, False
        if was_away:
            log.warning("the store (%s) answers again", self.protocol)
        self.gate.record_success()
        return answer

    def report_outage(self, cause: str, retry_seconds: float) -> None:
        """Log that the store is away, once until it answers again.

        Args:
            cause: failure of a read, without credentials.
            retry_seconds: time for which the read is tried again.
        """
        with self._lock:
            was_away, self._is_away = self._is_away, True
        if not was_away:
            log.warning(
                "the store (%s) does not answer, and is asked again for up to %g s: %s",
                self.protocol,
                retry_seconds,
                cause,
            )

    def information(self, path: str) -> dict[str, Any]:
        """Return the present metadata of a file, asked from the store."""
        self._filesystem.invalidate_cache()
        info: dict[str, Any] = self._filesystem.info(path)
        return info

    def _count(self, size: int) -> None:
        with self._lock:
            self._traffic["store_requests", self.protocol] += 1
            self._traffic["store_bytes", self.protocol] += size

    def _renew(self, expired: Any) -> None:
        """Replace a filesystem with expired credentials, unless another thread has done so."""
        with self._lock:
            if self._filesystem is expired:
                self._filesystem = _reading_filesystem(self._source, renew=True)


class _Registry:
    """Clients of this process by their filesystems."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clients: dict[str, StoreClient] = {}


_registry = _Registry()


_inherited: list[Any] = []
"""Clients and filesystems of the processes that this one was forked from.

They are kept, past the end of the interpreter: a client that is collected closes its connections, and with
them takes the parent's, which are the same, out of the kernel's event queue, which both processes share.
"""


def forget_clients() -> None:
    """Begin without clients."""
    global _registry
    _registry = _Registry()


def _begin_forked_process() -> None:
    """Begin a forked process without clients: the threads behind the parent's are not in it."""
    if not _inherited:  # one reference more than there are: its items are never collected
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_inherited))
    _inherited.append(_registry)
    forget_clients()
    _detach_finalizers()
    # Before 2025.5 fsspec keeps the parent's event loop, whose thread is not here: reads would hang.
    if (reset := getattr(sys.modules.get("fsspec.asyn"), "reset_lock", None)) is not None:
        reset()


def _detach_finalizers() -> None:
    """Cancel what the parent's filesystems do when they are collected or the process ends.

    They close connections, or remove temporary folders, which are the parent's.
    """
    finalizers: Any = getattr(weakref.finalize, "_registry", {})  # no public name lists them
    for finalizer in list(finalizers):
        if (found := finalizer.peek()) is not None and isinstance(found[0], AbstractFileSystem):
            _inherited.append(finalizer.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forked_process)


def store_client(filesystem: Any) -> StoreClient:
    """Return this process's client for the store of `filesystem`."""
    key = f"{type(filesystem).__qualname__} {filesystem.storage_args!r} {filesystem.storage_options!r}"
    with _registry.lock:
        client = _registry.clients.get(key)
        if client is None:
            client = _registry.clients[key] = StoreClient(filesystem)
        return client


def store_traffic() -> Traffic:
    """Return the traffic of this process by protocol, such as 's3', since it started or was forked."""
    with _registry.lock:
        clients = list(_registry.clients.values())
    traffic: Traffic = Counter()
    for client in clients:
        traffic.update(client.traffic)
    return traffic


def _reading_filesystem(filesystem: Any, *, renew: bool = False) -> Any:
    """Return a filesystem of this process with options for reading ranges.

    s3: botocore does not repeat requests by itself, so that a slow-down reaches the gate of all threads.

    Args:
        filesystem: filesystem of a listing.
        renew: True: read the credentials again instead of sharing fsspec's instance.
    """
    options = dict(filesystem.storage_options)
    protocol = filesystem.protocol
    if "s3" in protocol and hasattr(filesystem, "get_s3"):
        config = {"max_pool_connections": MAX_REQUESTS, **(options.get("config_kwargs") or {})}
        options["config_kwargs"] = {**config, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    if renew:
        options["skip_instance_cache"] = True
    reading = type(filesystem)(*filesystem.storage_args, **options)
    if "webhdfs" in protocol:
        _pool_connections(reading.session)
    return reading


def _pool_connections(session: Any) -> None:
    """Let a session of `requests` keep a connection for each request in flight; its default is 10."""
    from requests.adapters import HTTPAdapter

    for prefix in ("http://", "https://"):
        session.mount(prefix, HTTPAdapter(pool_maxsize=MAX_REQUESTS))
