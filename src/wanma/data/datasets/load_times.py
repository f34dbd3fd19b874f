"""Measurements of loading: seconds by part for a run's records, and times of own samples for forecasts.

They are summed over the threads of a rank and its loader processes, which report what they did beside each
batch: their seconds, and their traffic with stores.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanma.data.cache.node_cache import process_traffic
from wanma.data.stores.client import Traffic
from wanma.data.stores.rate_records import has_rates, read_rates, write_rates
from wanma.job.forecast.data_feed import SampleLoading

STORED_IMAGE_PARTS = ("read", "decode", "collate")
"""Parts of loading: reading stored bytes, decoding them to arrays, joining samples and copying batches."""
OWN_TRANSFORM_PART = "transform"
"""Likewise: image transforms of other packages, after decoding."""
TEXT_PARTS = ("read", "collate")
USER_DATASET_PARTS = ("dataset", "collate")
"""Likewise; "dataset": reading items of a user's dataset, whose own parts are unknown."""
_MIN_RECORDED_SAMPLES = 64
"""Own samples of a run from which on its measurement is kept."""
_KIND = "reading"


@dataclass(frozen=True)
class LoadWork:
    """Work of a loader process for one batch."""

    seconds: dict[str, float]
    read_samples: int
    reading_core_seconds: float
    traffic: Traffic


class LoadTimes:
    """Sum of seconds by part of loading; threads add to it at once. A copy by pickle begins at zero."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(parts, 0.0)
        self._read_samples, self._reading_core_seconds = 0, 0.0
        self._reading_seconds = 0.0
        self._worker_traffic: Traffic = Counter()
        """Traffic of the loader processes of this rank; in such a process the part that is reported."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._parts,)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds to parts."""
        with self._lock:
            for part, value in seconds.items():
                self._seconds[part] += value

    @contextmanager
    def measure(self, part: str, samples: int = 1) -> Iterator[None]:
        """Add the time of the block to a part; one of "dataset" reads so many samples."""
        start, core_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            elapsed, core_seconds = time.perf_counter() - start, time.thread_time() - core_start
            with self._lock:
                self._seconds[part] += elapsed
                if part == "dataset":
                    self._read_samples += samples
                    self._reading_core_seconds += core_seconds
                    self._reading_seconds += elapsed

    @property
    def reading(self) -> tuple[int, float]:
        """Samples of a user's dataset read since the start, and the seconds of one core that they took."""
        with self._lock:
            return self._read_samples, self._reading_core_seconds

    @property
    def reading_seconds(self) -> float:
        """Seconds in which threads of this process have read these samples."""
        return self._reading_seconds

    @property
    def traffic(self) -> Traffic:
        """Traffic of this process and its loader processes, since they started."""
        with self._lock:
            return process_traffic() + self._worker_traffic

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self._parts, 0.0)
        return seconds

    def take_work(self) -> LoadWork:
        """Return the work of this loader process since the last call."""
        seconds, traffic = self.take(), process_traffic()
        with self._lock:
            work = LoadWork(
                seconds, self._read_samples, self._reading_core_seconds, traffic - self._worker_traffic
            )
            self._read_samples, self._reading_core_seconds = 0, 0.0
            self._worker_traffic = traffic
        return work

    def add_work(self, work: LoadWork) -> None:
        """Add the work of a loader process."""
        self.add(work.seconds)
        with self._lock:
            self._read_samples += work.read_samples
            self._reading_core_seconds += work.reading_core_seconds
            self._worker_traffic += work.traffic


def record_reading(cache: Path, name: Callable[[], str], source: str, times: LoadTimes) -> None:
    """Keep the times of reading a user's own dataset for forecasts of later runs.

    Args:
        name: function that returns a name of class and content of the dataset; it may read samples.
        source: the run, as 'run NAME'.
    """
    (samples, core_seconds), seconds = times.reading, times.reading_seconds
    if samples < _MIN_RECORDED_SAMPLES or seconds <= 0:
        return
    figures = {"seconds": seconds / samples, "core_share": min(core_seconds / seconds, 1.0)}
    write_rates(cache, _KIND, name(), source, figures)


def recorded_reading(cache: Path, name: Callable[[], str], samples: int) -> SampleLoading | None:
    """Return the loading cost that `record_reading` has kept; None: an earlier run has measured none."""
    if not has_rates(cache, _KIND):  # no sample is read for its name
        return None
    record = read_rates(cache, _KIND, name())
    if record is None or not record.figures.get("seconds"):
        return None
    return SampleLoading(
        samples=samples,
        sample_bytes=0.0,
        file_bytes=0.0,
        decode_seconds=record.figures["seconds"],
        is_remote=False,
        read_threads=1,
        loader_threads=1,
        cache_block_bytes=1,
        decode_origin=record.origin,
        is_own=True,
        core_share=record.figures.get("core_share", 1.0),
    )
