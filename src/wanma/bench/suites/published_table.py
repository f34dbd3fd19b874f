"""Table `[[published]]` of a suite: scaling that somebody published, beside which the forecast stands."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from wanma.bench.suites.scale_table import Axis
from wanma.job.sections.base import Section


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
