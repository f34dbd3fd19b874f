"""Why a run ended: one rank's failure as data, and the one text that the user sees."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass

from wanma.hardware.discovery.resource_limits import memory_kills, usable_memory_bytes
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, AgreedError, ScriptExitError, UnfitError, WanmaError
from wanma.observe.units import bytes_text

TEXT_LIMIT = 64 * 1024
"""Characters of a traceback that travel; the log of the rank has all of it."""
BRIEF_LIMIT, _BRIEF_LINES, _BRIEF_WIDTH = 4000, 6, 300
"""Characters of an exception's message that are shown whole; of a longer one: so many lines, so wide."""
FAILURE_LIMIT = 2000
"""Characters of a failure that a new generation is told of."""

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
    """What ended the run."""

    cause: str
    """One line, e.g. 'ValueError: no such column'."""
    rank: int | None = None
    node: int | None = None
    host: str = ""
    traceback: str = ""
    log: str = ""
    hint: str = ""
    exit_code: int = EXIT_FAILED
    consequence: bool = False
    """It looks like the echo of another rank's death, so any other failure explains more."""
    retry_step: int | None = None
    """A recovery is to make this optimizer step again."""
    odd: tuple[str, ...] = ()
    """Ranks whose state differed from all others', in words; counted, for hardware may be the cause."""
    left_with: int = 0
    """Exit code with which a user's script ended the rank; 0: it ended in another way."""
    unfit: bool = False
    """The node has failed a health check, and is to be set aside."""
    raised: bool = False
    """An exception of the rank's own, which says what is wrong: no death, no hang, no echo of another's."""

    @property
    def headline(self) -> str:
        """Who and why."""
        place = f" (node {self.node}, {self.host})" if self.node is not None else ""
        return f"rank {self.rank}{place} failed: {self.cause}" if self.rank is not None else self.cause

    def text(self) -> str:
        """The one message: who, why, where it happened, where to read on, what to do."""
        if self.exit_code == EXIT_USAGE:  # the job is wrong: which rank was the first to say so tells nothing
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
    """An exception that left a rank's entry function.

    A `WanmaError` already says what to do, so it travels without its traceback (the log keeps it).
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
    """A rank's process that ended without a word.

    Args:
        code: as `subprocess` has it: negative for a signal.
        killed: what to say of a SIGKILL; see `killed_hint`.
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
    # Gloo may abort a process whose peer has gone; SIGTERM comes to all processes of a job at once.
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
    """Where a SIGKILL that the supervisor did not send comes from, and the way out.

    Args:
        kills_before: `memory_kills()` when the process lived.
    """
    return sigkill_text(kills_before, memory_kills(), usable_memory_bytes())


def sigkill_text(kills_before: int | None, kills_now: int | None, usable_bytes: int) -> str:
    """`killed_hint` from its facts: what the kernel counted, and the memory that processes here may use."""
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
    """Whether the exception, or what it was raised from, is what a collective raises when a peer died."""
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
    """A message of bearable length: of a longer one, a compiler's with its command and its source, the first
    lines and those that speak of an error. The log of the rank has all of it."""
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
    """`text`, or its beginning and end when it is too long to travel."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def signal_name(number: int) -> str:
    """'SIGKILL' for 9; a plain number for one without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
