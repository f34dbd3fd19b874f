"""Result of one benchmark: contenders, rule, place, measurements and the figures that follow from them.

`to_json` and `from_json` are schema 1. The reader ignores unknown keys and refuses a newer schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wanma.bench.measurements.measurement import Measurement
from wanma.bench.results.stored_study import PublishedScaling, ScaleStudy
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Verdict
from wanma.bench.stored_record import StoredRecord
from wanma.job.errors import WanmaError

SCHEMA = 1
"""Schema of result.json that this version writes, and the newest that it reads."""

Summaries = Mapping[str, Mapping[str, Estimate]]
"""Estimates by contender and metric."""

Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""One value for each measurement that counts, the median of its steps, by contender, metric and round."""


@dataclass(frozen=True)
class ContenderRecord:
    """Contender as it was measured."""

    name: str
    kind: Literal["job", "command"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the suite that define the contender: overrides of a job, environment of a command."""
    command: tuple[str, ...] = ()
    """Command line that each measurement started."""
    job: str = ""
    """Resolved job file as TOML; empty for a command."""
    plan: Mapping[str, Any] | None = None
    """Plan of the job as JSON; None for a command, or before the plan is known."""
    description: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of all packages of the contender's own Python environment; empty: it runs in that of wanma."""


@dataclass(frozen=True)
class SuiteRecord:
    """Suite that a result comes from."""

    name: str = ""
    hash: str = ""
    """Hash of the suite file; results of equal hashes measured the same contenders by the same rule."""


@dataclass(frozen=True)
class BenchmarkResult(StoredRecord):
    """Benchmark with its measurements and figures."""

    id: str
    """Name of the folder; unique below one root."""
    name: str
    title: str
    created: str
    """Start in ISO 8601, UTC."""
    contenders: tuple[ContenderRecord, ...]
    description: str = ""
    """Sentences of the suite, and whether data were made for it."""
    suite: SuiteRecord = SuiteRecord()
    baseline: str = ""
    """Contender with which the verdicts compare; empty: there are no verdicts."""
    rule: Mapping[str, Any] = field(default_factory=dict)
    """Rounds and budget by the keys of a suite file, and the limits within which a measurement counts."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions by package: wanma, torch, Python, and those of the contenders."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """`cluster` (JSON of a Cluster), `processor`, `cores`, `memory_bytes`, `kernel`."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """`commit`, `is_dirty`, and `hash` of the sources of wanma."""
    measurements: tuple[Measurement, ...] = ()
    """All measurements in the order of their execution, those that do not count included."""
    summaries: Summaries = field(default_factory=dict)
    verdicts: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    """Comparisons with the baseline, by contender and metric."""
    values: Values = field(default_factory=dict)
    warm_ups: tuple[int, ...] = ()
    """Steps at the beginning of each measurement that do not count, in the order of `measurements`."""
    scale: ScaleStudy | None = None
    """Scaling of the job, forecast beside the measurements; None: there is none."""
    published: tuple[PublishedScaling, ...] = ()
    """Published scalings, beside their forecasts."""
    ended: str = ""
    """End in ISO 8601, UTC; empty: the benchmark was interrupted, or runs."""
    schema: int = SCHEMA

    @property
    def contender_names(self) -> tuple[str, ...]:
        return tuple(contender.name for contender in self.contenders)

    def contender(self, name: str) -> ContenderRecord:
        """Return the contender of this name.

        Raises:
            KeyError: there is none.
        """
        for contender in self.contenders:
            if contender.name == name:
                return contender
        raise KeyError(name)

    def measurements_of(self, contender: str, counted_only: bool = True) -> tuple[Measurement, ...]:
        """Return the measurements of a contender; by default only those that count."""
        return tuple(
            measurement
            for measurement in self.measurements
            if measurement.contender == contender and (measurement.counts or not counted_only)
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything but the measurements, which have files of their own."""
        content = StoredRecord.to_json(replace(self, measurements=(), schema=SCHEMA))
        del content["measurements"]
        return {**content, "measurement_count": len(self.measurements)}

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], measurements: tuple[Measurement, ...] = ()
    ) -> BenchmarkResult:
        """Return the result that `to_json` wrote; unknown keys are ignored.

        Raises:
            WanmaError: a newer schema.
            KeyError, TypeError, ValueError: the content is no result.
        """
        if content["schema"] > SCHEMA:
            raise WanmaError(
                f"the result has schema {content['schema']}; this wanma reads schemas up to {SCHEMA}",
                "read it with a newer version: pip install --upgrade wanma",
            )
        return super().from_json({**content, "measurements": measurements})
