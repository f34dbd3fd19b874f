"""Failure of a rank or node as data, and its one message for the user."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass

from wanma.hardware.discovery.resource_limits import memory_kills, usable_memory_bytes
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, AgreedError, ScriptExitError, UnfitError, WanmaError
from wanma.observe.units import bytes_text

TEXT_LIMIT = 64 * 1024
"""Most characters of a traceback in a message; the log of the rank has all of it."""
BRIEF_LIMIT, _BRIEF_LINES, _BRIEF_WIDTH = 4000, 6, 300
"""Characters of an exception's message that are shown whole; of a longer one, lines and their width."""
FAILURE_LIMIT = 2000
"""Most characters of a failure in the message to a new generation."""

LESS_MEMORY = "use a smaller parallel.micro_batch, fewer ranks per machine, or shard more (parallel.shard)"

_COLLECTIVE_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError"}
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
    node: int | None = None
    host: str = ""
    traceback: str = ""
    log: str = ""
    hint: str = ""
    exit_code: int = EXIT_FAILED
    consequence: bool = False
    """True if it looks like a secondary failure, caused by another rank's death: any other explains more."""
    retry_step: int | None = None
    """Optimizer step that a recovery is to repeat; None: no particular one."""
    odd: tuple[str, ...] = ()
    """Ranks whose state differed from all others', in words; counted, as the hardware may be the cause."""
    left_with: int = 0
    """Exit code with which a user's script ended the rank; 0: it ended in another way."""
    unfit: bool = False
    """True if the node failed a health check, and is to be excluded."""
    raised: bool = False
    """True if the rank itself raised it, so that it names the fault: no death, no hang, not secondary."""

    @property
    def headline(self) -> str:
        """Rank and node that failed, and the cause, in one line."""
        place = f" (node {self.node}, {self.host})" if self.node is not None else ""
        return f"rank {self.rank}{place} failed: {self.cause}" if self.rank is not None else self.cause

    def text(self) -> str:
        """Format the message for the user: rank, cause, traceback, log and remedy."""
        if self.exit_code == EXIT_USAGE:  # the job is wrong, on all ranks alike
            return f"{self.cause}\n  {self.hint}" if self.hint else self.cause
        lines = [self.headline]
        if self.traceback:
            lines += ["", self.traceback.rstrip(), ""]
        if self.log:
            lines.append(f"  log: {self.log}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def failure_of_exception(error: BaseException, rank: int, node: int, host: str, log: str) -> Failure:
    """Return the failure for an exception that left a rank's entry function.

    A `WanmaError` already names the remedy, so it comes without its traceback (the log keeps it).
    """
    if isinstance(error, AgreedError):
        return Failure(
            cause=clip(error.message),
            hint=clip(error.hint),
            retry_step=error.retry_step,
            odd=error.odd,
            raised=True,
        )
    consequence = is_consequence(error)
    if isinstance(error, WanmaError):
        return Failure(
            cause=clip(error.message),
            rank=rank,
            node=node,
            host=host,
            log=log,
            hint=clip(error.hint),
            exit_code=error.exit_code or EXIT_FAILED,
            consequence=consequence,
            left_with=error.left_with if isinstance(error, ScriptExitError) else 0,
            unfit=isinstance(error, UnfitError),
            raised=not consequence,
        )
    return Failure(
        cause=brief(traceback.format_exception_only(error)[-1].strip()),
        rank=rank,
        node=node,
        host=host,
        traceback=clip(_traceback(error)),
        log=log,
        consequence=consequence,
        raised=not consequence,
    )


def failure_of_exit(code: int, rank: int, node: int, host: str, log: str, killed: str) -> Failure:
    """Return the failure for a rank's process that ended without a message.

    Args:
        code: exit code as `subprocess` has it: negative for a signal.
        rank: rank of the process.
        node: node rank.
        host: name of the node's host.
        log: path of the rank's log.
        killed: hint for a SIGKILL; see `killed_hint`.
    """
    hint = ""
    if code >= 0:
        cause = f"its process left with exit code {code} before the work was finished"
    else:
        cause = f"its process was killed by {signal_name(-code)}"
        if -code == signal.SIGKILL:
            hint = killed
        elif -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
            hint = "a crash in native code: the end of the log shows where Python stood"
    # Gloo may abort a process whose peer is gone; SIGTERM reaches all processes of a job at once.
    return Failure(
        cause,
        rank=rank,
        node=node,
        host=host,
        log=log,
        hint=hint,
        left_with=max(code, 0),
        consequence=-code in (signal.SIGABRT, signal.SIGTERM),
    )


def killed_hint(kills_before: int | None) -> str:
    """Return the probable origin of a SIGKILL that the supervisor did not send, and the remedy.

    Args:
        kills_before: `memory_kills()` when the process lived.
    """
    return sigkill_text(kills_before, memory_kills(), usable_memory_bytes())


def sigkill_text(kills_before: int | None, kills_now: int | None, usable_bytes: int) -> str:
    """Return `killed_hint` from its facts: the kernel's out-of-memory kills, and usable memory in bytes."""
    if kills_before is None or kills_now is None:
        cause = "probably the kernel's out-of-memory killer (`dmesg` of that machine tells)"
    elif kills_now > kills_before:
        usable = bytes_text(usable_bytes)
        cause = f"the kernel's out-of-memory killer struck: the processes here have {usable} in all"
    else:
        return (
            "the kernel's out-of-memory killer did not strike here meanwhile, so somebody else sent it: "
            "`kill -9`, or what guards the limits of this machine (batch system, systemd-oomd)"
        )
    return f"{cause}; {LESS_MEMORY}"


def is_consequence(error: BaseException) -> bool:
    """Return True if the exception, or its cause, is one that a collective raises when a peer has died."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if {kind.__name__ for kind in type(current).__mro__} & _COLLECTIVE_ERRORS:
            return True
        if isinstance(current, RuntimeError | WanmaError):
            text = str(current).lower()
            if any(word in text for word in _COLLECTIVE_WORDS):
                return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def brief(message: str) -> str:
    """Shorten a long message to its first lines and those with the word "error".

    Such a message may be a compiler's, with its command and its source. The log of the rank has all of it.
    """
    if len(message) <= BRIEF_LIMIT:
        return message
    lines = [line for line in message.splitlines() if line.strip()]
    first, rest = lines[:_BRIEF_LINES], lines[_BRIEF_LINES:]
    first += [line for line in rest if "error" in line.lower()][:_BRIEF_LINES]
    shown = [line if len(line) <= _BRIEF_WIDTH else f"{line[:_BRIEF_WIDTH]} ..." for line in first]
    return "\n".join([*shown, f"... ({len(message):,} characters in all: the log has them)"])


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = text.replace(message, brief(message)) if (message := str(current)) else text
        current = current.__cause__ or current.__context__
    return text


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return `text`, or its beginning and end if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def signal_name(number: int) -> str:
    """Return 'SIGKILL' for 9; a plain number for a signal without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
