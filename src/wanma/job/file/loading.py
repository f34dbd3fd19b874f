"""Loading of a job: file and overrides to a validated `Job`, or to one error that lists every mistake.

    job = load_job(Path("gpt.toml"), ["train.steps=500", "parallel=auto"])

Values are taken as written: "300" is no number and 1 is no truth value. Dates become text.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wanma.job.errors import JobError
from wanma.job.file.key_lines import KeyPath
from wanma.job.file.parser import read_tables
from wanma.job.file.renamed_keys import KEYS, Renaming, dotted_name, renamings, with_new_names
from wanma.job.file.schema import keys
from wanma.job.file.validation import Mistake, Places, dotted, from_pydantic, refuse
from wanma.job.sections.base import Section
from wanma.job.sections.job import Job
from wanma.job.sections.observe import why_no_name

_DEEPEST = 32
_OVERRIDE = re.compile(r"([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Load the job of a TOML or YAML file and apply `overrides` ('train.steps=500') in order.

    A run without a name takes the name of the file.

    Raises:
        JobError: the file cannot be read or parsed, or holds an invalid key or value.
    """
    path = Path(path)
    tables, lines = read_tables(path)
    return _named(_build(tables, overrides, Places(str(path), lines)), path)


def load_recorded_job(path: Path) -> Job:
    """Load the job.toml of a run directory; one that an older release wrote, under today's names.

    Raises:
        JobError: the file cannot be read or parsed, or holds an invalid key or value.
    """
    path = Path(path)
    tables, lines = read_tables(path)
    return _named(_build(with_new_names(tables), (), Places(str(path), lines)), path)


def _named(job: Job, path: Path) -> Job:
    """Return the job with the file's name, if it has no name of its own."""
    if job.observe.name is None:
        if (wrong := why_no_name(path.stem)) is not None:
            raise JobError(
                f"{path}: a run without observe.name takes the job file's name, which {wrong}",
                "give it one: observe.name=NAME",
            )
        return job.model_copy(update={"observe": job.observe.model_copy(update={"name": path.stem})})
    return job


def job_from(
    value: Job | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), told_by: str | None = None
) -> Job:
    """Build a `Job` from a value of the Python API: a job, nested mappings of its sections, or a path.

    Args:
        told_by: source of the overrides as errors name it, if it is not the end of the command line.

    Raises:
        JobError: same causes as `load_job`.
    """
    if isinstance(value, str | Path):
        return load_job(Path(value), overrides)
    if isinstance(value, Job):
        if not overrides:
            return value
        value = value.model_dump(exclude_unset=True)  # unset keys stay open to the planner
    if not isinstance(value, Mapping):
        raise JobError(
            f"a job cannot be made from {type(value).__name__}",
            "give a Job, a mapping of sections such as {'model': {'preset': 'gpt-10m'}}, or a file's path",
        )
    return _build(dict(value), overrides, Places(), told_by)


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
            "`wanma job` lists every key",
        )
    path, raw = tuple(match[1].split(".")), match[2].strip()
    if not raw:
        return Override(path, None, unset=True)
    value = _literal(raw)
    key = keys().get(".".join(part for part in path if not part.isdigit()))
    if key is not None and key.text and not isinstance(value, str):
        value = raw  # a name such as 12 or 2026-01-01 stays text
    return Override(path, value)


def _literal(raw: str) -> Any:
    try:
        value = tomllib.loads(f"value = {raw}")["value"] if "\n" not in raw else raw
    except (ValueError, RecursionError):  # ValueError: no TOML, or a number that is too long
        if raw.startswith("[") and raw.endswith("]") and not set(raw[1:-1]) & set("[]{}\"'"):
            return [_literal(item.strip()) for item in raw[1:-1].split(",") if item.strip()]
        return raw
    return raw if isinstance(value, datetime.date | datetime.time) else value


def _build(
    tables: Mapping[str, Any], overrides: Sequence[str], places: Places, told_by: str | None = None
) -> Job:
    mistakes: list[Mistake] = []
    given = plain(tables, (), mistakes)
    given = {section: value for section, value in given.items() if value is not None}  # YAML's bare `train:`
    if given.get("parallel") == "auto":
        given["parallel"] = {"auto": True}
    for number, text in enumerate(overrides, 1):
        override = parse_override(text)
        place = told_by or f"override {number} on the command line"
        _apply(given, override, place, places, mistakes)
    if mistakes:
        raise refuse([*mistakes, *_old_names(given, places)], places)
    mistakes = _old_names(given, places)
    given = with_new_names(given)
    try:
        # Strict mode through JSON accepts a list for a tuple, and still rejects true for 1.
        job = Job.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise refuse([*mistakes, *from_pydantic(error, given)], places) from None
    if mistakes:
        raise refuse(mistakes, places)
    return job


def _old_names(given: dict[str, Any], places: Places) -> list[Mistake]:
    """Return a mistake for every old name; `places` then has their places under the new names, too."""
    found = renamings(given)
    found += [  # an override that unsets a key leaves nothing in the tables
        Renaming(path, old, KEYS[old])
        for path in places.overrides
        if (old := dotted_name(path)) in KEYS and all(path != one.path for one in found)
    ]
    for one in found:
        places.add_name(one.path, one.new_path)
    upgrade = f"`wanma job --upgrade {places.file}` rewrites the file"
    return [Mistake(one.path, str(one), upgrade if places.is_in_file(one.path) else "") for one in found]


def _apply(
    given: dict[str, Any], override: Override, place: str, places: Places, mistakes: list[Mistake]
) -> None:
    """Write one override into the nested tables `given`."""
    holder: Any = given
    path: KeyPath = ()
    for part in override.path[:-1]:
        step: str | int = int(part) if isinstance(holder, list) and part.isdigit() else part
        path = (*path, step)
        if isinstance(holder, dict):
            holder = holder.setdefault(part, {})
        elif isinstance(holder, list) and isinstance(step, int) and step < len(holder):
            holder = holder[step]
        else:
            break
    value = plain(override.value, override.path, mistakes)
    last = override.path[-1]
    name: str | int = int(last) if isinstance(holder, list) and last.isdigit() else last
    places.overrides[(*path, name)] = place
    if isinstance(holder, dict):
        if override.unset:
            holder.pop(last, None)
        elif override.path == ("parallel",) and override.value == "auto":
            axes = holder.get(last)
            holder[last] = {**(axes if isinstance(axes, dict) else {}), "auto": True}
        else:
            holder[last] = value
    elif isinstance(holder, list) and isinstance(name, int) and name < len(holder) and not override.unset:
        holder[name] = value
    else:
        mistakes.append(Mistake((*path, name), f"there is no {'.'.join(override.path)} to set"))


def plain(value: Any, path: KeyPath, mistakes: list[Mistake]) -> Any:
    """Return `value` at `path` as JSON types; add values without a JSON form to `mistakes`.

    File contents and Python values are converted alike.
    """
    if len(path) > _DEEPEST:
        mistakes.append(Mistake(path[:2], f"{dotted(path[:2])} is nested too deeply"))
        return None
    match value:
        case Section():
            return plain(value.model_dump(exclude_unset=True), path, mistakes)
        case Mapping():
            if wrong := [name for name in value if not isinstance(name, str)]:
                mistakes.append(
                    Mistake(path, f'{dotted(path)}: the name {wrong[0]!r} must be text, "{wrong[0]}"')
                )
            return {
                name: plain(item, (*path, name), mistakes)
                for name, item in value.items()
                if isinstance(name, str)
            }
        case list() | tuple():
            return [plain(item, (*path, index), mistakes) for index, item in enumerate(value)]
        case bool() | int() | float():
            return value
        case None:
            if len(path) > 2:
                mistakes.append(Mistake(path, f"{dotted(path)} is null: leave the key out instead"))
            return None
        case Path():
            return str(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case str() if _why_no_text(value) is None:
            return value
    what = _why_no_text(value) if isinstance(value, str) else f"of type {type(value).__name__}"
    mistakes.append(
        Mistake(path, f"{dotted(path)} is {what}; use text, numbers, true or false, lists and tables")
    )
    return None


def _why_no_text(text: str) -> str | None:
    if "\0" in text:
        return "text with a NUL character, which no path and no name can have"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "not valid text (UTF-8)"
    return None
