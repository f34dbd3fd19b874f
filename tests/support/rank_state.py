"""State of a rank's process in a hang: stacks of all threads, its collectives and its processor time.

A rank may be stuck in native code, with the interpreter's lock or without. So its stacks come from a signal
handler in C, which needs no lock, and its collectives from a thread that waits for requests.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from wanma.elastic.protocol.local_messages import CollectiveStateReport
from wanma.elastic.workers.flight_recorder import FLIGHT_RECORDER_ENTRIES, read_collective_state
from wanma.elastic.workers.linux_processes import process_state

ANSWER_SECONDS = 5.0
"""Limit of the wait for a process's stacks, and for its collectives, in seconds."""
STOPPED = "stopped (SIGSTOP?)"
"""State of a process that a signal has stopped, as `process_state` has it."""
_SETTLED_SECONDS = 0.3
"""Silence, in seconds, after which a dump of stacks counts as complete."""


def serve_state(connection: Connection, stacks: Path) -> None:
    """Answer requests for this process's state, from now to its end.

    Args:
        connection: end that gets a request and returns a `CollectiveStateReport`.
        stacks: file that gets the stacks of all threads at SIGUSR1.
    """
    faulthandler.register(signal.SIGUSR1, file=stacks.open("ab", buffering=0), all_threads=True, chain=False)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES)
    threading.Thread(target=_answer, args=(connection,), name="rank-state", daemon=True).start()


def _answer(connection: Connection) -> None:
    while True:
        try:
            connection.recv()
            connection.send(read_collective_state())
        except (EOFError, OSError):
            return


class RankState:
    """State of the process of a rank, as the process that has started it sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stacks = os.memfd_create("stacks")
        self._cpu_seconds = 0.0

    @property
    def stacks_path(self) -> Path:
        """Path under which other processes open the file of the stacks."""
        return Path(f"/proc/{os.getpid()}/fd/{self._stacks}")

    def begin_run(self, process: int) -> None:
        """Note the processor time of the process before a run."""
        self._cpu_seconds = _cpu_seconds(process)

    def describe(self, process: int) -> str:
        """Return the process's state, kernel waits of its threads, collectives and stacks, in lines."""
        if process_state(process) in ("gone", "dead"):
            return "its process has ended"
        before = _cpu_seconds(process)
        waits, position = _kernel_waits(process), self.read_position(process)
        used, now_used = before - self._cpu_seconds, _cpu_seconds(process) - before
        return "\n".join(
            [
                f"process: {process_state(process) or 'runs or sleeps'}; {used:.2f} CPU seconds in this run, "
                f"{now_used:.2f} since the time-out",
                f"waits of its threads in the kernel: {waits}",
                position,
            ]
        )

    def read_position(self, process: int) -> str:
        """Return collectives and stacks, in lines: equal at two times if the process has not moved."""
        if process_state(process) == STOPPED:
            return "stopped: it answers nothing"
        collectives = self._describe_collectives()
        return f"{collectives}\n{self._dump_stacks(process) or f'no stacks in {ANSWER_SECONDS:.0f} s'}"

    def close(self) -> None:
        self._connection.close()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1

    def _describe_collectives(self) -> str:
        try:
            while self._connection.poll():  # a late answer to an earlier request
                self._connection.recv()
            self._connection.send(None)
            if not self._connection.poll(ANSWER_SECONDS):
                return f"collective: no answer in {ANSWER_SECONDS:.0f} s; a thread may hold Python's lock"
            report = self._connection.recv()
        except (EOFError, OSError) as error:
            return f"collective: no answer ({type(error).__name__})"
        assert isinstance(report, CollectiveStateReport)
        recent = ", ".join(report.recent_collectives) or "none"
        return f"collective: {report.current_collective or 'none'}; ended before it: {recent}"

    def _dump_stacks(self, process: int) -> str:
        """Return faulthandler's dump of Python's threads, innermost frames first; empty without an answer.

        It is without the thread that answers requests.
        """
        start = os.fstat(self._stacks).st_size
        os.kill(process, signal.SIGUSR1)
        deadline, size, settled = time.monotonic() + ANSWER_SECONDS, start, 0.0
        while time.monotonic() < deadline and settled < _SETTLED_SECONDS:
            time.sleep(0.05)
            last, size = size, os.fstat(self._stacks).st_size
            settled = settled + 0.05 if size == last > start else 0.0
        dump = os.pread(self._stacks, size - start, start).decode(errors="replace")
        return "\n\n".join(stack for stack in dump.rstrip().split("\n\n") if f'"{__file__}"' not in stack)


def _cpu_seconds(process: int) -> float:
    """Return the processor time, user and system, that a process has used; 0 without the process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kernel_waits(process: int) -> str:
    """Return each thread's wait in the kernel, native threads too: 'futex_wait_queue × 3, running'."""
    waits: dict[str, int] = {}
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            wait = (thread / "wchan").read_text()
        except OSError:
            continue
        wait = "running" if wait in ("", "0") else wait
        waits[wait] = waits.get(wait, 0) + 1
    return ", ".join(f"{wait} × {count}" if count > 1 else wait for wait, count in sorted(waits.items()))
