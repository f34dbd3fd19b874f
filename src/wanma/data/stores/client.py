"""Clients of this process: one for each store, shared by its threads, made anew in a forked process."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fsspec import AbstractFileSystem

from wanma.data.stores.range_requests import (
    ExpiredCredentialsError,
    RangeAnswer,
    SlowDownError,
    range_reader,
    read_http_range,
    stream_http,
)
from wanma.data.stores.request_gate import MAX_REQUESTS, RequestGate
from wanma.job.forecast.data_feed import StoreRates

log = logging.getLogger("wanma.data")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoreTraffic:
    """Traffic of this process with stores, since it started."""

    requests: int = 0
    """Requests of ranges, failed ones included."""
    failed_requests: int = 0
    """Requests that failed; most were repeated."""
    received_bytes: int = 0
    """Bytes of content received."""

    def __add__(self, other: StoreTraffic) -> StoreTraffic:
        return StoreTraffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class RequestTimes:
    """Sums over the successful requests of a process to one store, from which its rates follow."""

    requests: int = 0
    seconds: float = 0.0
    size: float = 0.0
    """Bytes received."""
    size_squared: float = 0.0
    size_seconds: float = 0.0
    """Sum of bytes times seconds."""
    busy_seconds: float = 0.0
    """Seconds in which at least one request was in flight."""

    def add(self, size: int, seconds: float) -> RequestTimes:
        """Return the sums with one more request."""
        return RequestTimes(
            self.requests + 1,
            self.seconds + seconds,
            self.size + size,
            self.size_squared + float(size) * size,
            self.size_seconds + size * seconds,
            self.busy_seconds,
        )

    @property
    def busy_bytes_per_second(self) -> float:
        """Bandwidth while requests were in flight."""
        return self.size / self.busy_seconds if self.busy_seconds else 0.0

    def fit(self, latency_seconds: float = 0.0) -> StoreRates:
        """Return latency and bandwidth of a request: the least squares of seconds = latency + bytes / rate.

        Args:
            latency_seconds: latency that is known already, for requests of one size, which cannot tell the
                two apart.
        """
        if not self.requests or not self.size:
            return StoreRates()
        mean_size, mean_seconds = self.size / self.requests, self.seconds / self.requests
        variance = self.size_squared / self.requests - mean_size**2
        covariance = self.size_seconds / self.requests - mean_size * mean_seconds
        if variance > 1e-3 * mean_size**2 and covariance > 0:
            slope = min(covariance / variance, mean_seconds / mean_size)
            latency = mean_seconds - slope * mean_size
            return StoreRates(latency_seconds=latency, connection_bytes_per_second=1 / slope)
        transfer_seconds = max(mean_seconds - latency_seconds, mean_seconds / 10)
        return StoreRates(connection_bytes_per_second=mean_size / transfer_seconds)


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
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._requests = self._failed_requests = self._received_bytes = 0
        self._times = RequestTimes()
        self._in_flight, self._busy_since = 0, 0.0
        self._is_away = False

    @property
    def protocol(self) -> str:
        """Protocol of the store, as in its URLs."""
        found: str | tuple[str, ...] = self._source.protocol
        return found if isinstance(found, str) else found[0]

    @property
    def request_times(self) -> RequestTimes:
        """Times of this process's requests."""
        with self._lock:
            return self._times

    @property
    def traffic(self) -> StoreTraffic:
        """Traffic of this process with the store."""
        with self._lock:
            return StoreTraffic(self._requests, self._failed_requests, self._received_bytes)

    def request(self, path: str, start: int, end: int) -> RangeAnswer:
        """Request bytes [start, end) of a file once, when the gate admits it.

        Raises:
            Exception: the request failed. A slow-down has made the gate pause; expired credentials were
                replaced by newer ones, if the usual chain finds them.
        """
        filesystem = self._filesystem
        with self.gate.admit(end - start):
            try:
                began = self._begin_request()
                try:
                    answer = self._read_range(filesystem, path, start, end)
                finally:
                    seconds = self._end_request(began)
            except Exception as error:
                self._count(0, failed=True)
                if isinstance(error, SlowDownError):
                    self.gate.slow_down(error.retry_after_seconds)
                elif isinstance(error, ExpiredCredentialsError):
                    self._renew(filesystem)
                raise
        self._count(len(answer.content), failed=False)
        with self._lock:
            self._times = self._times.add(len(answer.content), seconds)
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

    def stream(self, path: str, piece_bytes: int, check: Callable[[RangeAnswer], None]) -> Iterator[bytes]:
        """Yield a whole file in pieces, by one request; arguments as of `stream_http`."""
        filesystem = self._filesystem
        if range_reader(filesystem) is not read_http_range:
            raise TypeError("only web servers send whole files only")
        size, failed = 0, True
        with self.gate.admit(piece_bytes):
            try:
                for piece in stream_http(filesystem, path, piece_bytes, check):
                    size += len(piece)
                    yield piece
                failed = False
            except SlowDownError as error:
                self.gate.slow_down(error.retry_after_seconds)
                raise
            finally:
                self._count(size, failed)

    def information(self, path: str) -> dict[str, Any]:
        """Return the present metadata of a file, asked from the store."""
        self._filesystem.invalidate_cache()
        info: dict[str, Any] = self._filesystem.info(path)
        return info

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `function` with each item in threads, and return the results in order.

        Raises:
            Exception: the first failure; calls that have not begun are dropped, the others end first.
        """
        if len(items) == 1:
            return [function(items[0])]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="wanma-store")
        futures = [self._threads.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _begin_request(self) -> float:
        with self._lock:
            now = time.perf_counter()
            if not self._in_flight:
                self._busy_since = now
            self._in_flight += 1
            return now

    def _end_request(self, began: float) -> float:
        """Count the end of a request, and return its seconds."""
        with self._lock:
            now = time.perf_counter()
            self._in_flight -= 1
            if not self._in_flight:
                busy = self._times.busy_seconds + now - self._busy_since
                self._times = replace(self._times, busy_seconds=busy)
            return now - began

    def _count(self, size: int, failed: bool) -> None:
        with self._lock:
            self._requests += 1
            self._failed_requests += failed
            self._received_bytes += size

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


def store_traffic() -> dict[str, StoreTraffic]:
    """Return the traffic of this process by protocol, such as 's3', since it started or was forked."""
    with _registry.lock:
        clients = list(_registry.clients.values())
    traffic: dict[str, StoreTraffic] = {}
    for client in clients:
        traffic[client.protocol] = traffic.get(client.protocol, StoreTraffic()) + client.traffic
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
