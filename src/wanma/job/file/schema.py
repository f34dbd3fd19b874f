"""Schema of the job file as data: every table and key with its type, bounds, default and help.

It is derived from the typed sections, so that errors, `wanma job`, the documentation and completion cannot
disagree with the accepted input.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic.fields import FieldInfo

from wanma.job.sections.base import Section
from wanma.job.sections.job import Job

_BOUNDS: tuple[tuple[type, str, str], ...] = (
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Lt, "lt", "<"),
    (annotated_types.Le, "le", "<="),
)


@dataclass(frozen=True)
class KeySchema:
    """Schema of one key of the job file."""

    path: str
    """Dotted path without list positions, such as 'train.steps' or 'data.sources.weight'."""
    allowed: str
    """Allowed values as text, to follow "must be": 'a number >= 0 and < 1'."""
    choices: tuple[str, ...]
    """Values of an enumeration, as written on the command line; empty for any other type."""
    is_text: bool
    """True if the value is one text, so that an override for it is never read as a number."""
    is_required: bool
    default: Any
    help: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class TableSchema:
    """Schema of one table: `[train]`, one inside it, `[cluster.slurm]`, or a repeated `[[data.sources]]`."""

    path: str
    is_repeated: bool
    help: str
    keys: tuple[KeySchema, ...]
    is_of_entry: bool = False
    """True if the table lies in each entry of a repeated one, as `[data.sources.columns]`."""

    @property
    def header(self) -> str:
        return f"[[{self.path}]]" if self.is_repeated else f"[{self.path}]"


@functools.cache
def schema_tables(root: type[Section] = Job) -> tuple[TableSchema, ...]:
    """Return every table that `root` describes, in file order; a repeated table follows its section."""
    hints = get_type_hints(root)
    lists = {name: _repeated_section(hints[name]) for name in root.model_fields}
    return tuple(
        table
        for name, repeated in lists.items()
        for table in _walk_sections(name, repeated or hints[name], is_repeated=repeated is not None)
    )


@functools.cache
def schema_keys(root: type[Section] = Job) -> dict[str, KeySchema]:
    """Return every key that `root` describes, by its dotted path."""
    return {key.path: key for table in schema_tables(root) for key in table.keys}


def _walk_sections(
    path: str, section: type[Section], *, is_repeated: bool, is_of_entry: bool = False
) -> Iterator[TableSchema]:
    hints = {name: hint for name, hint in get_type_hints(section).items() if name in section.model_fields}
    yield TableSchema(
        path=path,
        is_repeated=is_repeated,
        help=(section.__doc__ or "").strip(),
        keys=tuple(
            _key_schema(f"{path}.{name}", hints[name], field)
            for name, field in section.model_fields.items()
            if not _is_section(hints[name])
        ),
        is_of_entry=is_of_entry,
    )
    for name, hint in hints.items():
        repeated = _repeated_section(hint)
        if repeated is not None or _is_section(hint):
            yield from _walk_sections(
                f"{path}.{name}",
                repeated or hint,
                is_repeated=repeated is not None,
                is_of_entry=is_of_entry or is_repeated,
            )


def _key_schema(path: str, hint: Any, field: FieldInfo) -> KeySchema:
    required_hint = _without_none(hint)
    return KeySchema(
        path=path,
        allowed=_allowed_text(required_hint, field),
        choices=_choices(required_hint),
        is_text=required_hint is str,
        is_required=field.is_required(),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        help=field.description or "",
    )


def _without_none(hint: Any) -> Any:
    """Return the type inside an optional type."""
    inner = [member for member in _union(hint) if member is not type(None)]
    return inner[0] if len(inner) == 1 else hint


def _union(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type; empty for any other type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()


def _repeated_section(hint: Any) -> type[Section] | None:
    arguments = get_args(hint)
    if get_origin(hint) is list and _is_section(arguments[0]):
        return arguments[0]
    return None


def _is_section(hint: Any) -> TypeGuard[type[Section]]:
    return isinstance(hint, type) and issubclass(hint, Section)


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    if _union(hint):
        return tuple(choice for member in _union(hint) for choice in _choices(member))
    return tuple(str(value) for value in get_args(hint)) if get_origin(hint) is Literal else ()


def _allowed_text(hint: Any, field: FieldInfo) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(_choices(hint))
    if _union(hint):
        return ", or ".join(_allowed_text(*_with_bounds(member)) for member in get_args(field.annotation))
    if _repeated_section(hint):
        return "a list of tables"
    if get_origin(hint) is list:
        minimum_text = (
            " (at least one)" if any(isinstance(m, annotated_types.MinLen) for m in field.metadata) else ""
        )
        inner, inner_field = _with_bounds(get_args(field.annotation)[0])
        items_text = re.sub(r"^a ((?:whole )?number)", r"\1s", _allowed_text(inner, inner_field))
        return f"a list of {_type_text(inner) if get_origin(inner) is Literal else items_text}{minimum_text}"
    bounds = [
        f"{comparison} {_bound_text(getattr(m, name))}"
        for kind, name, comparison in _BOUNDS
        for m in field.metadata
        if isinstance(m, kind)
    ]
    noun = _type_text(hint)
    article = "a " if noun in ("whole number", "number", "table") else ""
    return f"{article}{noun} {' and '.join(bounds)}".rstrip()


def _bound_text(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.12g}"


def _with_bounds(hint: Any) -> tuple[Any, FieldInfo]:
    """Return the type of one union member and its field with bounds."""
    field = FieldInfo.from_annotation(hint)
    return field.annotation, field


def _type_text(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type_text(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return f"[{', '.join(_type_text(inner) for inner in get_args(hint))}]"
    if get_origin(hint) is list:
        return f"[{_type_text(get_args(hint)[0])}, ...]"
    if get_origin(hint) is dict:
        return "table"
    if get_origin(hint) is Literal:
        return " or ".join(_choices(hint))
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[hint]
