"""Section `[model.recommender]` of a job file: dimensions of a recommender."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
