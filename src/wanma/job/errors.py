"""One error type for everything a user can mend: it says what is wrong and what to do.

Every room raises `WanmaError` for bad input or a failed environment. The command line prints it
as one message and exits with its code; nothing else in the system turns errors into text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any

EXIT_FAILED = 1
"""A rank, a save or the training itself failed."""
EXIT_USAGE = 2
"""The job file, an override or the command line is wrong; nothing was started."""
EXIT_INTERRUPTED = 130
"""The user asked to stop (Ctrl-C); the run can be carried on with the same command."""


class WanmaError(Exception):
    """Something the user can act on.

    Args:
        message: what is wrong, naming the key, file or rank.
        hint: the way out, as one sentence; printed on a line of its own.
        exit_code: what the process should exit with.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.exit_code)


class AgreedError(WanmaError):
    """What all ranks have found together: each raises the same, so who is heard first is not to blame.

    Args:
        retry_step: the optimizer step, counted from 1, that is to be made again; None: none in particular.
        odd: those that differ from all others, in words such as 'rank 1 (HOST)'.
    """

    def __init__(
        self, message: str, hint: str = "", *, retry_step: int | None = None, odd: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, hint)
        self.retry_step = retry_step
        self.odd = odd

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), retry_step=self.retry_step, odd=self.odd), (self.message, self.hint)


class ScriptExitError(WanmaError):
    """A user's script has ended its own process.

    Args:
        left_with: its exit code; not 0.
    """

    def __init__(self, message: str, left_with: int) -> None:
        super().__init__(message)
        self.left_with = left_with

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.left_with)


class UnfitError(WanmaError):
    """This machine has failed a health check: the run goes on without it, where others can."""


class JobError(WanmaError):
    """The job as written cannot be run: found before anything starts."""

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message, hint, exit_code)


def missing_extra(package: str, extra: str, purpose: str) -> WanmaError:
    """The one sentence for an optional dependency that is not installed."""
    return WanmaError(
        f"{purpose} needs the package `{package}`, which is not installed.",
        f"pip install 'wanma[{extra}]'",
        EXIT_USAGE,
    )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
