"""Program of a contender from its start to its end: process, output, and the processes that it leaves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.job_program import JobProgram
from wanma.bench.programs.python_environment import program_variables
from wanma.bench.turns.own_clock import OwnClock
from wanma.job.errors import WanmaError

ERROR_LINES = 15
"""Last lines of the output in the error of a program that failed."""


class RunningProgram:
    """Started program; its output goes to output.log in `folder`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, contender: Contender, program: JobProgram | CommandProgram, folder: Path) -> None:
        self.program = program
        self.clock = OwnClock()
        self.process = subprocess.Popen(
            program.command,
            cwd=contender.folder or None,
            env=program_variables(contender.python_environment, contender.environment, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        assert self.process.stdout is not None
        self.output = Output(self.process.stdout, folder / "output.log")

    @property
    def seconds(self) -> float:
        """Return the seconds since its start, without those in which it was stopped."""
        return self.clock.seconds

    def kill(self) -> None:
        """Kill it, unless it has ended; what an engine has of it ends at once."""
        if self.process.poll() is None:
            self.process.kill()
            self.program.abandon()
        self.process.wait()


def _heed_interrupts() -> None:
    """Let SIGINT end the program at its target; the children of a meter in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Output:
    """Lines of a program with the unix times of their arrival, which also go to a file."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        self._stream, self._path, self._file = stream, path, path.open("wb")
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self.lines.append((time.time(), line.decode(errors="replace").rstrip("\n")))
            if self._failure is None:
                try:
                    self._file.write(line)
                except OSError as error:  # the rest is read all the same: the program would wait for a reader
                    self._failure = error

    def with_last_lines(self, text: str) -> str:
        """Return a text with the end of the output below it."""
        last = [line for _, line in self.lines if line.strip()][-ERROR_LINES:]
        return "\n    ".join([text, *last])

    def close(self) -> None:
        """Wait for the last line: whoever still holds the stream has been killed.

        Raises:
            WanmaError: the file could not be written.
        """
        self._thread.join(5.0)
        self._stream.close()
        try:
            self._file.close()
        except OSError as error:
            self._failure = self._failure or error
        if self._failure is not None:
            raise WanmaError(
                f"cannot write to {self._path}: {self._failure.strerror}",
                "free space there, or give another folder for results",
            )


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process, at most so long; `Popen.wait` would wake up a hundred times a second."""
    try:
        number = os.pidfd_open(process.pid)
    except OSError:  # the kernel is older than 5.3
        time.sleep(seconds)
        return
    try:
        waiting = select.poll()
        waiting.register(number, select.POLLIN)
        waiting.poll(seconds * 1e3)
    finally:
        os.close(number)
