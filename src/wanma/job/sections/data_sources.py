"""Tables `[[data.sources]]` and `[data.columns]` of a job file: sources of data, fields of their records."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import CREDENTIALS_HINT, has_secret

DataKind = Literal["text", "images", "table", "factory"]
"""Kind of the samples of a source."""


def _refuse_secrets(locations: list[str]) -> list[str]:
    for location in locations:
        if has_secret(location):  # not repeated in the message
            raise ValueError(f"a URL holds a password or key, which records would show; {CREDENTIALS_HINT}")
    return locations


TextList = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
    AfterValidator(_refuse_secrets),
]
"""List of texts; a single text is a list of one."""


class ColumnsSection(Section):
    """Fields of records by their use; 'meta.text' is the field `text` of the object `meta`."""

    text: str | None = Field(None, min_length=1, description="field of the text; one document a record")
    tokens: str | None = Field(None, min_length=1, description="field of the token ids, in place of a text")
    messages: str | None = Field(
        None,
        min_length=1,
        description="field of a conversation, a list of {role, content}: rendered by the tokenizer's chat "
        "template; only the answers of the assistant are targets",
    )
    image: str | None = Field(None, min_length=1, description="field of the image; unset: found by content")
    target: str | None = Field(
        None, min_length=1, description="field of the class of an image, or of the target of a table's row"
    )
    features: TextList = Field(
        default_factory=list,
        description="fields of numbers that are the input of an own model, in this order, float32; 'x*' "
        "names several",
    )
    target_type: Literal["class", "number"] | None = Field(
        None,
        description="target of a table's row: class (int64, counted from 0) or number (float32); unset: "
        "number if one among those sampled has a fraction",
    )

    @property
    def kind(self) -> DataKind | None:
        """Kind of the samples by the fields that are named; None: they tell none."""
        if self.text or self.tokens or self.messages:
            return "text"
        if self.image:
            return "images"
        return "table" if self.features else None

    @model_validator(mode="after")
    def _check_one_kind(self) -> ColumnsSection:
        given = [name for name in ("text", "tokens", "messages", "image", "features") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"columns names {' and '.join(given)}; a source gives one of them")
        if self.target and self.kind == "text":
            raise ValueError(f"columns.target has no effect: {given[0]} has its targets in itself")
        if self.features and not self.target:
            raise ValueError("columns.features needs columns.target")
        if self.target_type and not self.features:
            raise ValueError("columns.target_type is of columns.features alone")
        return self


class EntriesSection(Section):
    """Stored data of one kind, or a program that makes samples."""

    path: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs of any format; `text` and `images` are short for a path "
        "with its kind",
    )
    kind: Literal["text", "images", "table"] | None = Field(
        None, description="kind of the samples of `path`; unset: by `columns`, else by the content"
    )
    format: str | None = Field(
        None,
        min_length=1,
        description="format of all its files, such as 'jsonl'; unset: found by the content",
    )
    columns: ColumnsSection = Field(default_factory=ColumnsSection, description="fields of its records")
    text: TextList = Field(default_factory=list, description="as `data.text`")
    images: TextList = Field(default_factory=list, description="as `data.images`")
    factory: str | None = Field(None, description="as `data.factory`")

    @property
    def entries(self) -> list[str]:
        """Files, folders, globs and URLs of the source; none: a program, a mixture, or no data."""
        return self.path or self.images or self.text

    @property
    def entries_key(self) -> str:
        """Key that gives the entries."""
        return "path" if self.path else "images" if self.images else "text"

    @property
    def content(self) -> DataKind | None:
        """Kind of the samples; None: there are none. A path that nothing tells the kind of is text."""
        if self.factory is not None:
            return "factory"
        if self.images or self.text:
            return "images" if self.images else "text"
        return (self.kind or self.columns.kind or "text") if self.path else None

    @property
    def is_open_kind(self) -> bool:
        """True if only its content tells the kind of a path."""
        return bool(self.path) and self.kind is None and self.columns.kind is None

    @model_validator(mode="after")
    def _check_kind(self) -> EntriesSection:
        told: dict[str, str | None] = {"kind": self.kind, "columns": self.columns.kind}
        given = [name for name in ("text", "images", "factory") if getattr(self, name)]
        told |= {name: name for name in given if len(given) == 1}
        if len({kind for kind in told.values() if kind}) > 1:
            shown = ", ".join(f"{key} says {kind}" for key, kind in told.items() if kind)
            raise ValueError(f"the kind of the data is contradictory: {shown}")
        if self.columns.kind == "text" and getattr(self, "text_field", None) not in (None, "text"):
            raise ValueError("text_field is short for columns.text or columns.tokens; give one of them")
        if self.kind == "table" and not self.columns.features:
            raise ValueError("kind = 'table' needs columns.features and columns.target")
        for key in ("kind", "format"):
            if getattr(self, key) and not self.entries:
                raise ValueError(f"{key} has no effect: it needs path, text or images")
        return self


_KIND_KEYS: dict[DataKind, tuple[str, ...]] = {
    "text": ("text_field",),
    "images": ("image_field", "label_field", "class_names"),
    "factory": ("arguments",),
}
"""Keys of a source that are of one kind alone."""


class _NamedSection(Section):
    name: str = Field(description="name in reports")


class SourceSection(EntriesSection, _NamedSection):
    """One source of a weighted mixture."""

    text: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs, as `data.text`; 'stdlib': Python's own source",
    )
    text_field: str | None = Field(None, description="field of its records; default: `data.text_field`")
    images: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs, as `data.images`",
    )
    image_field: str | None = Field(
        None, description="field of the image; default: `data.image_transform.image_field`"
    )
    label_field: str | None = Field(
        None, description="field of the class; default: `data.image_transform.label_field`"
    )
    class_names: list[str] = Field(
        default_factory=list,
        description="names of classes that are numbers in the records, in order from 0; sources of images "
        "have the classes of one name in common",
    )
    factory: str | None = Field(
        None, description="'package.module:function' returning a map-style dataset, as `data.factory`"
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    weight: Annotated[float, Field(gt=0, le=1e12)] | list[tuple[int, float]] = Field(
        1.0,
        description="share of samples, relative to the other sources; or [[samples, weight], ...]: weight "
        "from so many consumed samples on (curriculum)",
    )

    @model_validator(mode="after")
    def _check_one_kind(self) -> SourceSection:
        given = [name for name in ("path", "text", "images", "factory") if getattr(self, name)]
        if len(given) != 1:
            shown = " and ".join(given) or "none"
            raise ValueError(
                f"the source '{self.name}' needs one of path, text, images, factory (given: {shown})"
            )
        for kind, names in _KIND_KEYS.items():
            for name in names:
                if kind != self.content and not self.is_open_kind and getattr(self, name):
                    raise ValueError(f"{name} has no effect: the source '{self.name}' holds {self.content}")
        if duplicates := sorted({one for one in self.class_names if self.class_names.count(one) > 1}):
            raise ValueError(f"class_names has {', '.join(duplicates)} twice")
        return self

    @model_validator(mode="after")
    def _check_weight_stages(self) -> SourceSection:
        if not isinstance(self.weight, list):
            return self
        starts = [first for first, _ in self.weight]
        if not starts or starts[0] != 0:
            raise ValueError(f"weight must begin with sample 0 (given: {starts})")
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)) or starts[-1] > 2**62:
            raise ValueError(f"the samples of weight must rise, up to 2**62 (given: {starts})")
        weights = [weight for _, weight in self.weight]
        if not all(0 <= weight <= 1e12 for weight in weights) or not any(weights):
            raise ValueError(f"each weight must be from 0 to 1e12, and one above 0 (given: {weights})")
        return self
