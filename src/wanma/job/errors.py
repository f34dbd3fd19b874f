"""Exceptions for errors that a user can correct: a message with the cause and a hint with the way out.

Every room raises `WanmaError` for bad input or a failed environment. The command line prints it as one
message and exits with its code; nothing else in the system turns errors into text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

EXIT_FAILED = 1
"""Exit code: a rank, a save or the training itself failed."""
EXIT_USAGE = 2
"""Exit code: the job file, an override or the command line is wrong; nothing was started."""
EXIT_INTERRUPTED = 130
"""Exit code: the user asked to stop (Ctrl-C); the same command continues the run."""


class WanmaError(Exception):
    """Error that a user can correct.

    Args:
        message: the fault, naming the key, file or rank.
        hint: the way out, as one sentence; printed on a line of its own.
        exit_code: exit code of the process.
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


class AllRanksError(WanmaError):
    """Error on which all ranks have agreed: each raises the same, so no single rank is blamed.

    Args:
        retry_step: optimizer step, counted from 1, that is to be repeated; None: no particular one.
        outlier_ranks: ranks that differ from all others, in texts such as 'rank 1 (HOST)'.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        retry_step: int | None = None,
        outlier_ranks: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint)
        self.retry_step = retry_step
        self.outlier_ranks = outlier_ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), retry_step=self.retry_step, outlier_ranks=self.outlier_ranks), (
            self.message,
            self.hint,
        )


class ScriptExitError(WanmaError):
    """Exit of a user's script with a code other than 0.

    Args:
        script_exit_code: exit code of the script; not 0.
    """

    def __init__(self, message: str, script_exit_code: int) -> None:
        super().__init__(message)
        self.script_exit_code = script_exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.script_exit_code)


class HealthCheckError(WanmaError):
    """Failed health check of this node: the run continues without the node if others can carry it."""


class JobError(WanmaError):
    """Invalid job, found before anything starts."""

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message, hint, exit_code)


def missing_extra_error(package: str, extra: str, purpose: str) -> WanmaError:
    """Return the error for an optional dependency that is not installed."""
    return WanmaError(
        f"{purpose} needs the package `{package}`, which is not installed.",
        f"pip install 'wanma[{extra}]'",
        EXIT_USAGE,
    )


STORAGE_EXTRAS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "az": ("adlfs", "azure"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
    "hf": ("huggingface_hub", "huggingface"),
    "webhdfs": ("requests", "hdfs"),
    "hdfs": ("pyarrow", "hdfs"),
}
"""Package that implements each storage protocol, and wanma's extra that installs it."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest choice; empty if no choice is close."""
    close = closest_match(word, choices)
    return "" if close is None else f" Did you mean '{close}'?"


def closest_match(word: str, choices: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Return the choice that is most like `word`; None if none reaches `min_similarity` (0 .. 1)."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=min_similarity)), None)


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names as text, with the number of the others: 'a, b and 3 more'."""
    others = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: 'rank 3', 'ranks 0, 1'."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_names([str(rank) for rank in ranks], 8)}"


def first_lines(texts: Sequence[str], most: int) -> str:
    """Return the first texts as indented lines, with the number of the others."""
    others = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return "\n    ".join([*texts[:most], *others])
