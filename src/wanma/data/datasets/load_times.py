"""Seconds that loader threads spend on the parts of loading, summed over threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STORED_IMAGE_PARTS = ("read", "decode", "collate")
"""Parts of loading: reading stored bytes, decoding them to arrays, joining samples and copying batches."""
TEXT_PARTS = ("read", "collate")
USER_DATASET_PARTS = ("dataset", "collate")
"""Likewise; "dataset": reading items of a user's dataset, whose own parts are unknown."""


class LoadTimes:
    """Sum of seconds by part of loading; threads add to it at once.

    Args:
        parts: the parts.
    """

    def __init__(self, parts: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(parts, 0.0)
        self._decoded_samples, self._decoding_core_seconds = 0, 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part; a block of "decode" is one sample."""
        start, core_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            elapsed, core_seconds = time.perf_counter() - start, time.thread_time() - core_start
            with self._lock:
                self._seconds[part] += elapsed
                if part == "decode":
                    self._decoded_samples += 1
                    self._decoding_core_seconds += core_seconds

    @property
    def decoding(self) -> tuple[int, float]:
        """Samples decoded since the start, and the seconds of one core that they took."""
        with self._lock:
            return self._decoded_samples, self._decoding_core_seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds
