"""Call of a scheduler's command with a deadline, and its failure as one error."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence

from wanma.engines.engine import QUERY_SECONDS
from wanma.job.errors import WanmaError


class SchedulerCommandError(WanmaError):
    """Failure of a scheduler's command.

    Args:
        message: the command and its own message.
        hint: the way out.
        output: text that the command wrote to standard error.
        is_timeout: True if the command did not end before its deadline.
    """

    def __init__(self, message: str, hint: str, output: str = "", *, is_timeout: bool = False) -> None:
        super().__init__(message, hint)
        self.output, self.is_timeout = output, is_timeout


def run_scheduler_command(
    command: Sequence[str],
    *,
    seconds: float = QUERY_SECONDS,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> str:
    """Run a command, which is a list of arguments and never a line for a shell; return its standard output.

    Args:
        command: program and arguments.
        seconds: deadline, in seconds.
        text: standard input.
        environment: environment variables beside those of this process.
        without: environment variables of this process that are left out.

    Raises:
        SchedulerCommandError: the program is missing, fails, or does not end before the deadline.
    """
    shown = " ".join(command[:4]) + (" ..." if len(command) > 4 else "")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={name: value for name, value in os.environ.items() if name not in without}
            | dict(environment or {}),
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SchedulerCommandError(
            f"there is no program {command[0]} here", "use a node where it is installed, such as a login node"
        ) from None
    except OSError as error:
        raise SchedulerCommandError(
            f"`{shown}` could not be started: {error.strerror or error}", ""
        ) from error
    try:
        output, errors = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise SchedulerCommandError(
            f"`{shown}` gave no answer within {seconds:.0f} s",
            "the scheduler may be overloaded or down: try again later; runs that it has started go on",
            is_timeout=True,
        ) from None
    if process.returncode != 0:
        cause = " ".join(line.strip() for line in (errors or output).strip().splitlines()[-3:])
        raise SchedulerCommandError(
            f"`{shown}` failed with exit code {process.returncode}: {cause or 'it gave no reason'}",
            "",
            errors or output,
        )
    return output
