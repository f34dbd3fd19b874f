"""Run of independent searches in this process and, where that pays, in a second one beside it.

The second process is a Python interpreter of its own. It is not forked, since other threads may hold locks,
and does not import the user's main module. Searches and results travel over a private socket. Both processes
take the next search from one queue, so that neither is idle while one waits. Searches that the second process
does not deliver run in this one, with the same result.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from wanma.job.run.resource_limits import usable_cores
from wanma.planner.search.result import SearchResult

LEAST_GRIDS = 100
"""Least size of the searches beside the longest one with which a second process pays, in mesh shapes.

A process starts in about 0.4 s, in which about 50 mesh shapes are searched.
"""
_LONGEST_SECONDS = 600.0
"""Longest wait for each result of the second process, in seconds."""
_MOST_QUEUED = 256
"""Largest number of searches in the queue, where each is one byte."""
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from wanma.planner.search_process import serve; serve(int(sys.argv[1]))"
)


class SearchTask(NamedTuple):
    """Search that depends on no other search."""

    run: Callable[[], SearchResult]
    """Call that pickles: a `partial` of a module's function."""
    grids: int
    """Estimated duration, as the number of mesh shapes that a search looks at in this time."""


def run_searches(tasks: Sequence[SearchTask]) -> list[SearchResult]:
    """Run the searches, and return their results in the order of the tasks."""
    results: dict[int, SearchResult] = {}
    if needs_second_process(tasks) and usable_cores() > 1:
        longest_first = sorted(range(len(tasks)), key=lambda number: -tasks[number].grids)
        with _queue(longest_first) as queue, _second_process(tasks, queue) as receive:
            results = {number: tasks[number].run() for number in _taken(queue)}
            results.update(receive(min(len(tasks), _MOST_QUEUED) - len(results)))
    return [results[number] if number in results else task.run() for number, task in enumerate(tasks)]


def needs_second_process(tasks: Sequence[SearchTask]) -> bool:
    """Return whether the searches beside the longest one take longer than the start of a process."""
    return sum(sorted(task.grids for task in tasks)[:-1]) >= LEAST_GRIDS


def serve(queue: int) -> None:
    """Run searches of the queue in the second process, and send their results.

    The standard input is the socket over which the searches come and the results go.

    Args:
        queue: file descriptor of the queue.
    """
    from multiprocessing.connection import Connection

    for stop in (signal.SIGINT, signal.SIGUSR1):  # they reach all processes; the first one decides
        signal.signal(stop, signal.SIG_IGN)
    with Connection(0) as connection:
        tasks = connection.recv()
        for number in _taken(queue):
            connection.send((number, tasks[number].run()))


@contextmanager
def _queue(numbers: Sequence[int]) -> Iterator[int]:
    """Open a file descriptor from which each number is read once, whichever process reads it."""
    reader, writer = os.pipe()
    try:
        # Descriptors below 3 collide with the second process's standard streams, and are free where a daemon
        # has closed its own.
        queue = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 3)
        os.write(writer, bytes(numbers[:_MOST_QUEUED]))
    finally:
        os.close(reader)
        os.close(writer)
    os.set_blocking(queue, False)  # a process forked meanwhile by another thread may hold the writer open
    try:
        yield queue
    finally:
        os.close(queue)


def _taken(queue: int) -> Iterator[int]:
    """Take numbers from the queue until it is empty."""
    with suppress(BlockingIOError):
        while number := os.read(queue, 1):
            yield number[0]


@contextmanager
def _second_process(
    tasks: Sequence[SearchTask], queue: int
) -> Iterator[Callable[[int], dict[int, SearchResult]]]:
    """Start the second process, and give a function that receives a number of results from it.

    The function returns fewer results where the process ends early, and none where it cannot be started.
    """
    from multiprocessing.connection import Pipe  # only here: most commands search in one process

    connection, child_end = Pipe()
    process = None
    # Without an interpreter `sys.executable` is empty, or the frozen program itself.
    if sys.executable and not getattr(sys, "frozen", False):
        with suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(queue), *sys.path],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[queue],
            )
    child_end.close()

    def receive(number: int) -> dict[int, SearchResult]:
        results: dict[int, SearchResult] = {}
        with suppress(EOFError, OSError):  # the process ended early
            while len(results) < number and connection.poll(_LONGEST_SECONDS):
                results.update([connection.recv()])
        return results

    try:
        if process is not None:
            with suppress(OSError):  # as above
                connection.send(tasks)
        yield receive
    finally:
        connection.close()
        if process is not None:
            process.kill()
            process.wait()
