"""Times of reading samples of a user's own dataset, kept for forecasts of later runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wanma.data.stores.rate_records import has_rates, read_rates, write_rates
from wanma.job.forecast.data_feed import SampleLoading

MIN_RECORDED_SAMPLES = 64
"""Samples of a run from which on its measurement is kept."""
_KIND = "reading"


class ReadingRates:
    """Sum of the times of reading; threads add to it at once.

    Args:
        cache: folder of the job's cache, which keeps records.
        name: function that returns a name of class and content of the dataset; it may read samples.
    """

    def __init__(self, cache: Path, name: Callable[[], str]) -> None:
        self._cache, self._name = cache, name
        self._lock = threading.Lock()
        self._samples, self._seconds, self._core_seconds = 0, 0.0, 0.0

    @contextmanager
    def measure(self, samples: int) -> Iterator[None]:
        """Add the time of the block, which reads so many samples."""
        start, core_start = time.perf_counter(), time.thread_time()
        yield
        seconds, core_seconds = time.perf_counter() - start, time.thread_time() - core_start
        with self._lock:
            self._samples += samples
            self._seconds += seconds
            self._core_seconds += core_seconds

    def record(self, source: str) -> None:
        """Keep the times of a run; `source` is the run, as 'run NAME'."""
        with self._lock:
            samples, seconds, core_seconds = self._samples, self._seconds, self._core_seconds
        if samples < MIN_RECORDED_SAMPLES or seconds <= 0:
            return
        figures = {"seconds": seconds / samples, "core_share": min(core_seconds / seconds, 1.0)}
        write_rates(self._cache, _KIND, self._name(), source, figures)

    def sample_loading(self, samples: int) -> SampleLoading | None:
        """Return the loading cost that an earlier run has measured; None: none has.

        Args:
            samples: samples of one epoch.
        """
        if not has_rates(self._cache, _KIND):  # no sample is read for its name
            return None
        record = read_rates(self._cache, _KIND, self._name())
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
