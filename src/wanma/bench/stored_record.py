"""JSON of the dataclasses that a result consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

Lower = Annotated[float, BeforeValidator(lambda value: -math.inf if value is None else value)]
Upper = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""Bounds that may be infinite, which is null in JSON."""


class StoredRecord:
    """Base of dataclasses that are stored as JSON objects of their fields."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields; an infinite number is null."""
        return asdict(self, dict_factory=_entries)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote; unknown keys are ignored.

        Raises:
            ValueError: a field is missing, or of another type.
        """
        try:
            record: Self = _adapter(cls).validate_python(content)  # type: ignore[arg-type]  # type[Self]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return record


@cache
def _adapter(kind: type[StoredRecord]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _entries(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _entry(value) for name, value in items}


def _entry(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, tuple):
        return [_entry(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value
