"""Upgrade of a job file in place: old keys and values get their new names, and all else stays.

    changes = upgrade_file(Path("gpt.toml"))    # [Change(7, 'parallel.context → parallel.cp_method')]

The names come from `renamed_keys`, and their positions from the scanner of `key_lines`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanma.job.errors import JobError
from wanma.job.file.key_lines import Token
from wanma.job.file.parser import parse_tokens, read_text
from wanma.job.file.renamed_keys import Renaming, dotted_name, renamings, with_new_names

_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Change:
    """Renamed key or value of a file."""

    line: int
    text: str


def upgrade_file(path: Path, *, dry_run: bool = False) -> list[Change]:
    """Rewrite the TOML or YAML file of a job under the new names; return the changes, first line first.

    Comments, order, quotes, line ends and the file's mode stay. It is replaced as a whole or not at all; a
    read-only one is refused.

    Args:
        path: the file; its suffix says whether it is YAML.
        dry_run: only return the changes.

    Raises:
        JobError: the file cannot be read, parsed or written, or gives a key under both names.
    """
    read_text(path)  # for its errors; it changes line ends
    text, changes = upgraded(path.read_bytes().decode(), path)
    if changes and not dry_run:
        _replace(path, text)
    return changes


def upgraded(text: str, path: Path = Path("job.toml")) -> tuple[str, list[Change]]:
    """Return the text of a job file under the new names, and the changes.

    Args:
        text: text of the file.
        path: file that errors name; its suffix says whether the text is YAML.

    Raises:
        JobError: the text cannot be parsed, or gives a key under both names.
    """
    plain = text.removeprefix(_BYTE_ORDER_MARK).replace("\r\n", "\n")
    tables, tokens = parse_tokens(path, plain)
    try:
        renamed_keys, renamed = renamings(tables), with_new_names(tables)
    except RecursionError:  # a YAML anchor that holds itself
        raise JobError(f"{path} is nested too deeply to be a job file") from None
    _refuse_both(path, renamed_keys, tokens)
    edits = [edit for _, edit in sorted(_edits(renamed_keys, tokens).items())]
    changes = [Change(token.line, _described(renaming)) for token, renaming in edits]
    replacements = [(token, _quoted(plain[token.start : token.stop], renaming)) for token, renaming in edits]
    if not _reads_as(path, _with(plain, replacements), renamed):
        changes_text = "\n  ".join(f"{path}:{change.line}: {change.text}" for change in changes)
        raise JobError(f"{path} cannot be upgraded in place; change by hand:\n  {changes_text}")
    return _with(text, replacements), changes


def _refuse_both(path: Path, renamed_keys: Iterable[Renaming], tokens: Iterable[Token]) -> None:
    lines = {token.path: token.line for token in tokens if token.is_key}
    for renaming in renamed_keys:
        if not renaming.is_value and renaming.new_path in lines:
            raise JobError(
                f"{path}:{lines[renaming.path]}: {renaming}, and line {lines[renaming.new_path]} sets that "
                "key, too",
                f"remove one of the two lines, then run `wanma job --upgrade {shlex.quote(str(path))}` again",
            )


def _edits(
    renamed_keys: Iterable[Renaming], tokens: Iterable[Token]
) -> dict[tuple[int, int], tuple[Token, Renaming]]:
    """Return the renaming of each token that has an old name, by its position.

    A YAML alias repeats a token under other paths; the first is where the file has it.
    """
    renaming_by_path = {(renaming.path, not renaming.is_value): renaming for renaming in renamed_keys}
    edits: dict[tuple[int, int], tuple[Token, Renaming]] = {}
    for token in tokens:
        if (renaming := renaming_by_path.get((token.path, token.is_key))) is not None:
            edits.setdefault((token.start, token.stop), (token, renaming))
    return edits


def _described(renaming: Renaming) -> str:
    if renaming.is_value:
        old = renaming.old if renaming.old in ("true", "false") else f"'{renaming.old}'"
        return f"{dotted_name(renaming.new_path)}: {old} → '{renaming.new}'"
    return f"{renaming.old} → {renaming.new}"


def _quoted(old: str, renaming: Renaming) -> str:
    """Return the new name in the quotes of the old one; a word for a truth value gets some."""
    new = renaming.new if renaming.is_value else renaming.new.rpartition(".")[2]
    quote = old[0] if old[0] in "\"'" else ""
    if renaming.is_value and renaming.old in ("true", "false"):
        quote = '"'
    return f"{quote}{new}{quote}"


def _with(raw: str, replacements: Iterable[tuple[Token, str]]) -> str:
    """Return `raw` with tokens replaced; their positions count no byte order mark, and CRLF as one."""
    mark_length = len(raw) - len(raw.removeprefix(_BYTE_ORDER_MARK))
    crlf_positions: list[int] = []  # positions of the line ends that are CRLF, as tokens count them
    position = -1
    while (position := raw.find("\r\n", position + 1)) >= 0:
        crlf_positions.append(position - mark_length - len(crlf_positions))
    parts, last = [], 0
    for token, new in replacements:
        start, stop = (
            mark_length + offset + bisect_left(crlf_positions, offset) for offset in (token.start, token.stop)
        )
        parts += [raw[last:start], new]
        last = stop
    return "".join([*parts, raw[last:]])


def _reads_as(path: Path, text: str, tables: dict[str, Any]) -> bool:
    try:
        return parse_tokens(path, text)[0] == tables
    except JobError:
        return False


def _replace(path: Path, text: str) -> None:
    target = path.resolve()  # a link stays one
    try:
        if not (os.access(target, os.W_OK) and target.stat().st_mode & 0o222):  # the folder would allow it
            raise JobError(
                f"cannot write {path}: it is read-only", f"`chmod u+w {shlex.quote(str(path))}` first"
            )
        descriptor, name = tempfile.mkstemp(prefix=".wanma-", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
            shutil.copymode(target, temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
