"""Serialization of a job to TOML, its hash, and the differences between two jobs."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from wanma.job.errors import JobError
from wanma.job.file.schema import schema_tables
from wanma.job.sections.base import Section
from wanma.job.sections.job import Job

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def job_to_toml(job: Job) -> str:
    """Return the complete job as TOML, defaults included; `load_job` of it gives an equal job.

    Unset keys are left out, and so are keys of `[parallel]` that `auto` leaves open: a size that is written
    is a size that is fixed.

    Raises:
        JobError: a value in `arguments` has no TOML form.
    """
    blocks = []
    for table in schema_tables():
        if table.is_of_entry:
            continue  # written as a value of the entry
        section, *inner = table.path.split(".")
        tables = reduce(getattr, inner, getattr(job, section))
        if inner and not table.is_repeated and tables == type(tables)():
            continue  # an engine that is not used
        for table_values in tables if table.is_repeated else [tables]:
            lines = [table.header]
            for key in table.keys:
                value = getattr(table_values, key.name)
                is_open = section == "parallel" and job.parallel.auto
                if is_open and key.name not in table_values.model_fields_set:
                    continue
                if value is None or (f"{table.path}.{key.name}" in _repeated_tables() and value):
                    continue
                lines.append(f"{key.name} = {toml_value(value, key.path)}")
            if table.is_repeated:
                lines += [
                    f"{name} = {toml_value(value)}"
                    for name, value in table_values
                    if isinstance(value, Section) and value != type(value)()
                ]
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def toml_value(value: Any, key: str = "") -> str:
    """Return one value as a TOML literal on one line.

    Raises:
        JobError: the value has no TOML form; the message names `key`.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value)) if math.isfinite(value) else str(float(value))
        case str():
            return _string(value, key)
        case list() | tuple():
            return f"[{', '.join(toml_value(item, key) for item in value)}]"
        case Mapping():
            pairs = (
                f"{_name(name, key)} = {toml_value(item, f'{key}.{name}')}" for name, item in value.items()
            )
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
        case Section():
            return toml_value(value.model_dump(exclude_unset=True, exclude_none=True), key)
    raise JobError(
        f"{key} = {value!r}: a job file cannot hold a value of type {type(value).__name__}",
        "use text, numbers, true or false, lists and tables; remove a key instead of setting it to null",
    )


def value_text(value: Any) -> str:
    """Return a value as the user would write it in a job, cut to 60 characters; 'unset' for None."""
    try:
        text = "unset" if value is None else toml_value(value)
    except JobError:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def job_hash(job: Job) -> str:
    """Return the hash of a job, 16 hexadecimal digits: equal for equal jobs on every machine."""
    return _hash_json(job.model_dump(mode="json"))


def job_differences(old: Job, new: Job) -> list[tuple[str, Any, Any]]:
    """Return (key, value in `old`, value in `new`) of each key that differs, in the order of the job file."""
    return [
        (f"{section}.{key}", getattr(getattr(old, section), key), getattr(getattr(new, section), key))
        for section in Job.model_fields
        for key in type(getattr(old, section)).model_fields
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]


def setting_texts(job: Job) -> dict[str, str]:
    """Return the keys of a job with their values, each as the user would write it."""
    return {
        f"{section}.{key}": value_text(getattr(getattr(job, section), key))
        for section in Job.model_fields
        for key in type(getattr(job, section)).model_fields
    }


def _repeated_tables() -> set[str]:
    return {table.path for table in schema_tables() if table.is_repeated}


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _name(name: Any, key: str) -> str:
    if not isinstance(name, str):
        raise JobError(f"{key}: the name {name!r} of an entry must be text", f'write it as "{name}"')
    return name if _BARE_KEY.fullmatch(name) else _string(name, key)


def _string(value: str, key: str) -> str:
    """Return a TOML string: JSON's escapes are TOML's, except that TOML also requires DEL to be escaped."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise JobError(f"{key} = {value!r}: is not valid text (UTF-8)") from error
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
