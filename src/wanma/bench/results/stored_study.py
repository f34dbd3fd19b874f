"""Scaling of a job as a result has it: curves of measured and forecast points, their knees, and sentences."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Stored(BaseModel):
    """Part of a result; keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Interval(Stored):
    """Value with an interval around it."""

    value: float
    low: float
    high: float


class CurvePoint(Stored):
    """One number of ranks: throughput in samples per second, measured and forecast."""

    ranks: int
    global_batch: int
    plan: str = ""
    """Mesh and settings in words; empty: there is no plan."""
    micro_batch: int | None = None
    """Samples of the plan's micro-batch."""
    step_seconds: float | None = None
    """Step time by the plan's forecast."""
    uncertainty: float | None = None
    """Uncertainty of that step time, as a share of it."""
    parts: dict[str, float] = {}
    """Seconds of the forecast step by part."""
    forecast: float | None = None
    """Throughput by the plan's forecast, as it was before any measurement."""
    measured: Interval | None = None
    """Median and 95 % interval; None: not measured."""
    expected: Interval | None = None
    """Throughput by the forecast and the measurements of the curve together, with its 90 % band."""
    speedup: Interval | None = None
    """Throughput over that of the first point of the curve."""
    ideal: float = 1.0
    """Speedup if throughput grew as the ranks."""
    reason: str = ""
    """Reason why there is no forecast."""
    unsupported: str = ""
    """Reason why the plan cannot run; empty: it can."""

    @property
    def device_seconds_per_sample(self) -> float | None:
        """Forecast seconds of all ranks together, per sample; constant under ideal scaling."""
        return None if self.step_seconds is None else self.step_seconds * self.ranks / self.global_batch

    @property
    def error(self) -> float | None:
        """Error of the forecast throughput, as a share of the measured one."""
        if self.measured is None or self.forecast is None:
            return None
        return self.forecast / self.measured.value - 1

    @property
    def efficiency(self) -> Interval | None:
        if self.speedup is None:
            return None
        low, high = self.speedup.low / self.ideal, self.speedup.high / self.ideal
        return Interval(value=self.speedup.value / self.ideal, low=low, high=high)


class PartGrowth(Stored):
    """Growth of one part of a step between two numbers of ranks."""

    part: str
    before: float
    """Share of a step on the fewer ranks."""
    after: float
    """Share of a step on the more."""
    added: float
    """Time of all ranks per sample that it adds, as a share of that of a sample on the fewer ranks."""


class StoredKnee(Stored):
    """Knee of a curve with its causes."""

    ranks: int
    """Smallest number of ranks, of those forecast, whose efficiency is below the limit."""
    reference_ranks: int
    """Fewer ranks with the highest throughput per rank, to which efficiency is relative."""
    efficiency: float | None
    """Throughput per rank over that of the reference; None: there is no plan from here on."""
    growths: list[PartGrowth] = []
    """Parts of a step by the time that they add, the largest first; `added` makes 1 / efficiency − 1."""
    micro_batches: tuple[int, int] | None = None
    """Samples of a micro-batch at the reference and at the knee; None: without a plan there."""
    reason: str = ""
    """Reason why there is no plan."""


class Curve(Stored):
    """Scaling of one layout on one hardware."""

    name: str
    """Hardware, and mesh dimension that grows."""
    unit: str
    """GPUs or ranks."""
    points: list[CurvePoint]
    knee: StoredKnee | None = None
    band: str = ""
    """Source of the band in words."""
    sentences: list[str] = []


class PublishedForecast(Stored):
    """Forecast of a published scaling under settings that the publication leaves open."""

    settings: str
    speedup: Interval | None = None
    """None: there is no forecast; `reason` says why."""
    samples_per_second: float | None = None
    """Throughput on the most devices."""
    reason: str = ""
    unsupported: str = ""
    """Reason why its plan cannot run; empty: it can."""


class PublishedScaling(Stored):
    """Published scaling, beside its forecasts."""

    title: str
    source: str
    unit: str
    counts: list[int]
    speedup: float
    efficiency: float
    samples_per_minute: float | None = None
    devices: int | None = None
    """Devices of the largest count, if the published speedup is over one device."""
    forecasts: list[PublishedForecast]
    sentences: list[str] = []

    @property
    def ideal(self) -> float:
        return self.counts[-1] / self.counts[0]


class ScaleStudy(Stored):
    """Scaling of a job on all hardware that was asked for."""

    kind: str
    """strong or weak."""
    limit: float
    """Efficiency below which a curve has its knee."""
    curves: list[Curve]
    notes: list[str] = []
