"""Tables of scalings in a suite: `[scale]`, measured and forecast, and `[[published]]`, by somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.base import Section

Axis = Literal["dp_replicate", "dp_shard", "cp", "tp", "pp"]
"""Mesh dimension that grows with the ranks."""
MAX_RANKS = 1_000_000


class ScaleTable(Section):
    """Scaling of the suite's job over numbers of ranks."""

    measure: list[Annotated[int, Field(ge=1, le=MAX_RANKS)]] = Field(default_factory=list)
    """Numbers of ranks that are measured here; empty: none."""
    to: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1024
    """Largest number of devices of a forecast."""
    weak: bool = False
    """True if the global batch grows with the ranks."""
    axis: Axis
    """Mesh dimension that grows with the ranks; the others stay as the job has them."""
    clusters: list[str] = Field(default_factory=list)
    """Cluster files or shorthands whose nodes are forecast too."""
    gpus: list[str] = Field(default_factory=list)
    """Devices of the catalogue, in their usual servers, that are forecast too."""
    network: str | None = None
    """Network cards of one node such as this one: "8x400G"; None: those of its reference server."""
    batch_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Number of ranks for which the job's global batch is meant, in weak scaling."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Overrides of the job on every number of ranks."""
    efficiency: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Efficiency below which scaling has its knee."""


class PublishedTable(Section):
    """Published speedup of a training like the suite's, on hardware of the catalogue."""

    title: str
    source: str
    """Origin of the figures, and what they leave open."""
    cluster: str
    """Cluster shorthand of one unit, such as "1x4 V100 SXM2 16 GB, 1x100G"."""
    unit: str = "servers"
    """Unit of `counts`, each of all devices of `cluster`."""
    counts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2)]
    """Numbers of units, rising."""
    speedup: Annotated[float, Field(gt=0)]
    """Published speedup of the last number over the first."""
    efficiency: Annotated[float, Field(gt=0)]
    """Published efficiency: speedup over ideal."""
    speedup_base: Literal["unit", "device"] = "unit"
    """Amount of hardware whose throughput the published speedup is over; the efficiency is over units."""
    weak: bool = False
    """True if the global batch grows with the units: that of the variants is for the first count."""
    axis: Axis = "dp_replicate"
    """Mesh dimension that grows."""
    variants: Annotated[list[dict[str, str]], Field(min_length=1)]
    """Settings that the publication leaves open: each gets a forecast."""
    minutes: float | None = None
    """Published duration of the training, in minutes."""
    samples_per_minute: float | None = None
    """Published throughput, in samples per minute."""
    epoch_samples: int | None = None
    """Samples of an epoch."""

    @model_validator(mode="after")
    def _counts_rise(self) -> PublishedTable:
        if self.counts != sorted(set(self.counts)):
            raise ValueError("counts must rise")
        return self


def parse_counts(text: str) -> list[int]:
    """Parse numbers of ranks, '1,2,4' or '1..8' for 1, 2, 4, 8; 'none' is an empty list.

    Raises:
        WanmaError: the text is none of these.
    """
    if text.strip() == "none":
        return []
    first, dots, last = (part.strip().replace("_", "") for part in text.partition(".."))
    words = [first, last] if dots else [part.strip().replace("_", "") for part in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_RANKS for word in words):
        raise WanmaError(
            f"--measure {text}: expected numbers of ranks", "write 1,2,4 or 1..4, or none", EXIT_USAGE
        )
    counts = [int(word) for word in words]
    return doubled_counts(counts[0], counts[1]) if dots else sorted(set(counts))


def doubled_counts(first: int, last: int, also: Sequence[int] = ()) -> list[int]:
    """Return `first` and its doublings up to `last`, `last` itself, and those of `also` between them."""
    counts = {first, last}
    count = first
    while count <= last:
        counts.add(count)
        count *= 2
    return sorted(counts | {count for count in also if first <= count <= last})
