"""Child process that works for this one; both exchange messages, each a line of JSON.

It is forked where that is safe: it begins within milliseconds, with the modules and objects of this process.
Else it is a new interpreter, which takes 0.4 s, works from any process and imports no script of the user.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

Message = dict[str, Any]
Serve = Callable[[Iterator[Message], Callable[[Message], None]], None]
"""Function (requests, answer) that a child process runs; the requests end with its parent."""

_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """Child process with which this one exchanges messages.

    Args:
        serve: function that a forked process runs.
        module: module that a new interpreter runs instead, see `serve_parent`.
        arguments: its arguments.
    """

    def __init__(self, serve: Serve, module: str, *arguments: str) -> None:
        if not _is_fork_safe():
            command = [sys.executable, "-m", module, *arguments]
            popen: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._process, self._requests, self._answers = popen, popen.stdin, popen.stdout
            return
        (requests, own_requests), (own_answers, answers) = os.pipe(), os.pipe()
        self._requests, self._answers = os.fdopen(own_requests, "w"), os.fdopen(own_answers)
        ends = (requests, answers), (own_requests, own_answers)
        process = multiprocessing.get_context("fork").Process(
            target=_run_forked, args=(serve, *ends, os.getpid())
        )
        try:
            process.start()
        finally:
            os.close(requests)
            os.close(answers)
        self._process = process

    def send(self, message: Message) -> None:
        """Send a message; one to a process that has ended is lost, and its answers end."""
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._requests, flush=True)

    def answers(self) -> Iterator[Message]:
        """Yield the messages of the process until it ends."""
        while line := self._answers.readline():
            yield json.loads(line)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait()
        self._process.join()
        return int(self._process.exitcode or 0)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        self.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # a request that was not read
            self._requests.close()


def serve_parent(serve: Serve) -> None:
    """Run `serve` in a new interpreter, with the process that started it at its standard streams."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    _serve(serve, sys.stdin, answers)


def kill_on_parent_exit(parent: int) -> None:
    """Ask the kernel, Linux, to SIGKILL this process when `parent` ends; exit at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def _is_fork_safe() -> bool:
    """Return True if no other thread of Python runs, which might hold a lock that the child waits for.

    Threads of native libraries do not count: a child uses neither torch nor a device, and those of numpy end
    before each fork.
    """
    is_daemon = multiprocessing.current_process().daemon  # it may start no process of `multiprocessing`
    return sys.platform == "linux" and threading.active_count() == 1 and not is_daemon


def _run_forked(serve: Serve, ends: tuple[int, int], parent_ends: tuple[int, int], parent: int) -> None:
    kill_on_parent_exit(parent)  # it has the files that its parent has locked, which must be free then
    for descriptor in parent_ends:
        os.close(descriptor)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # a handler of the parent
            signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)
    with os.fdopen(ends[0]) as requests, os.fdopen(ends[1], "w") as answers:
        _serve(serve, requests, answers)


def _serve(serve: Serve, requests: Iterable[str], answers: IO[str]) -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the whole group or job; the parent decides
        signal.signal(number, signal.SIG_IGN)

    def answer(message: Message) -> None:
        print(json.dumps(message), file=answers, flush=True)

    serve(map(json.loads, requests), answer)
