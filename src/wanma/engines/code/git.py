"""Calls of git with a deadline, independent of the locale and of variables that name another repository."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer

from wanma.job.errors import WanmaError

GIT_TIMEOUT_SECONDS = 30.0
"""Longest run of one git command."""

_KEPT_VARIABLES = (
    "GIT_CONFIG_",
    "GIT_EXEC_PATH",
    "GIT_CEILING_DIRECTORIES",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
)
"""Prefixes of git's variables that its calls inherit; others, as a hook has them, name another repository."""

_SETTINGS = (
    "core.quotePath=false",
    "core.fsmonitor=false",
    "core.protectNTFS=false",  # nothing is checked out: names that other systems forbid are only listed
    "core.protectHFS=false",
    "init.defaultObjectFormat=sha1",
)


@dataclass(frozen=True)
class GitOutput:
    """Result of a successful git command."""

    text: bytes
    """Standard output, at most `limit_bytes`."""
    warnings: str
    """Standard error."""
    is_cut: bool
    """True if the standard output is longer than `limit_bytes`."""


class NoRepositoryError(Exception):
    """Absence of git or of a repository; the text says which of them."""


def repository_root(folder: Path) -> Path:
    """Return the top folder of the working tree that contains `folder`.

    Raises:
        NoRepositoryError: git is not installed, or the folder lies in no working tree.
        WanmaError: git refuses the repository or does not answer.
    """
    if shutil.which("git") is None:
        raise NoRepositoryError("git is not installed")
    try:
        output = run_git(folder, "rev-parse", "--show-toplevel")
    except WanmaError as error:
        if "not a git repository" in error.message or "must be run in a work tree" in error.message:
            raise NoRepositoryError(f"{folder} is in no working tree of git") from error
        raise
    return Path(os.fsdecode(output.text.removesuffix(b"\n")))


def run_git(
    folder: Path,
    *arguments: str,
    stdin: bytes = b"",
    limit_bytes: int | None = None,
    accepted_exit_codes: tuple[int, ...] = (0,),
) -> GitOutput:
    """Run `git ARGUMENTS` in `folder`; it ends once its standard output exceeds `limit_bytes`.

    Raises:
        WanmaError: the command fails, or takes longer than `GIT_TIMEOUT_SECONDS`.
    """
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    with TemporaryFile() as given, TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            ["git", *settings, *arguments],
            cwd=folder,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            start_new_session=True,  # its filters and hooks end with it
        )
        is_late = Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = Timer(GIT_TIMEOUT_SECONDS, end)
        timer.start()
        try:
            assert process.stdout is not None
            text = process.stdout.read(-1 if limit_bytes is None else limit_bytes + 1)
            is_cut = limit_bytes is not None and len(text) > limit_bytes
            if is_cut:
                _kill(process)
            process.wait()
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            timer.cancel()
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        warnings = os.fsdecode(errors.read())
    command = f"git {next(word for word in arguments if not word.startswith('-'))}"
    if is_late.is_set():
        raise WanmaError(
            f"{command} in {folder} took longer than {GIT_TIMEOUT_SECONDS:.0f} s",
            "add large folders that are not code to .gitignore, or check the file system",
        )
    if process.returncode not in accepted_exit_codes and not is_cut:
        cause = warnings.strip() or f"exit code {process.returncode}"
        raise WanmaError(f"{command} failed in {folder}: {cause}", "correct the cause that git names")
    return GitOutput(text[:limit_bytes], warnings, is_cut)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT_VARIABLES)
    }
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
