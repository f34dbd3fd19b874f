"""The machines as pure data: what devices there are and how they are connected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Device:
    """One kind of device. For a CPU, one "device" is one rank's share of the machine."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    peak_flops_per_second: dict[str, float]
    """Dense peak by precision ("fp32", "bf16", "fp16"); empty when unknown."""


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[Device, ...]
    """Accelerators; empty on a machine that has only CPUs."""


@dataclass(frozen=True)
class Cluster:
    """All machines of a run."""

    nodes: tuple[Node, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
