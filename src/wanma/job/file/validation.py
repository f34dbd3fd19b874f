"""Validation errors of a job: each mistake with its location, the given value and the allowed values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from wanma.job.errors import JobError, closest_match, did_you_mean
from wanma.job.file.key_lines import KeyPath
from wanma.job.file.other_names import key_of_other_name
from wanma.job.file.renamed_keys import KEYS
from wanma.job.file.schema import TableSchema, schema_keys, schema_tables
from wanma.job.file.serialization import value_text
from wanma.job.sections.base import Section
from wanma.job.sections.job import Job


@dataclass
class KeySources:
    """Source location of each key of a job: a line of a file, or an override."""

    file: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def locate(self, path: KeyPath) -> tuple[int, str]:
        """Return (sort key, place) of `path` or its nearest parent.

        A place is 'gpt.toml:7' or 'override 1 on the command line'.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                location = self.overrides[path[:length]]
                return self._sort_key(location), location
            if path[:length] in self.lines:
                line = self.lines[path[:length]]
                return line, f"{self.file}:{line}"
            if length == len(path):
                nested_sources = [
                    location for key, location in self.overrides.items() if key[:length] == path
                ]
                if nested_sources:
                    return self._sort_key(nested_sources[0]), nested_sources[0]
        return 0, self.file

    def add_name(self, path: KeyPath, other: KeyPath) -> None:
        """Give a key a second path, at the place of `path`."""
        if path in self.lines:
            self.lines.setdefault(other, self.lines[path])
        if path in self.overrides:
            self.overrides.setdefault(other, self.overrides[path])

    def is_in_file(self, path: KeyPath) -> bool:
        """Return True if a line of the file gives `path`, and no override replaces it."""
        return path in self.lines and path not in self.overrides

    def _sort_key(self, override: str) -> int:
        """Return the sort key of an override: after every line of the file."""
        return 1_000_000_000 + list(self.overrides.values()).index(override)


@dataclass(frozen=True)
class ValidationIssue:
    """One validation error: key path, text, and hint."""

    path: KeyPath
    text: str
    hint: str = ""


def validation_error(
    issues: Iterable[ValidationIssue],
    sources: KeySources,
    subject: str = "the job",
    hint: str = "see all keys and their allowed values with `wanma job`",
) -> JobError:
    """Return all mistakes as one error, in the order of the file and then of the command line."""
    # A wrong element of a list is reported once, for the whole list.
    sorted_issues = sorted(dict.fromkeys(issues), key=lambda issue: sources.locate(issue.path)[0])
    lines = [
        f"{location}: {issue.text}" if (location := sources.locate(issue.path)[1]) else issue.text
        for issue in sorted_issues
    ]
    hints = list(dict.fromkeys(issue.hint for issue in sorted_issues if issue.hint))
    hint = "\n  ".join([*hints, hint])
    if len(lines) == 1:
        return JobError(lines[0], hint)
    return JobError(f"{subject} has {len(lines)} mistakes\n  " + "\n  ".join(lines), hint)


def issues_from_pydantic(
    error: ValidationError, given: dict[str, Any], root: type[Section] = Job
) -> list[ValidationIssue]:
    """Return the mistakes that validation found in the tables `given` of a file that `root` describes."""
    errors = error.errors(include_url=False)
    return [_issue_from_pydantic(item["type"], item["loc"], item["msg"], given, root) for item in errors]


def key_path_text(path: KeyPath) -> str:
    """Return a key path as text, such as 'data.sources[0].weight'."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _issue_from_pydantic(
    kind: str, path: KeyPath, message: str, tables: dict[str, Any], root: type[Section]
) -> ValidationIssue:
    if kind == "extra_forbidden":
        return ValidationIssue(path, _unknown_key_text(path, root))
    if kind == "value_error":  # a rule between keys of one section
        message = message.removeprefix("Value error, ")
        hint = ""
        if "exactly one" in message or "only one" in message:
            hint = "unset a key of the file with an empty override, e.g. `model.preset=`"
        return ValidationIssue(_named_key(path, message, tables), f"[{key_path_text(path)}] {message}", hint)
    names = tuple(part for part in path if isinstance(part, str))
    table = _find_table(".".join(names), root)
    if table is not None:
        return ValidationIssue(path, _not_a_table_text(path, table, kind, tables))
    depth = _depth(names, root)
    key = schema_keys(root)[".".join(names[:depth])]
    path = path[: _key_length(path, depth)]
    if kind == "missing" and _value(tables, path) is _ABSENT:
        return ValidationIssue(
            path, f"{key_path_text(path)} is missing ({key.help}): it must be {key.allowed}"
        )
    value = _value(tables, path)
    close = did_you_mean(str(value), key.choices) if isinstance(value, (str, bool)) else ""
    finite = ", and finite" if kind == "finite_number" else ""
    return ValidationIssue(
        path, f"{key_path_text(path)} = {value_text(value)}: must be {key.allowed}{finite}.{close}"
    )


def _named_key(path: KeyPath, message: str, tables: dict[str, Any]) -> KeyPath:
    """Return the path of the first key in `path` that `message` names and the job sets; else `path`."""
    candidates = ((*path, word) for word in re.findall(r"[a-z_]+", message))
    return next((key for key in candidates if _value(tables, key) is not _ABSENT), path)


def _unknown_key_text(path: KeyPath, root: type[Section]) -> str:
    *parent_path, name = path
    table_path = ".".join(part for part in parent_path if isinstance(part, str))
    name = str(name)
    if not table_path:
        headers = [table.header for table in schema_tables(root) if name in {key.name for key in table.keys}]
        other = key_of_other_name(name) if root is Job else None
        suggestion = f" Did you mean '{other}'?" if other else did_you_mean(name, root.model_fields)
        suggestion = suggestion or (f" It belongs in {headers[0]}." if headers else "")
        return f"unknown section '{name}'.{suggestion}" + (
            "" if suggestion else f" There are: {', '.join(root.model_fields)}."
        )
    prefix = f"{key_path_text(tuple(parent_path))}."
    if name in root.model_fields:
        return f"unknown key '{prefix}{name}'. [{name}] is a section of its own."
    former = KEYS if root is Job else {}
    tables = [table.path for table in schema_tables(root)]
    own = {
        old.rpartition(".")[2]: old
        for old in (*former, *schema_keys(root), *tables)
        if _section(old) == table_path
    }
    present = {key.name: key.path for key in reversed(schema_keys(root).values())}
    everywhere = {**{old.rpartition(".")[2]: old for old in former}, **present}
    if root is Job and name not in present and (other := key_of_other_name(name)) is not None:
        return f"unknown key '{prefix}{name}'. Did you mean '{other}'?"
    if name not in present and (close := closest_match(name, own)) is not None:
        key, table_matches = own[close], f"{prefix}{close}"
    elif (close := closest_match(name, everywhere, min_similarity=0.8)) is not None:
        key = table_matches = everywhere[close]
    else:
        return f"unknown key '{prefix}{name}'."
    suggestion = f"'{former[key]}', the new name of '{key}'" if key in former else f"'{table_matches}'"
    return f"unknown key '{prefix}{name}'. Did you mean {suggestion}?"


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def _not_a_table_text(path: KeyPath, table: TableSchema, kind: str, tables: dict[str, Any]) -> str:
    value = _value(tables, path)
    if kind == "missing" or value is _ABSENT:
        example = ' with, for example, preset = "gpt-10m"' if table.path == "model" else ""
        return f"the job has no {table.header} section; add one{example}"
    auto_text = ' or "auto"' if table.path == "parallel" else ""
    setting = f"{key_path_text(path)} = {value_text(value)}"
    return f"{setting}: must be a table, {table.header} with its keys below it{auto_text}."


def _find_table(path: str, root: type[Section]) -> TableSchema | None:
    return next((table for table in schema_tables(root) if table.path == path), None)


def _depth(names: tuple[str, ...], root: type[Section]) -> int:
    """Return the number of leading `names` that form a key; the rest lies in a free table (`arguments`)."""
    return next(depth for depth in range(len(names), 0, -1) if ".".join(names[:depth]) in schema_keys(root))


def _key_length(path: KeyPath, names: int) -> int:
    """Return the length of the prefix of `path` that holds `names` names: drops list positions in a value."""
    name_count = 0
    for length, part in enumerate(path, 1):
        name_count += isinstance(part, str)
        if name_count == names:
            return length
    return len(path)


_ABSENT = object()


def _value(value: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value
