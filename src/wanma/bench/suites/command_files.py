"""Small files that commands of a suite name, such as their scripts, and their hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from wanma.bench.programs.contender import Contender

MAX_HASHED_BYTES = 1 << 22


def file_hashes(contender: Contender, placed: Contender, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of small files that a command names, by the word of the command."""
    found = {}
    for word, text in zip(contender.command[1:], placed.command[1:], strict=True):
        if digest := _hash(text, folder):
            found[word] = digest
    return found


def _hash(text: str, folder: Path) -> str:
    """Return the hash of a small file; empty: the text names none."""
    for path in (Path(text), folder / text):
        try:
            if path.is_file() and path.stat().st_size <= MAX_HASHED_BYTES:
                return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:  # a word that is no path: too long, say
            continue
    return ""
