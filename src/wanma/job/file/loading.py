"""Loading of a job: file and overrides to a validated `Job`, or to one error that lists every mistake.

    job = load_job(Path("gpt.toml"), ["train.steps=500", "parallel=auto"])

Values are taken as written: "300" is no number and 1 is no truth value. Dates become text.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wanma.job.errors import JobError
from wanma.job.file.key_lines import KeyPath
from wanma.job.file.parser import parse_config_file
from wanma.job.file.renamed_keys import KEYS, Renaming, dotted_name, renamings, with_new_names
from wanma.job.file.schema import schema_keys
from wanma.job.file.validation import (
    KeySources,
    ValidationIssue,
    issues_from_pydantic,
    key_path_text,
    validation_error,
)
from wanma.job.sections.base import Section
from wanma.job.sections.job import Job
from wanma.job.sections.observe import invalid_run_name_reason

_MAX_DEPTH = 32
_OVERRIDE = re.compile(r"([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)


def load_job(path: Path, overrides: Sequence[str] = (), override_source: str | None = None) -> Job:
    """Load the job of a TOML or YAML file and apply `overrides` ('train.steps=500') in order.

    A run without a name takes the name of the file. For `override_source` see `to_job`.

    Raises:
        JobError: the file cannot be read or parsed, or holds an invalid key or value.
    """
    path = Path(path)
    tables, lines = parse_config_file(path)
    return _named(_validate_job(tables, overrides, KeySources(str(path), lines), override_source), path)


def load_recorded_job(path: Path) -> Job:
    """Load the job.toml of a run directory; one that an older release wrote, under today's names.

    Raises:
        JobError: the file cannot be read or parsed, or holds an invalid key or value.
    """
    path = Path(path)
    tables, lines = parse_config_file(path)
    return _named(_validate_job(with_new_names(tables), (), KeySources(str(path), lines)), path)


def _named(job: Job, path: Path) -> Job:
    """Return the job with the file's name, if it has no name of its own."""
    if job.observe.name is None:
        if (reason := invalid_run_name_reason(path.stem)) is not None:
            raise JobError(
                f"{path}: observe.name is not set, and the job file's name, the default, {reason}",
                "set observe.name=NAME",
            )
        return job.model_copy(update={"observe": job.observe.model_copy(update={"name": path.stem})})
    return job


def to_job(
    value: Job | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    override_source: str | None = None,
    file: str = "",
) -> Job:
    """Build a `Job` from a value of the Python API: a job, nested mappings of its sections, or a path.

    Args:
        override_source: source of the overrides as errors name it, if it is not the end of the command line.
        file: name of the file that a mapping comes from, as errors name it.

    Raises:
        JobError: same causes as `load_job`.
    """
    if isinstance(value, str | Path):
        return load_job(Path(value), overrides, override_source)
    if isinstance(value, Job):
        if not overrides:
            return value
        value = value.model_dump(exclude_unset=True)  # unset keys stay open to the planner
    if not isinstance(value, Mapping):
        raise JobError(
            f"a job cannot be made from {type(value).__name__}",
            "give a Job, a mapping of sections such as {'model': {'preset': 'gpt-10m'}}, or a file's path",
        )
    return _validate_job(dict(value), overrides, KeySources(file), override_source)


@dataclass(frozen=True)
class Override:
    """Parsed `KEY=VALUE` of the command line; `unset` returns the key to its default."""

    path: tuple[str, ...]
    value: Any
    unset: bool = False


def parse_override(text: str) -> Override:
    """Parse 'train.steps=500': the value as a TOML literal, otherwise as text; empty unsets the key.

    A value `[a, b]` is a list of texts too, because shells remove the quotes of `["a", "b"]`.

    Raises:
        JobError: the text has no `KEY=`.
    """
    match = _OVERRIDE.fullmatch(text.strip())
    if match is None:
        raise JobError(
            f"'{text}' is not an override: expected KEY=VALUE, e.g. train.steps=500",
            "see all keys with `wanma job`",
        )
    path, raw = tuple(match[1].split(".")), match[2].strip()
    if not raw:
        return Override(path, None, unset=True)
    value = _parse_literal(raw)
    key = schema_keys().get(".".join(part for part in path if not part.isdigit()))
    if key is not None and key.is_text and not isinstance(value, str):
        value = raw  # a name such as 12 or 2026-01-01 stays text
    return Override(path, value)


def _parse_literal(raw: str) -> Any:
    try:
        value = tomllib.loads(f"value = {raw}")["value"] if "\n" not in raw else raw
    except (ValueError, RecursionError):  # ValueError: no TOML, or a number that is too long
        if raw.startswith("[") and raw.endswith("]") and not set(raw[1:-1]) & set("[]{}\"'"):
            return [_parse_literal(item.strip()) for item in raw[1:-1].split(",") if item.strip()]
        return raw
    return raw if isinstance(value, datetime.date | datetime.time) else value


def _validate_job(
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    sources: KeySources,
    override_source: str | None = None,
) -> Job:
    mistakes: list[ValidationIssue] = []
    values = to_json_value(tables, (), mistakes)
    values = {
        section: value for section, value in values.items() if value is not None
    }  # YAML's bare `train:`
    if values.get("parallel") == "auto":
        values["parallel"] = {"auto": True}
    for number, text in enumerate(overrides, 1):
        override = parse_override(text)
        source = override_source or f"override {number} on the command line"
        _apply_override(values, override, source, sources, mistakes)
    if mistakes:
        raise validation_error([*mistakes, *_old_names(values, sources)], sources)
    mistakes = _old_names(values, sources)
    values = with_new_names(values)
    try:
        # Strict mode through JSON accepts a list for a tuple, and still rejects true for 1.
        job = Job.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise validation_error([*mistakes, *issues_from_pydantic(error, values)], sources) from None
    if mistakes:
        raise validation_error(mistakes, sources)
    return job


def _old_names(values: dict[str, Any], sources: KeySources) -> list[ValidationIssue]:
    """Return a mistake for every old name; `sources` then has their places under the new names, too."""
    renamed_keys = renamings(values)
    renamed_keys += [  # an override that unsets a key leaves nothing in the tables
        Renaming(path, old, KEYS[old])
        for path in sources.overrides
        if (old := dotted_name(path)) in KEYS and all(path != renaming.path for renaming in renamed_keys)
    ]
    for renaming in renamed_keys:
        sources.add_name(renaming.path, renaming.new_path)
    upgrade = f"`wanma job --upgrade {shlex.quote(sources.file)}` rewrites the file"
    return [
        ValidationIssue(renaming.path, str(renaming), upgrade if sources.is_in_file(renaming.path) else "")
        for renaming in renamed_keys
    ]


def _apply_override(
    tables: dict[str, Any],
    override: Override,
    source: str,
    sources: KeySources,
    issues: list[ValidationIssue],
) -> None:
    """Write one override into the nested tables `tables`."""
    container: Any = tables
    path: KeyPath = ()
    for part in override.path[:-1]:
        step: str | int = int(part) if isinstance(container, list) and part.isdigit() else part
        path = (*path, step)
        if isinstance(container, dict):
            container = container.setdefault(part, {})
        elif isinstance(container, list) and isinstance(step, int) and step < len(container):
            container = container[step]
        else:
            break
    value = None if override.unset else to_json_value(override.value, override.path, issues)
    last = override.path[-1]
    name: str | int = int(last) if isinstance(container, list) and last.isdigit() else last
    sources.overrides[(*path, name)] = source
    if isinstance(container, dict):
        if override.unset:
            container.pop(last, None)
        elif override.path == ("parallel",) and override.value == "auto":
            axes = container.get(last)
            container[last] = {**(axes if isinstance(axes, dict) else {}), "auto": True}
        else:
            container[last] = value
    elif (
        isinstance(container, list) and isinstance(name, int) and name < len(container) and not override.unset
    ):
        container[name] = value
    else:
        issues.append(ValidationIssue((*path, name), f"there is no {'.'.join(override.path)} to set"))


def to_json_value(value: Any, path: KeyPath, issues: list[ValidationIssue]) -> Any:
    """Return `value` at `path` as JSON types; add values without a JSON form to `issues`.

    File contents and Python values are converted alike.
    """
    if len(path) > _MAX_DEPTH:
        issues.append(ValidationIssue(path[:2], f"{key_path_text(path[:2])} is nested too deeply"))
        return None
    match value:
        case Section():
            return to_json_value(value.model_dump(exclude_unset=True), path, issues)
        case Mapping():
            if invalid := [name for name in value if not isinstance(name, str)]:
                issues.append(
                    ValidationIssue(
                        path,
                        f'{key_path_text(path)}: the name {invalid[0]!r} must be text, "{invalid[0]}"',
                    )
                )
            return {
                name: to_json_value(item, (*path, name), issues)
                for name, item in value.items()
                if isinstance(name, str)
            }
        case list() | tuple():
            return [to_json_value(item, (*path, index), issues) for index, item in enumerate(value)]
        case bool() | int() | float():
            return value
        case None:
            if len(path) > 2:
                issues.append(ValidationIssue(path, f"{key_path_text(path)} is null: remove the key instead"))
            return None
        case Path():
            return str(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case str() if _invalid_text_reason(value) is None:
            return value
    problem = _invalid_text_reason(value) if isinstance(value, str) else f"of type {type(value).__name__}"
    issues.append(
        ValidationIssue(
            path, f"{key_path_text(path)} is {problem}; use text, numbers, true or false, lists and tables"
        )
    )
    return None


def _invalid_text_reason(text: str) -> str | None:
    if "\0" in text:
        return "text with a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "not valid text (UTF-8)"
    return None
