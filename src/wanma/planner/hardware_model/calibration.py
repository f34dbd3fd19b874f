"""What was measured of the machines at hand, and what runs taught about forecasts of them.

`wanma cluster --calibrate` runs operators and collectives and keeps their times (`Point`) with the curves
fitted to them (`Measured.machine`). `wanma plan --learn RUN` keeps, apart from these, by how much forecasts
missed (`Corrections`). `machines.machine_of` takes both. Pure data, without torch.
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
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    Chip,
    Host,
    Link,
    Machine,
    ProductCurve,
    Program,
)

VERSION = 1
"""Of the file's layout."""

FACTOR_BOUNDS = (0.25, 4.0)
"""A forecast that misses by more has another cause than the machine's rates, which no factor mends."""

Operator = Literal[
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
class Point:
    """One operator or collective that was run, and the median of its times."""

    operator: Operator
    shape: tuple[int, ...]
    """product: (m, n, k); stream: (bytes read and written); attention: (sequences, queries, heads, width of
    one); dispatch: (kernels); a collective: (ranks, bytes), counted as `communication` counts
    them; blocks (`measure.program`): (ranks, blocks); what is of a host (`measure.host`): (bytes moved)."""
    seconds: float
    precision: str = ""
    """Of what computes."""


@dataclass(frozen=True)
class Measured:
    """One kind of device while `ranks` of them worked at once."""

    device: str
    """The device's name as a cluster has it: the catalogue's, the driver's, or the processor's."""
    ranks: int
    """That ran together on the machine: they share its memory's bandwidth, and its cores if they are more."""
    threads: int
    """Of one rank that computes on the CPU; 0 for an accelerator."""
    machine: Machine
    """The curves fitted to `points`; its outermost link joins `ranks` devices."""
    host: str = ""
    """The machine and software that was measured, in words."""
    date: str = ""
    """ISO 8601, UTC."""
    points: tuple[Point, ...] = ()
    disturbed: int = 0
    """Of `points`, those during all of which other programs were busy."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.device, self.ranks, self.threads


@dataclass(frozen=True)
class Corrections:
    """Measured over forecast, as runs showed it; 1: as forecast."""

    compute: float = 1.0
    """Forward and backward, the host's part included."""
    communication: float = 1.0
    optimizer: float = 1.0
    unused: float = 1.0
    """What a CPU's allocator holds beside what is used of it."""
    runs: int = 0
    """That taught these."""

    def __post_init__(self) -> None:
        low, high = FACTOR_BOUNDS
        for name in ("compute", "communication", "optimizer", "unused"):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"the correction {name} = {getattr(self, name)} is not from {low} to {high}")

    def applied(self, machine: Machine) -> Machine:
        """`machine` at the rates that runs showed."""
        chip = replace(
            machine.chip,
            sustained=machine.chip.sustained / self.compute,
            bandwidth_share=machine.chip.bandwidth_share / self.compute,
            launch_seconds=machine.chip.launch_seconds * self.compute,
        )
        links = tuple(
            replace(
                link,
                latency_seconds=link.latency_seconds * self.communication,
                bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / self.communication,
            )
            for link in machine.links
        )
        return replace(
            machine,
            chip=chip,
            links=links,
            dispatch_seconds=machine.dispatch_seconds * self.compute,
            program=machine.program.scaled(self.compute),
            start_seconds=machine.start_seconds * self.communication,
            # The optimizer streams through the memory whose rate was corrected above.
            optimizer_factor=machine.optimizer_factor * self.optimizer / self.compute,
            unused_factor=machine.unused_factor * self.unused,
        )


@dataclass(frozen=True)
class Calibration:
    """All that was measured and learned; one file."""

    measured: tuple[Measured, ...] = ()
    corrections: Mapping[str, Corrections] = field(default_factory=dict)
    """By the device's name."""

    def find(self, device: str, ranks: int, threads: int = 0) -> Measured | None:
        """The measurement of `device` whose ranks and threads are nearest, counted in doublings.

        None where that device was never measured. Of accelerators `ranks` hardly matters; on a CPU it decides
        how much of the machine a rank has.
        """
        own = [one for one in self.measured if one.device == device]

        def distance(one: Measured) -> tuple[float, int]:
            ratio = abs(math.log2(one.ranks / ranks)) + abs(math.log2(max(one.threads, 1) / max(threads, 1)))
            return ratio, -one.ranks

        return min(own, key=distance, default=None)

    def correction(self, device: str) -> Corrections:
        """What runs on `device` taught; no correction where there were none."""
        return self.corrections.get(device, Corrections())

    def with_measured(self, *measured: Measured) -> Calibration:
        """With these in place of earlier ones of the same device, ranks and threads.

        What runs taught beside the old curves of a device says nothing of the new ones, and goes.
        """
        new = {one.key: one for one in measured}
        kept = [one for one in self.measured if one.key not in new]
        devices = {one.device for one in measured}
        corrections = {name: one for name, one in self.corrections.items() if name not in devices}
        return Calibration((*kept, *new.values()), corrections)

    def with_corrections(self, device: str, corrections: Corrections) -> Calibration:
        return replace(self, corrections={**self.corrections, device: corrections})

    def merge(self, other: Calibration) -> Calibration:
        """Both; where they speak of the same, `other` counts."""
        both = self.with_measured(*other.measured)
        return replace(both, corrections={**both.corrections, **other.corrections})

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "measured": [_plain(one) for one in self.measured],
            "corrections": {name: asdict(one) for name, one in self.corrections.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: it is not such an object, or of another version.
        """
        if value.get("version") != VERSION:
            raise ValueError(f"version {value.get('version')} is not {VERSION}")
        measured = tuple(_measured(one) for one in value["measured"])
        corrections = {name: Corrections(**one) for name, one in value["corrections"].items()}
        return cls(measured, corrections)


def calibration_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this machine's calibration is kept: `wanma/calibration.json` in the user's cache folder."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "wanma" / "calibration.json"


def load_calibration(path: Path | None = None) -> Calibration:
    """What is kept in `path`, or in `calibration_file()`; nothing where there is no file.

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
            "remove the file, and measure again with `wanma cluster --calibrate`",
        ) from error


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Keep it in `path`, or in `calibration_file()`.

    Returns:
        the file.

    Raises:
        WanmaError: it cannot be written.
    """
    path = path or calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration.to_json())
    except OSError as error:
        raise WanmaError(
            f"cannot keep the calibration in {path}: {error.strerror or error}",
            "choose another with --output FILE, or set XDG_CACHE_HOME to a folder that can be written to",
        ) from error
    return path


def _plain(one: Measured) -> dict[str, Any]:
    """As JSON has it: `asdict` takes mappings only if they are dicts."""
    chip = one.machine.chip
    chip = replace(
        chip,
        peak_flops_per_second=dict(chip.peak_flops_per_second),
        products=dict(chip.products),
        attention_in=dict(chip.attention_in),
    )
    factors = dict(one.machine.collective_factors)
    return asdict(replace(one, machine=replace(one.machine, chip=chip, collective_factors=factors)))


def _measured(value: Mapping[str, Any]) -> Measured:
    points = tuple(Point(**{**one, "shape": tuple(one["shape"])}) for one in value["points"])
    return Measured(**{**value, "machine": _machine(value["machine"]), "points": points})


def _machine(value: Mapping[str, Any]) -> Machine:
    known = {one.name for one in fields(Machine)}
    if unknown := set(value) - known:
        raise ValueError(f"unknown key {sorted(unknown)[0]} of a machine")
    chip = dict(value["chip"])
    chip["products"] = {name: ProductCurve(**curve) for name, curve in chip["products"].items()}
    chip["attention"] = AttentionCurve(**chip["attention"])
    chip["attention_in"] = {name: AttentionCurve(**curve) for name, curve in chip["attention_in"].items()}
    chip["tiles"] = tuple((rows, columns, share) for rows, columns, share in chip["tiles"])
    links = tuple(Link(**link) for link in value["links"])
    host = Host(**value["host"]) if "host" in value else Host()  # files of earlier versions have none
    program = Program(**value.get("program", {}))  # likewise
    factors = {name: (latency, moving) for name, (latency, moving) in value["collective_factors"].items()}
    return Machine(
        **{
            **value,
            "chip": Chip(**chip),
            "links": links,
            "host": host,
            "program": program,
            "collective_factors": factors,
            "assumed": tuple(value["assumed"]),
        }
    )
