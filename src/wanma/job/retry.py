"""Retry policy with exponential backoff, for storage and network operations that may fail for a moment.

    retry(lambda: storage.put(file), Patience(deadline_seconds=60))

Retries are bounded in number and time; a permanent error is raised at once.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TypeVar

from wanma.job.errors import WanmaError

Result = TypeVar("Result")

_PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    WanmaError,
)
_PERMANENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy: number of tries, deadline and pauses."""

    max_attempts: int = 6
    deadline_seconds: float = 120.0
    """Seconds from the first try; no later try begins after them."""
    initial_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 20.0


STORAGE_RETRY_POLICY = RetryPolicy()
"""Retry policy for storage that training can do without for a while."""


def retry(
    operation: Callable[[], Result],
    policy: RetryPolicy = STORAGE_RETRY_POLICY,
    *,
    stop: threading.Event | None = None,
) -> Result:
    """Call `operation` until it succeeds, and return its result; permanent errors are raised at once.

    Args:
        stop: once set, nothing is retried, and a pause ends at once.

    Raises:
        Exception: the error of the last try, with a note of the number of tries.
    """
    start = time.monotonic()
    for number, pause in enumerate(backoff_delays(policy, random.SystemRandom()), 1):
        try:
            return operation()
        except Exception as error:
            exceeds_deadline = time.monotonic() - start + (pause or 0.0) > policy.deadline_seconds
            if pause is None or exceeds_deadline or is_permanent(error) or _wait_for_stop(pause, stop):
                if number > 1:
                    error.add_note(f"after {number} tries in {time.monotonic() - start:.1f} s")
                raise
    raise ValueError(f"{policy.max_attempts} tries: at least one is needed")


class RetryingFile:
    """Readable file that is reopened after a passing failure, and continued at its position.

    As a context manager it closes the open file.

    Args:
        open_file: opens the file at its beginning; used for the first open too.
        stop: as for `retry`.

    Raises:
        Exception: by each method: the error of the last try.
    """

    def __init__(
        self,
        open_file: Callable[[], IO[bytes]],
        policy: RetryPolicy = STORAGE_RETRY_POLICY,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        self._open_file, self._policy, self._stop = open_file, policy, stop
        self._file: IO[bytes] | None = None
        self._position = 0
        retry(self._open_at_position, policy, stop=stop)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer, or none, at the end."""

        def once() -> bytes:
            try:
                return self._open_at_position().read(size)
            except BaseException:
                self.close()
                raise

        block = retry(once, self._policy, stop=self._stop)
        self._position += len(block)
        return block

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open_at_position(self) -> IO[bytes]:
        if self._file is None:
            self._file = self._open_file()
            if self._position:
                self._file.seek(self._position)
        return self._file

    def __enter__(self) -> RetryingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait_for_stop(seconds: float, stop: threading.Event | None) -> bool:
    """Pause for `seconds` or until `stop` is set; return True if it was set."""
    if stop is None:
        time.sleep(seconds)
        return False
    return stop.wait(seconds)


def is_permanent(error: Exception) -> bool:
    """Return True if a retry would fail in the same way: missing or forbidden files, a full disk, a bug."""
    return isinstance(error, _PERMANENT) or getattr(error, "errno", None) in _PERMANENT_ERRNOS


def backoff_delays(policy: RetryPolicy, generator: random.Random) -> Iterator[float | None]:
    """Yield the seconds to wait after each try, and None after the last one.

    Pauses double, and each is drawn between half of its value and all of it, so that many clients that failed
    together do not return together (Brooker 2015, "Exponential backoff and jitter").

    Args:
        generator: random generator; not the process's own, whose state belongs to the user's training.
    """
    pause = policy.initial_backoff_seconds
    for _ in range(policy.max_attempts - 1):
        yield generator.uniform(pause / 2, pause)
        pause = min(2 * pause, policy.max_backoff_seconds)
    if policy.max_attempts > 0:
        yield None
