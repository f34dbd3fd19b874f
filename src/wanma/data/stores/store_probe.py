"""Measurement of a store as this machine reaches it: latency, bandwidth of one request, and of several.

A probe reads the first bytes of real files for a second or two, and is kept for a week. Nothing here fails a
plan: a store that does not answer is a reason in words.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from wanma.data.stores.client import StoreClient, store_client
from wanma.data.stores.filesystems import is_local, is_shared_memory
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.rate_records import read_rates, write_rates
from wanma.job.forecast.data_feed import StoreRates
from wanma.job.url_credentials import redact_credentials

PROBE_SECONDS = 2.0
"""Seconds after which a probe begins no further request."""
MAX_WAIT_SECONDS = 10.0
"""Seconds after which a probe is given up."""
PROBE_DAYS = 7
"""Days for which a probe counts."""
_LATENCY_REQUESTS = 5
_FIRST_BYTES, _REQUEST_BYTES = 256 << 10, 4 << 20
"""Sizes of the request by which a store shows that it is no slow one, and of those after it."""
_PARALLEL_REQUESTS = 8
_MIN_BYTES = 64 << 10
"""Bytes of a request below which its time says nothing about bandwidth."""

_FIGURES = ("latency_seconds", "connection_bytes_per_second", "bytes_per_second")
"""Rates that a record keeps."""

Range = tuple[str, int, int]
"""Path, first byte and end of a range."""


def measured_store_rates(files: Sequence[StoredFile], cache: Path, *, is_probed: bool) -> StoreRates | None:
    """Return the rates of the store that holds files; None: all are on this machine.

    Args:
        files: files of the data.
        cache: folder of the job's cache, which keeps records of measurements.
        is_probed: measure a store of which there is no record.
    """
    remote = [
        file for file in files if not is_local(file.filesystem) and not is_shared_memory(file.filesystem)
    ]
    if not remote:
        return None
    name = store_name(remote[0])
    record = read_rates(cache, "store", name, PROBE_DAYS)
    if record is None:
        if not is_probed:
            return StoreRates(fault="data.probe_store = false")
        rates = probe_store([file for file in remote if store_name(file) == name])
        figures = {name: value for name in _FIGURES if (value := getattr(rates, name)) is not None}
        if not figures:
            return rates
        record = write_rates(cache, "store", name, "probe", figures)
    latency, connection, together = map(record.figures.get, _FIGURES)
    return StoreRates(latency, connection, together, record.origin)


def store_name(file: StoredFile) -> str:
    """Return the name of the store that holds a file: protocol and host or bucket, without credentials."""
    parts = urlsplit(redact_credentials(file.url))
    endpoint = redact_credentials(getattr(file.filesystem, "endpoint_url", None) or "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" + (f" {endpoint}" if endpoint else "")


def probe_store(
    files: Sequence[StoredFile],
    client: StoreClient | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StoreRates:
    """Measure a store by reading the first bytes of some of its files; a failure is part of the result.

    What was measured before the store fell silent counts: the next plan does not wait for it again.

    Args:
        files: files of one store, at least one.
        client: client of the store; default: this process's.
        clock: clock in seconds.
    """
    found: list[StoreRates] = [
        StoreRates(fault=f"the store did not answer a probe within {MAX_WAIT_SECONDS:g} s")
    ]

    def probe() -> None:
        try:
            used = store_client(files[0].filesystem) if client is None else client
            for rates in _probe(files, used, clock):
                found[0] = rates
        except Exception as error:  # a storage library may raise anything; reading reports it with its cause
            found[0] = StoreRates(fault=f"a probe of the store failed: {type(error).__name__}")

    thread = threading.Thread(target=probe, name="wanma-probe", daemon=True)
    thread.start()
    thread.join(MAX_WAIT_SECONDS)
    return found[0]


def _probe(
    files: Sequence[StoredFile], client: StoreClient, clock: Callable[[], float]
) -> Iterator[StoreRates]:
    """Yield the rates that are known after each part of a probe."""
    filled = sorted((file for file in files if file.size), key=lambda file: -file.size)
    if not filled:
        yield StoreRates(fault="no file has content to probe")
        return
    end = clock() + PROBE_SECONDS

    def seconds_of(action: Callable[[], object]) -> float:
        start = clock()
        action()
        return clock() - start

    small = [filled[number % len(filled)] for number in range(_LATENCY_REQUESTS + 1)]
    client.request(small[0].path, 0, 1)  # it opens the connection
    latencies: list[float] = []
    for file in small[1:]:
        if latencies and clock() > end:
            break
        latencies.append(seconds_of(lambda path=file.path: client.request(path, 0, 1)))  # type: ignore[misc]
    rates = StoreRates(latency_seconds=statistics.median(latencies))
    yield rates
    size = min(filled[0].size, _FIRST_BYTES)
    if size < _MIN_BYTES or clock() > end:
        return
    seconds = seconds_of(lambda: client.request(filled[0].path, 0, size))
    connection = _bandwidth(size, seconds, rates.latency_seconds)
    rates = replace(rates, connection_bytes_per_second=connection, bytes_per_second=connection)
    yield rates
    larger = min(filled[0].size, _REQUEST_BYTES, int(connection * PROBE_SECONDS / 2))
    if larger > size and clock() <= end:
        seconds = seconds_of(lambda: client.request(filled[0].path, 0, larger))
        size, connection = larger, _bandwidth(larger, seconds, rates.latency_seconds)
        rates = replace(rates, connection_bytes_per_second=connection, bytes_per_second=connection)
        yield rates
    ranges = _ranges(filled, min(size, max(int(connection * PROBE_SECONDS / 4), _MIN_BYTES)))
    if len(ranges) < 2 or clock() > end:
        return
    seconds = seconds_of(lambda: client.map(lambda one: client.request(*one), ranges))
    total = sum(stop - start for _, start, stop in ranges)
    together = _bandwidth(total, seconds, rates.latency_seconds)
    yield replace(rates, bytes_per_second=max(together, connection))


def _ranges(files: Sequence[StoredFile], size: int) -> list[Range]:
    """Return ranges of up to `size` bytes for requests side by side, from the first file on."""
    ranges: list[Range] = []
    for file in files:
        for start in range(0, file.size, size):
            if len(ranges) == _PARALLEL_REQUESTS:
                return ranges
            ranges.append((file.path, start, min(start + size, file.size)))
    return ranges


def _bandwidth(size: int, seconds: float, latency: float | None) -> float:
    """Return bytes/s beyond the latency, which may be noise larger than the transfer."""
    return size / max(seconds - (latency or 0.0), seconds / 10, 1e-9)
