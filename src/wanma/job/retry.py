"""Trying again, where that is right: storage and network operations that may work a moment later.

    retry(lambda: storage.put(file), Patience(deadline_seconds=60))

Bounded in tries and in time; what no second try mends is raised at once.
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
_PERMANENT_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Patience:
    """How often and how long to try."""

    tries: int = 6
    deadline_seconds: float = 120.0
    """From the first try on; no later one begins after it."""
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 20.0


PATIENCE = Patience()
"""For storage that training can do without for a while."""


def retry(
    operation: Callable[[], Result],
    patience: Patience = PATIENCE,
    *,
    stop: threading.Event | None = None,
) -> Result:
    """The result of `operation`, which is called again after a failure that may pass.

    Args:
        stop: once set, nothing is tried again, and a pause ends at once.

    Raises:
        Exception: that of the last try, with a note of how many there were.
    """
    began = time.monotonic()
    for number, pause in enumerate(pauses(patience, random.SystemRandom()), 1):
        try:
            return operation()
        except Exception as error:
            late = time.monotonic() - began + (pause or 0.0) > patience.deadline_seconds
            if pause is None or late or is_permanent(error) or _stopped_in(pause, stop):
                if number > 1:
                    error.add_note(f"after {number} tries in {time.monotonic() - began:.1f} s")
                raise
    raise ValueError(f"{patience.tries} tries: at least one is needed")


class RetriedFile:
    """A file to read from: after a failure that may pass it is opened again, and read on from where it was.

    As a context it closes what is open.

    Args:
        open_file: gives the file from its beginning; the first time, too.
        stop: as for `retry`.

    Raises:
        Exception: by each method: that of the last try.
    """

    def __init__(
        self,
        open_file: Callable[[], IO[bytes]],
        patience: Patience = PATIENCE,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        self._open_file, self._patience, self._stop = open_file, patience, stop
        self._file: IO[bytes] | None = None
        self._position = 0
        retry(self._opened, patience, stop=stop)

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer, or none, at the end."""

        def once() -> bytes:
            try:
                return self._opened().read(size)
            except BaseException:
                self.close()
                raise

        block = retry(once, self._patience, stop=self._stop)
        self._position += len(block)
        return block

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self._open_file()
            if self._position:
                self._file.seek(self._position)
        return self._file

    def __enter__(self) -> RetriedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stopped_in(seconds: float, stop: threading.Event | None) -> bool:
    """Pause, unless or until somebody says stop; whether somebody did."""
    if stop is None:
        time.sleep(seconds)
        return False
    return stop.wait(seconds)


def is_permanent(error: Exception) -> bool:
    """Whether another try would fail in the same way: what is missing or forbidden, a full disk, a bug."""
    return isinstance(error, _PERMANENT) or getattr(error, "errno", None) in _PERMANENT_NUMBERS


def pauses(patience: Patience, draw: random.Random) -> Iterator[float | None]:
    """Seconds after each try, None after the last: doubling, each between half of it and all of it, so that
    many who failed together do not come back together (Brooker 2015, "Exponential backoff and jitter").

    Args:
        draw: not the process's own generator, whose state belongs to the user's training.
    """
    pause = patience.first_pause_seconds
    for _ in range(patience.tries - 1):
        yield draw.uniform(pause / 2, pause)
        pause = min(2 * pause, patience.longest_pause_seconds)
    if patience.tries > 0:
        yield None
