"""Program that becomes a shell of limited time: a process beside it ends it, with all that it has started.

    python -P -m wanma.engines.lease.shell_time MINUTES COMMAND [ARGUMENT ...]

It runs on the node, where the time ends also if the user's terminal is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MARK_VARIABLE = "WANMA_SHELL"
"""Environment variable by which all processes of a shell are found, orphans too."""
WARNING_SECONDS = 300.0
"""Time, in seconds, from the warning to the end; a quarter of the shell's time at most."""
END_SIGNALS = ((signal.SIGHUP, 10.0), (signal.SIGTERM, 10.0), *3 * ((signal.SIGKILL, 1.0),))
"""Signals that end a shell, each with the longest time, in seconds, until the next."""
_CHECK_SECONDS = 60.0
"""Time, in seconds, between two looks whether any process of the shell is left."""


def limit_time(minutes: float | None, python: str = sys.executable) -> list[str]:
    """Return the words before the command of a shell that limit its time; none if `minutes` is None."""
    return [] if minutes is None else [python, "-P", "-m", "wanma.engines.lease.shell_time", f"{minutes:g}"]


def main(arguments: Sequence[str]) -> None:
    """Become the command, for as many minutes as the first argument says."""
    minutes, *command = arguments
    shell = os.getpid()
    mark = f"{shell}-{time.time()}"
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()  # the end of the terminal is not that of the watch
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # the shell's end with their last holder, and srun waits for that
            os.dup2(nothing, descriptor)
        os.close(writer)
        os.read(reader, 1)  # its end: the shell has begun
        _watch(shell, mark, minutes)
        os._exit(0)
    os.environ[MARK_VARIABLE] = mark  # not that of the watch
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _watch(shell: int, mark: str, minutes: str) -> None:
    """End the shell after its time; return early once nothing of it is left."""
    limit, seconds = f"{minutes} minutes (cluster.budget.shell_minutes, or --minutes)", 60 * float(minutes)
    warning_seconds = min(WARNING_SECONDS, seconds / 4)
    warning = f"this shell ends, with all that it has started, in {warning_seconds / 60:.2g} of its {limit}"
    end = f"the shell has had its {limit}; `wanma shell --minutes N` opens a longer one"
    for pause, text in ((seconds - warning_seconds, warning), (warning_seconds, end)):
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _CHECK_SECONDS))
            if not _find(mark):
                return
        if shell in _find(mark):
            with contextlib.suppress(OSError):  # its terminal is gone, or takes nothing now
                options = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
                terminal = os.open(f"/proc/{shell}/fd/2", options)
                os.write(terminal, f"\r\n{text}\r\n".encode())
                os.close(terminal)
    _end(mark)


def _end(mark: str) -> None:
    """End all processes of the shell."""
    for number, seconds in END_SIGNALS:
        for process in _find(mark):
            with contextlib.suppress(OSError):
                os.kill(process, number)
                os.kill(process, signal.SIGCONT)  # one that is stopped takes its signals then
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _find(mark):
                return
            time.sleep(0.1)


def _find(mark: str) -> list[int]:
    """Return the living processes whose environment has the mark."""
    variable, found = f"{MARK_VARIABLE}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
