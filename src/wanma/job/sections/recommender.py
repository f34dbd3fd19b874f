"""Sections of recommenders: `[model.recommender]` and `[data.interactions]`, and the sizes of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section

Width = Annotated[int, Field(gt=0, le=10_000_000)]


class RecommenderSection(Section):
    """Recommender: embedding tables, widths and objective; unset: those of the preset or the data."""

    tables: dict[str, Annotated[int, Field(gt=0, le=1 << 40)]] = Field(
        default_factory=dict,
        description="rows of the embedding table of a column of ids; default: the data's largest id + 1",
    )
    embedding: int | None = Field(None, gt=0, le=10_000_000, description="width of an embedding; default: 64")
    bottom: list[Width] = Field(
        default_factory=list,
        description="dlrm, dcnv2: widths of the network of the dense features; the last is the embedding's",
    )
    top: list[Width] = Field(
        default_factory=list,
        description="dlrm, dcnv2: inner widths of the network that gives the score; default: [256, 64]",
    )
    towers: list[Width] = Field(
        default_factory=list,
        description="two_tower: widths of each tower's network; default: none, embeddings alone",
    )
    cross_layers: int | None = Field(
        None, gt=0, le=1_000, description="dcnv2: number of cross layers; default: 3"
    )
    cross_rank: int | None = Field(
        None, gt=0, le=10_000_000, description="dcnv2: inner width of a low-rank cross layer; default: 512"
    )
    temperature: float | None = Field(
        None, gt=0, le=1_000, description="two_tower: divisor of the cosine of both vectors; default: 0.1"
    )
    objective: Literal["squared_error", "log_loss", "in_batch_softmax", "sampled_softmax"] | None = Field(
        None,
        description="loss; default: squared_error for ratings; for clicks in_batch_softmax (two_tower, or "
        "sampled_softmax with negatives) or log_loss",
    )


_RENAMED = {
    **{name: f"data.columns.{name}" for name in ("user", "item", "rating", "time", "dense")},
    "features": "data.columns.sparse",
    "columns": "data.columns, and the fields of files without a header are '0', '1' and so on",
}
"""New keys of the columns that were keys of `[data.interactions]`."""


class InteractionsSection(Section):
    """Interactions of users and items: target, validation split and negatives; fields: `data.columns`."""

    hash_rows: dict[str, Annotated[int, Field(gt=0, le=1 << 40)]] = Field(
        default_factory=dict,
        description="rows into which the ids of a field of ids are hashed, by a shell pattern of its name: "
        "ids may be any numbers and texts, or missing; fields that no pattern matches hold row numbers",
    )
    admit_rows: dict[str, Annotated[int, Field(gt=0, le=1 << 40)]] = Field(
        default_factory=dict,
        description="maximum rows of the table of a field of ids, by a shell pattern of its name: ids may be "
        "any integers from 0 to 2^63 - 1; those of training rows get a row each, and the table grows from "
        "run to run (checkpoint.start_from)",
    )
    admit_count: int = Field(
        1,
        ge=1,
        le=1 << 40,
        description="admit_rows: uses of an id in the training rows of a run from which on it gets a row",
    )
    shared_rows: int = Field(
        100,
        ge=1,
        le=1 << 40,
        description="admit_rows: first rows of the table, which ids without a row share by a hash",
    )
    evict_after_runs: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="admit_rows: runs without an id after which a new id may have its row, once the table "
        "has no row left; unset: never",
    )
    log_dense: bool = Field(
        False, description="replace a dense feature x by log(x + 1), and a negative one by 0"
    )
    missing_dense: float | None = Field(
        None,
        allow_inf_nan=False,
        description="value of a dense feature where a row has none, before log_dense; unset: an error",
    )
    target: Literal["rating", "click"] = Field(
        "rating", description="target of a row: its rating; or click: 1 or 0, see positive_from"
    )
    positive_from: float | None = Field(
        None, description="target = 'click': rating from which on a row is a click; unset: each row is one"
    )
    split: Literal["random", "leave_last", "time"] = Field(
        "random",
        description="validation rows: random: fold `fold` of `folds`; leave_last: the last row of each user; "
        "time: the last `data.validation_fraction` of the rows",
    )
    folds: int = Field(5, ge=2, le=1_000_000, description="split = 'random': number of folds")
    fold: int = Field(0, ge=0, description="split = 'random': fold that is held out")
    negatives: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="items drawn for each row beside its own, by (seed, sample): the same on any layout",
    )
    negative_power: float = Field(
        0.75,
        ge=0,
        le=10,
        description="negatives are drawn in proportion to (count of the item) to this power; 0: uniformly",
    )
    top_k: int = Field(
        10, ge=1, le=1_000_000, description="length of the ranked list that recall and NDCG look at"
    )

    def hash_rows_of(self, table: str) -> int | None:
        """Return the rows into which ids of a table are hashed, by the first pattern; None: they are not."""
        return next((rows for one, rows in self.hash_rows.items() if fnmatchcase(table, one)), None)

    def admit_rows_of(self, table: str) -> int | None:
        """Return the maximum rows of a table that admits ids, by the first pattern; None: it does not."""
        return next((rows for one, rows in self.admit_rows.items() if fnmatchcase(table, one)), None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, given: Any) -> Any:
        old = [name for name in _RENAMED if isinstance(given, Mapping) and name in given]
        if old:
            raise ValueError("; ".join(f"{name} is renamed to {_RENAMED[name]}" for name in old))
        return given

    @model_validator(mode="after")
    def _check_keys(self) -> InteractionsSection:
        if self.fold >= self.folds:
            raise ValueError(f"fold = {self.fold} must be below folds = {self.folds}")
        if self.target == "rating" and (self.negatives or self.positive_from is not None):
            key = "negatives" if self.negatives else "positive_from"
            raise ValueError(f"{key} applies to target = 'click', and target = 'rating'")
        return self

    @model_validator(mode="after")
    def _check_admission(self) -> InteractionsSection:
        names = ("admit_count", "shared_rows", "evict_after_runs")
        changed = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not self.admit_rows:
            raise ValueError(f"{changed[0]} has no effect without admit_rows")
        for pattern, rows in self.admit_rows.items():
            if rows <= self.shared_rows:
                raise ValueError(
                    f"admit_rows = {rows} of '{pattern}' must be above shared_rows = {self.shared_rows}"
                )
        return self


@dataclass(frozen=True)
class InteractionSizes:
    """Sizes of an interaction log, which a recommender takes where the job is silent."""

    user: str
    item: str
    """Names of the columns of users and items."""
    tables: Mapping[str, int]
    """Rows of the embedding table that each column of ids needs: its largest id + 1, or its `hash_rows`."""
    largest_rows: Mapping[str, str] = field(default_factory=dict)
    """File and row that hold the largest id of a column."""
    bag_sizes: Mapping[str, int] = field(default_factory=dict)
    """Mean number of ids in a row of a column that holds lists, rounded up."""
    dense: int = 0
    """Number of dense features."""
    mean_target: float = 0.0
    """Mean rating of the training rows; 0 for clicks."""
    target: Literal["rating", "click"] = "rating"
    negatives: int = 0
    shared_rows: Mapping[str, int] = field(default_factory=dict)
    """First rows, by table that admits ids, which those without a row of their own share."""
