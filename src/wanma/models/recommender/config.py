"""Dimensions of a recommender, by preset and from the `[model]` section and the data. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wanma.job.errors import JobError
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import InteractionSizes

Kind = Literal["matrix_factorization", "two_tower", "dlrm", "dcnv2"]
Objective = Literal["squared_error", "log_loss", "in_batch_softmax", "sampled_softmax"]

PAIR_KINDS = ("matrix_factorization", "two_tower")
"""Kinds whose score is a product of a user's and an item's vector, so that they rank the catalogue."""
_KEYS_BY_KIND: dict[str, tuple[str, ...]] = {
    "matrix_factorization": (),
    "two_tower": ("towers", "temperature"),
    "dlrm": ("bottom", "top"),
    "dcnv2": ("bottom", "top", "cross_layers", "cross_rank"),
}


@dataclass(frozen=True)
class RecommenderConfig:
    """Dimensions of a recommender, which determine parameters and arithmetic."""

    kind: Kind
    embedding: int = 64
    """Width of an embedding."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """Rows of each embedding table, by the name of the column of ids."""
    bag_sizes: Mapping[str, int] = field(default_factory=dict)
    """Usual number of ids in a bag of a table, for forecasts; 1 where a table has no entry."""
    dense: int = 0
    """Number of dense features."""
    bottom: tuple[int, ...] = ()
    """Widths of the network of the dense features."""
    top: tuple[int, ...] = ()
    """Widths of the network that gives the score."""
    towers: tuple[int, ...] = ()
    cross_layers: int = 3
    cross_rank: int = 512
    temperature: float = 0.1
    objective: Objective = "log_loss"
    user: str = "user"
    item: str = "item"
    initial_score: float = 0.0
    """Initial value of the bias of all scores of a matrix factorization: the mean rating."""
    shared_rows: Mapping[str, int] = field(default_factory=dict)
    """First rows, by table that admits ids, which are no single id's and are not ranked."""


# Criteo's columns, as MLPerf numbers them; rows and ids in a bag by mlcommons/training,
# recommendation_v2/torchrec_dlrm (README, "MLPerf DLRM DCNv2").
_CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
_CRITEO_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_YOUTUBE_ROWS = {
    "user": 180_000_000,
    "item": 100_000_000,
    "watched": 100_000_000,
    "searched": 10_000_000,
    "channel": 500_000,
    "place": 100_000,
    "language": 1_000,
}

RECOMMENDER_PRESETS: dict[str, RecommenderConfig] = {
    # Naumov et al. 2019, section 5, the model of Criteo's Kaggle data; tables are the data's.
    "dlrm-small": RecommenderConfig("dlrm", 16, bottom=(512, 256, 64, 16), top=(512, 256)),
    # MLPerf Training v3.0 to v4.1, DLRM-DCNv2: 204,184,588 rows of 128, 26.1B parameters.
    "dcnv2-mlperf": RecommenderConfig(
        "dcnv2",
        128,
        {f"cat_{number}": rows for number, rows in enumerate(_CRITEO_ROWS)},
        {f"cat_{number}": size for number, size in enumerate(_CRITEO_BAGS)},
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256),
        cross_layers=3,
        cross_rank=512,
    ),
    # A video recommender in the manner of Covington et al. 2016, with histories as bags: 50.0B parameters.
    "youtube-50b": RecommenderConfig(
        "dlrm",
        128,
        _YOUTUBE_ROWS,
        {"watched": 50, "searched": 50},
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 512, 256),
    ),
}


def resolve_recommender_config(section: ModelSection, sizes: InteractionSizes | None) -> RecommenderConfig:
    """Return the recommender that a `[model]` section describes: its preset, overridden by explicit keys.

    Args:
        section: with a recommender's preset or `family = "recommender"`.
        sizes: sizes of the data; None where there are none yet.

    Raises:
        JobError: a key is missing, does not apply to the kind, or contradicts the data.
    """
    base = _base_config(section)
    given: dict[str, Any] = {
        key: value
        for key, value in section.recommender.model_dump().items()
        if key != "tables" and value not in (None, [])
    }
    for key in given:
        if key not in ("embedding", "objective", *_KEYS_BY_KIND[base.kind]):
            raise JobError(
                f"model.recommender.{key} does not apply to kind '{base.kind}'",
                f"remove model.recommender.{key}",
            )
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    config = replace(base, **given)
    if sizes is not None:
        config = _with_data(config, section, sizes, has_objective="objective" in given)
    config = replace(config, tables={**config.tables, **section.recommender.tables})
    _check_config(config, sizes)
    return config


def _base_config(section: ModelSection) -> RecommenderConfig:
    if section.preset is not None:
        if section.kind is not None:
            raise JobError(f"model.kind does not apply to model.preset = '{section.preset}'", "remove it")
        return RECOMMENDER_PRESETS[section.preset]
    if section.kind is None:
        raise JobError(
            "model.family = 'recommender' needs model.kind", f"set it to one of {', '.join(_KEYS_BY_KIND)}"
        )
    top = () if section.kind in PAIR_KINDS else (256, 64)
    return RecommenderConfig(section.kind, top=top)


def _with_data(
    config: RecommenderConfig, section: ModelSection, sizes: InteractionSizes, *, has_objective: bool
) -> RecommenderConfig:
    """Return `config` with the tables, features and default objective of the data."""
    if not has_objective:
        softmax: Objective = "sampled_softmax" if sizes.negatives else "in_batch_softmax"
        for_clicks: Objective = softmax if config.kind == "two_tower" else "log_loss"
        config = replace(config, objective="squared_error" if sizes.target == "rating" else for_clicks)
    is_pair = config.kind in PAIR_KINDS
    features = [name for name in sizes.tables if name not in (sizes.user, sizes.item)]
    if is_pair and (features or sizes.dense):
        raise JobError(
            f"model.kind = '{config.kind}' reads users and items only, but the data have "
            f"{', '.join(features) or 'dense features'}",
            "remove data.columns.sparse and dense, or use kind 'dlrm' or 'dcnv2'",
        )
    tables = config.tables or sizes.tables
    tables = {name: sizes.tables[name] if name in sizes.shared_rows else tables[name] for name in tables}
    if set_twice := [name for name in section.recommender.tables if name in sizes.shared_rows]:
        raise JobError(
            f"model.recommender.tables.{set_twice[0]}: the rows of table '{set_twice[0]}' follow from its "
            "ids (data.interactions.admit_rows)",
            f"remove model.recommender.tables.{set_twice[0]}",
        )
    config = replace(config, bag_sizes=config.bag_sizes or sizes.bag_sizes, shared_rows=sizes.shared_rows)
    named = {**tables, **section.recommender.tables}
    for name in (*section.recommender.tables, *tables):
        if name not in sizes.tables:
            raise JobError(
                f"the model has an embedding table '{name}', but the data have no such column of ids",
                "set data.columns.user, item and sparse to the fields of the model's tables",
            )
    for name, needed in sizes.tables.items():
        if named.get(name, 0) < needed:
            row = sizes.largest_rows.get(name, "the data")
            raise JobError(
                f"{name}: id {needed - 1} is outside its embedding table of {named.get(name, 0)} rows "
                f"({row})",
                f"set model.recommender.tables.{name} to at least {needed}, or mend the data",
            )
    mean = sizes.mean_target if config.kind == "matrix_factorization" else 0.0
    return replace(
        config, tables=tables, dense=sizes.dense, user=sizes.user, item=sizes.item, initial_score=mean
    )


def _check_config(config: RecommenderConfig, sizes: InteractionSizes | None) -> None:
    needed = (config.user, config.item) if config.kind in PAIR_KINDS else ()
    if not config.tables or (missing := [name for name in needed if name not in config.tables]):
        names = ", ".join(missing if config.tables else needed or ("the columns of ids",))
        raise JobError(
            f"the rows of the embedding tables are unknown: {names}",
            "set model.recommender.tables, or name data (data.path, data.kind = 'interactions')",
        )
    softmax = config.objective in ("in_batch_softmax", "sampled_softmax")
    key = f"model.recommender.objective = '{config.objective}'"
    if softmax and config.kind not in PAIR_KINDS:
        raise JobError(f"{key} compares items, and kind '{config.kind}' scores rows", "use 'log_loss'")
    if sizes is not None:
        if (config.objective == "squared_error") != (sizes.target == "rating"):
            raise JobError(
                f"{key} does not fit data.interactions.target = '{sizes.target}'",
                "use 'squared_error' for ratings, and another one for clicks",
            )
        if config.objective == "sampled_softmax" and not sizes.negatives:
            raise JobError(f"{key} needs negatives", "set data.interactions.negatives, e.g. 100")
        if sizes.negatives and (config.objective == "in_batch_softmax" or config.kind not in PAIR_KINDS):
            raise JobError(
                f"data.interactions.negatives = {sizes.negatives} has no effect with {key} of kind "
                f"'{config.kind}'",
                "set it to 0; in-batch negatives are the other items of the global batch",
            )
    if config.dense and config.kind not in PAIR_KINDS and (config.bottom or (0,))[-1] != config.embedding:
        raise JobError(
            f"model.recommender.bottom = {list(config.bottom)} must end with the embedding's width, "
            f"{config.embedding}, for {config.dense} dense features",
            f"set model.recommender.bottom, e.g. [64, {config.embedding}]",
        )
