"""Tables `[[data.sources]]` and `[data.columns]` of a job file: sources of data, fields of their records."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import CREDENTIALS_HINT, has_secret

DataKind = Literal["text", "images", "table", "interactions", "factory"]
"""Kind of the samples of a source."""


def _refuse_secrets(locations: list[str]) -> list[str]:
    for location in locations:
        if has_secret(location):  # not repeated in the message
            raise ValueError(f"a URL holds a password or key, which records would show; {CREDENTIALS_HINT}")
    return locations


InteractionRole = Literal["user", "item", "rating", "time"]
"""Use of a field of interactions."""
SYNTHETIC_LOG = "synthetic:"
"""Beginning of a path that stands for interactions made by wanma."""

TextList = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
    AfterValidator(_refuse_secrets),
]
"""List of texts; a single text is a list of one."""


class ColumnsSection(Section):
    """Fields of records by their use; 'meta.text' is the field `text` of the object `meta`."""

    text: str | None = Field(
        None, min_length=1, description="field of the text; one document a record; unset: 'text'"
    )
    tokens: str | None = Field(None, min_length=1, description="field of the token ids, in place of a text")
    messages: str | None = Field(
        None,
        min_length=1,
        description="field of a conversation, a list of {role, content}: rendered by the tokenizer's chat "
        "template; only the answers of the assistant are targets",
    )
    image: str | None = Field(None, min_length=1, description="field of the image; unset: found by content")
    target: str | None = Field(
        None,
        min_length=1,
        description="field of the class of an image, such as 'json.label', unset: found by name; or field of "
        "the target of a table's row",
    )
    features: TextList = Field(
        default_factory=list,
        description="fields of numbers that are the input of an own model, in this order, float32; 'x*' "
        "names several",
    )
    target_type: Literal["class", "number"] | None = Field(
        None,
        description="target of a table's row: class (int64, counted from 0) or number (float32); unset: "
        "number if one among those sampled has a fraction; whole numbers of a CSV that do not count from 0 "
        "need it",
    )
    user: str | None = Field(
        None,
        min_length=1,
        description="interactions: field of the user's id, an integer from 0; unset: 'user', and in files "
        "without a header the first",
    )
    item: str | None = Field(
        None, min_length=1, description="interactions: field of the item's id; unset: 'item', or the second"
    )
    rating: str | None = Field(
        None,
        min_length=1,
        description="interactions: field of the rating or click; unset: 'rating', or the third",
    )
    time: str | None = Field(
        None,
        description="interactions: field of the time, for `data.interactions.split` = 'leave_last' and "
        "'time'; unset: 'time', or the fourth; empty: rows are in the order of time",
    )
    sparse: TextList = Field(
        default_factory=list,
        description="interactions: fields of further ids: an integer, a list of them, or a text such as "
        "'3|17'",
    )
    dense: TextList = Field(default_factory=list, description="interactions: fields of numbers")

    @property
    def kind(self) -> DataKind | None:
        """Kind of the samples by the fields that are named; None: they tell none."""
        if self.text or self.tokens or self.messages:
            return "text"
        if self.image:
            return "images"
        if self._interaction_keys:
            return "interactions"
        return "table" if self.features else None

    @property
    def _interaction_keys(self) -> list[str]:
        names = (*get_args(InteractionRole), "sparse", "dense")
        return [name for name in names if getattr(self, name) or (name == "time" and self.time == "")]

    @property
    def table_names(self) -> list[str]:
        """Names of the embedding tables of interactions, in their order."""
        return [self.table_name("user"), self.table_name("item"), *self.sparse]

    def table_name(self, role: InteractionRole) -> str:
        """Return the name of the embedding table of a role: that of its field, or the role's where unset."""
        name: str = getattr(self, role) or role
        return name

    @model_validator(mode="after")
    def _check_ids(self) -> ColumnsSection:
        names = self.table_names
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"fields of ids must differ (given twice: {', '.join(duplicates)})")
        if dotted := [name for name in names if "." in name or not name]:
            raise ValueError(f"the field {dotted[0]!r} cannot name an embedding table: rename it")
        return self

    @model_validator(mode="after")
    def _check_one_kind(self) -> ColumnsSection:
        given = [name for name in ("text", "tokens", "messages", "image", "features") if getattr(self, name)]
        given += self._interaction_keys[:1]
        if len(given) > 1:
            raise ValueError(f"columns names {' and '.join(given)}; a source gives one of them")
        if self.target and self.kind == "interactions":
            raise ValueError(f"columns.target has no effect beside {given[0]}: the target is columns.rating")
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
        "with its kind; interactions may be 'synthetic:USERSxITEMSxROWS'",
    )
    kind: Literal["text", "images", "table", "interactions"] | None = Field(
        None,
        description="kind of the samples of `path`; unset: by `columns`, interactions of a recommender, else "
        "by the content",
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
        return (self._stated_kind or "text") if self.path else None

    @property
    def is_open_kind(self) -> bool:
        """True if only its content tells the kind of a path."""
        return bool(self.path) and self._stated_kind is None

    @property
    def _stated_kind(self) -> DataKind | None:
        is_synthetic = any(entry.startswith(SYNTHETIC_LOG) for entry in self.path)
        return self.kind or self.columns.kind or ("interactions" if is_synthetic else None)

    @model_validator(mode="after")
    def _check_kind(self) -> EntriesSection:
        told: dict[str, str | None] = {"kind": self.kind, "columns": self.columns.kind}
        given = [name for name in ("text", "images", "factory") if getattr(self, name)]
        told |= {name: name for name in given if len(given) == 1}
        if len({kind for kind in told.values() if kind}) > 1:
            shown = ", ".join(f"{key} says {kind}" for key, kind in told.items() if kind)
            raise ValueError(f"the kind of the data is contradictory: {shown}")
        if self.kind == "table" and not self.columns.features:
            raise ValueError("kind = 'table' needs columns.features and columns.target")
        for key in ("kind", "format"):
            if getattr(self, key) and not self.entries:
                raise ValueError(f"{key} has no effect: it needs path, text or images")
        return self


_KIND_KEYS: dict[DataKind, tuple[str, ...]] = {
    "images": ("class_names",),
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
    images: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs, as `data.images`",
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
