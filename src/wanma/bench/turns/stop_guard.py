"""Guard of stopped processes: it ends them if the process that has stopped them dies, even by SIGKILL.

Run as a program, it reads a line for each process, and then `end`; its input ends without that line only if
the other process is dead.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

from wanma.elastic.workers.linux_processes import process_start_time
from wanma.job.errors import WanmaError

READY, END = "ready", "end"
GRACE_SECONDS = 5.0
"""Time that the programs have to end in order, before the guard kills what is left of them."""
POLL_SECONDS = 0.05


class StopGuard:
    """Context manager that runs the guard in a session of its own, which no Ctrl-C reaches.

    Its input is a pipe from this process, which nobody else has: it ends with this process.

    Raises:
        WanmaError: the guard cannot be started.
    """

    def __enter__(self) -> Self:
        self._added: set[tuple[int, int]] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "wanma.bench.turns.stop_guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        if self._process.stdout.readline().strip() != READY:
            self.__exit__(None, None, None)
            raise WanmaError(
                f"the guard of stopped processes ended with code {self._process.returncode}",
                "see its message above; without turns none is needed",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._input.write(f"{END}\n")
            self._input.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def add(self, number: int) -> None:
        """Add a process, before it is stopped.

        Raises:
            WanmaError: the guard has ended.
        """
        start = process_start_time(number)
        if start is None or (number, start) in self._added:
            return
        self._added.add((number, start))
        try:
            self._input.write(f"{number} {start}\n")
            self._input.flush()
        except OSError:
            raise WanmaError(
                "the guard of stopped processes has ended", "repeat the command, which goes on"
            ) from None


def end_processes(starts: dict[int, int]) -> None:
    """End processes and all that descends from them: SIGTERM to the first of each tree, later SIGKILL.

    Args:
        starts: start in ticks by the number of each process.
    """
    living = _living(starts)
    everything = _with_descendants(living)
    numbers = {process.pid for process in living}
    for process in living:
        with suppress(psutil.Error):
            if process.ppid() not in numbers:
                process.send_signal(signal.SIGTERM)
    for process in everything:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_running() for process in everything):
        time.sleep(POLL_SECONDS)
        everything |= _with_descendants(everything)
    for process in everything:
        with suppress(psutil.Error):
            process.kill()


def _living(starts: dict[int, int]) -> list[psutil.Process]:
    found = []
    for number, start in starts.items():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if process_start_time(number) == start:
                found.append(process)
    return found


def _with_descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    for process in tuple(found):
        with suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def main() -> int:
    """Read processes until the input ends, and end them unless `END` was the last line."""
    starts: dict[int, int] = {}
    print(READY, flush=True)
    for line in sys.stdin:
        if line.strip() == END:
            return 0
        number, _, start = line.strip().partition(" ")
        starts[int(number)] = int(start)
    end_processes(starts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
