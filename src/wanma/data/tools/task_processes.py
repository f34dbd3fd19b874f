"""Tasks on open sources, done by this process or by several; a task that ends its process is named.

A library in C++ may end the process where a file is damaged. Then the tasks that were at work are repeated
one by one, each in a process of its own, until the one that ends it is known.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from wanma.data.index.sample_index import SampleIndex
from wanma.job.run.resource_limits import usable_cores

Task = TypeVar("Task")
Result = TypeVar("Result")

MIN_BYTES_PER_PROCESS = 64 << 20
"""Stored bytes that are worth the start of one more process."""
_TASKS_AHEAD = 2
"""Tasks that wait in the queue, per process."""


@dataclass(frozen=True)
class ProcessCrash:
    """End of the process that did a task, in place of its result."""


Function = Callable[[Sequence[SampleIndex], Any, Task], Result]
"""Function (indexes of the sources, what all tasks have in common, task) -> result; it must be picklable."""


@dataclass(frozen=True)
class Work(Generic[Task, Result]):
    """Function with all that each process needs to do its tasks."""

    function: Function[Task, Result]
    indexes: Sequence[SampleIndex]
    common: Any = None

    def run(
        self, tasks: Sequence[Task], processes: int, *, is_isolated: bool = False
    ) -> Iterator[tuple[Task, Result | ProcessCrash]]:
        """Yield each task with its result, as they end.

        Args:
            processes: processes that work at once; 1: this one.
            is_isolated: use another process even if one is enough, because a task may end it.

        Raises:
            Exception: the first exception of a task.
        """
        if processes == 1 and not is_isolated:
            for task in tasks:
                yield task, self.function(self.indexes, self.common, task)
            return
        pending = deque(tasks)
        while pending:
            suspects: list[Task] = []
            yield from self._run_in_pool(pending, processes, suspects)
            for task in suspects:
                yield task, self._run_alone(task)

    def _run_in_pool(
        self, pending: deque[Task], processes: int, suspects: list[Task]
    ) -> Iterator[tuple[Task, Result | ProcessCrash]]:
        """Do tasks of `pending`, until all are done or a process has ended; its tasks go to `suspects`."""
        running: dict[Future[Result], Task] = {}
        pool = self._pool(processes)
        try:
            while pending or running:
                while pending and len(running) < processes * _TASKS_AHEAD:
                    future = pool.submit(_run_task, pending[0])
                    running[future] = pending.popleft()
                future = _first_done(running)
                task = running[future]
                result = future.result()
                del running[future]
                yield task, result
        except BrokenProcessPool:
            suspects += running.values()
        finally:
            pool.shutdown(cancel_futures=True)

    def _run_alone(self, task: Task) -> Result | ProcessCrash:
        with self._pool(1) as pool:
            try:
                result: Result = pool.submit(_run_task, task).result()
                return result
            except BrokenProcessPool:
                return ProcessCrash()

    def _pool(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (self,))


def _first_done(running: dict[Future[Any], Any]) -> Future[Any]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    return next(iter(done))


def useful_processes(size: int, limit: int | None, *, is_shared: bool = True) -> int:
    """Return the number of processes for `size` stored bytes.

    Args:
        limit: number that the user asks for; None: the usable cores.
        is_shared: False if no other process can read the data.
    """
    if not is_shared:
        return 1
    if limit is not None:
        return limit
    return max(min(usable_cores(), size // MIN_BYTES_PER_PROCESS), 1)


_worker: list[Work[Any, Any]] = []
"""Work of this process, if it is one of a pool: set once, when it starts."""


def _start(work: Work[Any, Any]) -> None:
    _worker[:] = [work]


def _run_task(task: Any) -> Any:
    (work,) = _worker
    return work.function(work.indexes, work.common, task)
