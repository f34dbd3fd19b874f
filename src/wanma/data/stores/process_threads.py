"""Threads of a process that begin when they are first used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ProcessThreads:
    """Threads of this process; a forked process, and a copy by pickle, begin with their own.

    Args:
        count: calls at once; 0 and 1: by the caller itself.
        name: beginning of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._lock = threading.Lock()
        self._process_id = 0
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._count, self._name)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `function` with each item, and return the results in order.

        Raises:
            Exception: the first failure; calls that have not begun are dropped.
        """
        if self._count <= 1 or len(items) == 1:
            return [function(item) for item in items]
        with self._lock:
            if self._pool is None or self._process_id != os.getpid():
                self._pool, self._process_id = ThreadPoolExecutor(self._count, self._name), os.getpid()
            pool = self._pool
        return list(pool.map(function, items))
