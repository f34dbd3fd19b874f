"""Small files that commands of a suite name, such as their scripts, and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wanma.bench.programs.contender import Contender
from wanma.job.errors import EXIT_USAGE, WanmaError

MAX_HASHED_BYTES = 1 << 22


def file_hashes(contender: Contender, placed: Contender, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of small files that a command names, by the word of the command.

    Args:
        contender: contender with its words.
        placed: the same as it runs on this machine.
        folder: folder of the suite.
    """
    found = {}
    for word, text in zip(contender.command[1:], placed.command[1:], strict=True):
        if digest := _hash(text, folder):
            found[word] = digest
    return found


def check_files(
    expected: Mapping[str, str],
    contenders: Sequence[Contender],
    placed: Sequence[Contender],
    folder: Path,
    warn: Callable[[str], None],
) -> None:
    """Check that the files of commands are there before they run again; a changed one is named.

    Args:
        expected: hashes by word of a command, as they were measured.
        contenders: contenders with their words.
        placed: the same as they run on this machine.
        folder: folder of the suite.
        warn: receives a line about a changed file.

    Raises:
        WanmaError: a file is missing.
    """
    pairs = [
        pair
        for one, other in zip(contenders, placed, strict=True)
        for pair in zip(one.command[1:], other.command[1:], strict=True)
    ]
    for word, text in dict.fromkeys(pairs):
        if word not in expected:
            continue
        digest = _hash(text, folder)
        if not digest:
            raise WanmaError(
                f"the command names {word}, and there is no file {text} in {Path.cwd()}",
                "run it again where the files of the suite are: in the folder in which it was measured",
                EXIT_USAGE,
            )
        if digest != expected[word]:
            warn(f"{word} has changed since it was measured")


def _hash(text: str, folder: Path) -> str:
    """Return the hash of a small file; empty: the text names none."""
    for path in (Path(text), folder / text):
        try:
            if path.is_file() and path.stat().st_size <= MAX_HASHED_BYTES:
                return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:  # a word that is no path: too long, say
            continue
    return ""
