"""Failure of a rank or node as data, and its one message for the user."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass

from wanma.job.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    AllRanksError,
    HealthCheckError,
    ScriptExitError,
    WanmaError,
)
from wanma.job.run.resource_limits import count_oom_kills, usable_memory_bytes
from wanma.observe.units import bytes_text

MAX_TRACEBACK_CHARACTERS = 64 * 1024
"""Most characters of a traceback in a message; the log of the rank has all of it."""
MAX_MESSAGE_CHARACTERS, _SHORTENED_LINES, _SHORTENED_LINE_CHARACTERS = 4000, 6, 300
"""Characters of an exception's message that are shown whole; of a longer one, lines and their width."""
MAX_FAILURE_CHARACTERS = 2000
"""Most characters of a failure in the message to a new generation."""

REDUCE_MEMORY_HINT = (
    "use a smaller parallel.micro_batch, fewer ranks per node, or shard more (parallel.shard)"
)

_LAST_LINES_JUDGED = 3
"""Lines at the end of a program's output that tell why it ended, if it shows no traceback."""
_COLLECTIVE_ERRORS = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "HorovodInternalError",
}
_COLLECTIVE_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "gloo connectfullmesh",
    "nccl error",
    "timed out waiting",
    "socket timeout",
    "watchdog",
)


@dataclass(frozen=True)
class Failure:
    """Cause of the end of a generation or run."""

    cause: str
    """Cause in one line, e.g. 'ValueError: no such column'."""
    rank: int | None = None
    node_rank: int | None = None
    hostname: str = ""
    traceback: str = ""
    log: str = ""
    hint: str = ""
    exit_code: int = EXIT_FAILED
    is_secondary: bool = False
    """True if it looks like a secondary failure, caused by another rank's death: any other explains more."""
    retry_step: int | None = None
    """Optimizer step that a recovery is to repeat; None: no particular one."""
    outlier_ranks: tuple[str, ...] = ()
    """Ranks whose state differed from all others', in words; counted, as the hardware may be the cause."""
    script_exit_code: int = 0
    """Exit code with which a user's script ended the rank; 0: it ended in another way."""
    failed_health_check: bool = False
    """True if the node failed a health check, and is to be excluded."""
    is_node_loss: bool = False
    """True if a node was lost: nothing shows that the run itself fails."""
    is_raised_error: bool = False
    """True if the rank itself raised it, so that it names the fault: no death, no hang, not secondary."""

    @property
    def summary(self) -> str:
        """Rank and node that failed, and the cause, in one line."""
        node_text = f" (node {self.node_rank}, {self.hostname})" if self.node_rank is not None else ""
        return f"rank {self.rank}{node_text} failed: {self.cause}" if self.rank is not None else self.cause

    def text(self) -> str:
        """Format the message for the user: rank, cause, traceback, log and remedy."""
        if self.exit_code == EXIT_USAGE:  # the job is wrong, on all ranks alike
            return f"{self.cause}\n  {self.hint}" if self.hint else self.cause
        lines = [self.summary]
        if self.traceback:
            lines += ["", self.traceback.rstrip(), ""]
        if self.log:
            lines.append(f"  log: {self.log}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def failure_from_exception(
    error: BaseException, rank: int, node_rank: int, hostname: str, log: str
) -> Failure:
    """Return the failure for an exception that left a rank's entry function.

    A `WanmaError` already names the remedy, so it comes without its traceback (the log keeps it).
    """
    if isinstance(error, AllRanksError):
        return Failure(
            cause=truncate_middle(error.message),
            hint=truncate_middle(error.hint),
            retry_step=error.retry_step,
            outlier_ranks=error.outlier_ranks,
            is_raised_error=True,
        )
    consequence = is_secondary_error(error)
    if isinstance(error, WanmaError):
        return Failure(
            cause=truncate_middle(error.message),
            rank=rank,
            node_rank=node_rank,
            hostname=hostname,
            log=log,
            hint=truncate_middle(error.hint),
            exit_code=error.exit_code or EXIT_FAILED,
            is_secondary=consequence,
            script_exit_code=error.script_exit_code if isinstance(error, ScriptExitError) else 0,
            failed_health_check=isinstance(error, HealthCheckError),
            is_raised_error=not consequence,
        )
    return Failure(
        cause=shorten_message(traceback.format_exception_only(error)[-1].strip()),
        rank=rank,
        node_rank=node_rank,
        hostname=hostname,
        traceback=truncate_middle(_traceback(error)),
        log=log,
        is_secondary=consequence,
        is_raised_error=not consequence,
    )


def failure_from_exit_code(
    exit_code: int,
    rank: int,
    node_rank: int,
    hostname: str,
    log: str,
    sigkill_hint: str,
    *,
    task: str = "",
    last_output: str = "",
) -> Failure:
    """Return the failure for a rank's process that ended without a message.

    Args:
        exit_code: exit code as `subprocess` has it: negative for a signal.
        rank: rank of the process.
        node_rank: node rank.
        hostname: name of the node's host.
        log: path of the rank's log.
        sigkill_hint: hint for a SIGKILL; see `explain_sigkill`.
        task: task of the rank in its framework, such as 'ps 0'; empty: none.
        last_output: newest lines of the rank's log, for a program whose exceptions are unknown here.
    """
    hint = ""
    process = f"its process ({task})" if task else "its process"
    if exit_code >= 0:
        cause = f"{process} exited with code {exit_code} before its work was finished"
    else:
        cause = f"{process} was killed by {signal_name(-exit_code)}"
        if -exit_code == signal.SIGKILL:
            hint = sigkill_hint
        elif -exit_code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
            hint = "native code crashed: read the Python stack at the end of the log"
    # Gloo may abort a process whose peer is gone; SIGTERM reaches all processes of a job at once.
    return Failure(
        cause,
        rank=rank,
        node_rank=node_rank,
        hostname=hostname,
        traceback=truncate_middle(last_output),
        log=log,
        hint=hint,
        script_exit_code=max(exit_code, 0),
        is_secondary=-exit_code in (signal.SIGABRT, signal.SIGTERM) or _ends_in_secondary_error(last_output),
    )


def explain_sigkill(oom_kills_before: int | None) -> str:
    """Return the probable origin of a SIGKILL that the supervisor did not send, and the remedy.

    Args:
        oom_kills_before: `count_oom_kills()` when the process lived.
    """
    return format_sigkill_hint(oom_kills_before, count_oom_kills(), usable_memory_bytes())


def format_sigkill_hint(oom_kills_before: int | None, oom_kills_now: int | None, usable_bytes: int) -> str:
    """Return `explain_sigkill` from the kernel's out-of-memory kills and the usable memory in bytes."""
    if oom_kills_before is None or oom_kills_now is None:
        cause = "probably the kernel's out-of-memory killer (check `dmesg` on that node)"
    elif oom_kills_now > oom_kills_before:
        usable = bytes_text(usable_bytes)
        cause = (
            f"killed by the kernel's out-of-memory killer: processes on this node can use {usable} in total"
        )
    else:
        return (
            "not the kernel's out-of-memory killer, which killed nothing on this node meanwhile; check for "
            "`kill -9`, limits of the batch system, or systemd-oomd"
        )
    return f"{cause}; {REDUCE_MEMORY_HINT}"


def is_secondary_error(error: BaseException) -> bool:
    """Return True if the exception, or its cause, is one that a collective raises when a peer has died."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        if {kind.__name__ for kind in type(current).__mro__} & _COLLECTIVE_ERRORS:
            return True
        if isinstance(current, RuntimeError | WanmaError):
            text = str(current).lower()
            if any(phrase in text for phrase in _COLLECTIVE_WORDS):
                return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def _ends_in_secondary_error(output: str) -> bool:
    """Return True if a program's newest lines end in an error of a collective whose peer has died.

    Of Python, that is the line of the last exception: what was logged before and after it may be of any kind.
    """
    _, traceback_line, rest = output.rpartition("Traceback (most recent call last):\n")
    if traceback_line:
        lines = [line for line in rest.splitlines() if line and not line.startswith(" ")][:1]
    else:
        lines = output.splitlines()[-_LAST_LINES_JUDGED:]
    text = "\n".join(lines)
    return any(kind in text for kind in _COLLECTIVE_ERRORS) or any(
        phrase in text.lower() for phrase in _COLLECTIVE_WORDS
    )


def shorten_message(message: str) -> str:
    """Shorten a long message to its first lines and those with the word "error".

    Such a message may be a compiler's, with its command and its source. The log of the rank has all of it.
    """
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    lines = [line for line in message.splitlines() if line.strip()]
    kept_lines, other_lines = lines[:_SHORTENED_LINES], lines[_SHORTENED_LINES:]
    kept_lines += [line for line in other_lines if "error" in line.lower()][:_SHORTENED_LINES]
    shortened = [
        line if len(line) <= _SHORTENED_LINE_CHARACTERS else f"{line[:_SHORTENED_LINE_CHARACTERS]} ..."
        for line in kept_lines
    ]
    return "\n".join([*shortened, f"... ({len(message):,} characters in total: see the log)"])


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    current: BaseException | None = error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        text = text.replace(message, shorten_message(message)) if (message := str(current)) else text
        current = current.__cause__ or current.__context__
    return text


def truncate_middle(text: str, max_characters: int = MAX_TRACEBACK_CHARACTERS) -> str:
    """Return `text`, or its beginning and end if it is longer than `max_characters` characters."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters omitted ...\n{text[-half:]}"


def signal_name(number: int) -> str:
    """Return 'SIGKILL' for 9; a plain number for a signal without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
