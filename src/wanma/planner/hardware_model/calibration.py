"""Calibration: benchmark points of the local devices, curves fitted to them, and correction factors.

`wanma bench machine --save` runs operators and collectives and saves their times (`BenchmarkPoint`) with the
curves fitted to them (`DeviceCalibration.machine`). `wanma plan --learn RUN` saves, apart from these, the
ratio of measured to forecast times (`CorrectionFactors`). `builder.build_hardware_model` takes both. Pure
data, without torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import write_json
from wanma.job.run.user_cache import user_cache_folder
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    FrameworkOverhead,
    HardwareModel,
    HostModel,
    LinkLevel,
    MatmulCurve,
)

VERSION = 1
"""Version of the file's layout."""

FACTOR_BOUNDS = (0.25, 4.0)
"""Smallest and largest correction factor. A forecast that misses by more has another cause than the
hardware's rates, which no factor corrects."""

BenchmarkKind = Literal[
    "product",
    "stream",
    "attention",
    "attention_backward",
    "dispatch",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tensor_gather",
    "tensor_scatter",
    "all_to_all",
    "send",
    "blocks",
    "blocks_tensor",
    "blocks_gradients",
    "blocks_parameters",
    "to_host",
    "host_stream",
    "file_read",
    "file_write",
    "fresh",
    "disk",
]


@dataclass(frozen=True)
class BenchmarkPoint:
    """Benchmark point: one operator or collective and the median of its times."""

    operator: BenchmarkKind
    shape: tuple[int, ...]
    """Size of the operator. product: (m, n, k); stream: (bytes read and written); attention: (sequences,
    queries, heads, head width); dispatch: (kernels); a collective: (ranks, bytes), counted as
    `collective_time` counts them; blocks (`framework_benchmarks`): (ranks, blocks); an operator of the host
    (`host_benchmarks`): (bytes)."""
    seconds: float
    precision: str = ""
    """Precision of an operator that computes; empty for others."""


@dataclass(frozen=True)
class DeviceCalibration:
    """Measurement of one kind of device while `ranks` of them worked at once."""

    device: str
    """Name of the device in a cluster: the catalogue's, the driver's, or the CPU model."""
    ranks: int
    """Ranks that ran together on the node: they share its memory bandwidth, and its cores if they are more
    than these."""
    threads: int
    """Threads of one rank that computes on the CPU; 0 for an accelerator."""
    machine: HardwareModel
    """Hardware model fitted to `points`; its outermost link joins `ranks` devices."""
    host: str = ""
    """Description of the measured node and its software."""
    date: str = ""
    """Time of the measurement in UTC, ISO 8601."""
    points: tuple[BenchmarkPoint, ...] = ()
    disturbed: int = 0
    """Number of `points` without enough quiet rounds."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Return the identity of the measurement: device, ranks, threads."""
        return self.device, self.ranks, self.threads


@dataclass(frozen=True)
class CorrectionFactors:
    """Correction factors: measured over forecast, learned from runs; 1: as forecast."""

    compute: float = 1.0
    """Factor of forward and backward, including host time."""
    communication: float = 1.0
    optimizer: float = 1.0
    unused: float = 1.0
    """Factor of the memory that a CPU's allocator holds beside live tensors."""
    runs: int = 0
    """Number of runs that these factors were learned from."""

    def __post_init__(self) -> None:
        low, high = FACTOR_BOUNDS
        for name in ("compute", "communication", "optimizer", "unused"):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"the correction {name} = {getattr(self, name)} is not from {low} to {high}")

    def apply(self, hardware: HardwareModel) -> HardwareModel:
        """Return `hardware` with its rates corrected by these factors."""
        chip = replace(
            hardware.chip,
            sustained=hardware.chip.sustained / self.compute,
            bandwidth_share=hardware.chip.bandwidth_share / self.compute,
            launch_seconds=hardware.chip.launch_seconds * self.compute,
        )
        links = tuple(
            replace(
                link,
                latency_seconds=link.latency_seconds * self.communication,
                bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / self.communication,
            )
            for link in hardware.links
        )
        return replace(
            hardware,
            chip=chip,
            links=links,
            dispatch_seconds=hardware.dispatch_seconds * self.compute,
            program=hardware.program.scaled(self.compute),
            start_seconds=hardware.start_seconds * self.communication,
            # The optimizer streams through the memory whose rate was corrected above.
            optimizer_factor=hardware.optimizer_factor * self.optimizer / self.compute,
            unused_factor=hardware.unused_factor * self.unused,
        )


@dataclass(frozen=True)
class Calibration:
    """All measurements and correction factors, kept in one file."""

    devices: tuple[DeviceCalibration, ...] = ()
    corrections: Mapping[str, CorrectionFactors] = field(default_factory=dict)
    """Correction factors by the device's name."""

    def find(self, device: str, ranks: int, threads: int = 0) -> DeviceCalibration | None:
        """Return the measurement of `device` with the nearest ranks and threads, counted in doublings.

        Return None where that device was never measured. For accelerators `ranks` hardly matters; on a CPU it
        decides a rank's share of the node.
        """
        measurements = [measurement for measurement in self.devices if measurement.device == device]

        def distance(measurement: DeviceCalibration) -> tuple[float, int]:
            ratio = abs(math.log2(measurement.ranks / ranks)) + abs(
                math.log2(max(measurement.threads, 1) / max(threads, 1))
            )
            return ratio, -measurement.ranks

        return min(measurements, key=distance, default=None)

    def corrections_for(self, device: str) -> CorrectionFactors:
        """Return the correction factors of `device`; factors of 1 where no run taught any."""
        return self.corrections.get(device, CorrectionFactors())

    def with_devices(self, *calibrations: DeviceCalibration) -> Calibration:
        """Return the calibration with these in place of earlier ones of the same device, ranks and threads.

        Correction factors of these devices are dropped, because they belong to the old curves.
        """
        new = {measurement.key: measurement for measurement in calibrations}
        unreplaced = [measurement for measurement in self.devices if measurement.key not in new]
        devices = {measurement.device for measurement in calibrations}
        corrections = {name: factors for name, factors in self.corrections.items() if name not in devices}
        return Calibration((*unreplaced, *new.values()), corrections)

    def with_corrections(self, device: str, corrections: CorrectionFactors) -> Calibration:
        """Return the calibration with these correction factors for `device`."""
        return replace(self, corrections={**self.corrections, device: corrections})

    def merge(self, other: Calibration) -> Calibration:
        """Return both calibrations merged; `other` takes precedence."""
        merged = self.with_devices(*other.devices)
        return replace(merged, corrections={**merged.corrections, **other.corrections})

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        return {
            "version": VERSION,
            "measured": [_to_json(measurement) for measurement in self.devices],
            "corrections": {name: asdict(factors) for name, factors in self.corrections.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """Return the calibration that `to_json` wrote.

        Raises:
            ValueError: it is of another version, or a value is out of range.
            TypeError: an object has unknown or missing fields.
            KeyError: a key is missing.
        """
        if value.get("version") != VERSION:
            raise ValueError(f"version {value.get('version')} is not {VERSION}")
        measured = tuple(_device_calibration(measurement) for measurement in value["measured"])
        corrections = {name: CorrectionFactors(**factors) for name, factors in value["corrections"].items()}
        return cls(measured, corrections)


def calibration_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of this node's calibration: `wanma/calibration.json` in the user's cache folder."""
    return user_cache_folder(environment) / "calibration.json"


def load_calibration(path: Path | None = None) -> Calibration:
    """Return the calibration in `path`, or in `calibration_file()`; an empty one without a file.

    Raises:
        WanmaError: the file cannot be read, is damaged, or is of another version.
    """
    path = path or calibration_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        raise WanmaError(f"cannot read the calibration {path}: {error.strerror or error}") from error
    try:
        return Calibration.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WanmaError(
            f"the calibration {path} cannot be used: {error}",
            "remove the file, and run `wanma bench machine --save` again",
        ) from error


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Write the calibration to `path`, or to `calibration_file()`.

    Returns:
        The path of the file.

    Raises:
        WanmaError: the file cannot be written.
    """
    path = path or calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration.to_json())
    except OSError as error:
        raise WanmaError(
            f"cannot write the calibration to {path}: {error.strerror or error}",
            "choose another file with --output FILE, or set XDG_CACHE_HOME to a writable folder",
        ) from error
    return path


def _to_json(measurement: DeviceCalibration) -> dict[str, Any]:
    """Return `measurement` as JSON values; `asdict` copies mappings only if they are dicts."""
    chip = measurement.machine.chip
    chip = replace(
        chip,
        peak_flops_per_second=dict(chip.peak_flops_per_second),
        products=dict(chip.products),
        attention_in=dict(chip.attention_in),
    )
    factors = dict(measurement.machine.collective_factors)
    return asdict(
        replace(measurement, machine=replace(measurement.machine, chip=chip, collective_factors=factors))
    )


def _device_calibration(value: Mapping[str, Any]) -> DeviceCalibration:
    points = tuple(BenchmarkPoint(**{**point, "shape": tuple(point["shape"])}) for point in value["points"])
    return DeviceCalibration(**{**value, "machine": _hardware_model(value["machine"]), "points": points})


def _hardware_model(value: Mapping[str, Any]) -> HardwareModel:
    known = {level.name for level in fields(HardwareModel)}
    if unknown := set(value) - known:
        raise ValueError(f"unknown key {sorted(unknown)[0]} of a hardware model")
    chip = dict(value["chip"])
    chip["products"] = {name: MatmulCurve(**curve) for name, curve in chip["products"].items()}
    chip["attention"] = AttentionCurve(**chip["attention"])
    chip["attention_in"] = {name: AttentionCurve(**curve) for name, curve in chip["attention_in"].items()}
    chip["tiles"] = tuple((rows, columns, share) for rows, columns, share in chip["tiles"])
    links = tuple(LinkLevel(**link) for link in value["links"])
    host = (
        HostModel(**value["host"]) if "host" in value else HostModel()
    )  # files of earlier versions have none
    program = FrameworkOverhead(**value.get("program", {}))  # the same
    factors = {name: (latency, moving) for name, (latency, moving) in value["collective_factors"].items()}
    return HardwareModel(
        **{
            **value,
            "chip": DeviceModel(**chip),
            "links": links,
            "host": host,
            "program": program,
            "collective_factors": factors,
            "assumed": tuple(value["assumed"]),
        }
    )
