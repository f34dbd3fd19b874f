"""Schema of a cluster file: one typed section per table, with bounds and one-line help; no behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from wanma.hardware.cluster_file.node_builder import MAX_CORES, MAX_DEVICES, MAX_NODES
from wanma.job.errors import did_you_mean
from wanma.job.sections.base import Section

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")
NO_NETWORK = "none"


class LevelSection(Section):
    """Interconnect level, nearest first; given levels replace the defaults."""

    name: str = Field(description="'NVLink', 'rail', 'rack', 'spine'")
    inside: bool = Field(False, description="between the devices of one node, not between nodes")
    size: int | None = Field(
        None, ge=2, le=MAX_NODES, description="devices (inside) or nodes that it joins; default: all"
    )
    gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="10⁹ bytes per second, device and direction; default: the cards'"
    )
    latency_microseconds: float | None = Field(None, ge=0, le=1e6, description="default: 2.7; inside: 0.6")


class NodesSection(Section):
    """Group of `count` equal nodes."""

    count: int = Field(1, ge=1, le=MAX_NODES, description="machines")
    device: str | None = Field(
        None, description="accelerator: a name of the catalogue or of [[devices]]; default: none"
    )
    devices: int | None = Field(
        None, ge=1, le=MAX_DEVICES, description="of them in one node; default: as in its usual server"
    )
    network: str | None = Field(
        None, description="cards of one node and Gbit/s of each, '4x100G'; 'none': unknown; default: as usual"
    )
    cpu: str | None = Field(None, description="processor: a name of the catalogue or of [[devices]]")
    cores: int | None = Field(None, ge=1, le=MAX_CORES, description="of one node; default: as usual")
    memory_gb: float | None = Field(
        None, ge=0.001, le=1e6, description="of one node's host, 10⁹ bytes; default: as usual"
    )
    power_watts: float | None = Field(None, gt=0, le=1e6, description="of one whole node at full load")
    price_per_hour: float | None = Field(
        None, gt=0, le=1e6, description="of one node, in one currency for the whole file"
    )
    disk_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="of one node's own disks, 10⁹ bytes per second written"
    )
    days_between_failures: float | None = Field(
        None, gt=0, le=1e6, description="of one node, on average; default: as often as Llama 3's run failed"
    )
    name: str | None = Field(None, description="in messages; default: the device's")
    hosts: list[str] = Field(
        default_factory=list,
        description="their names, near ones next to each other: ['a[01-08]', 'b1']; numbers go by this order",
    )
    levels: list[LevelSection] = Field(default_factory=list, description="how they are connected")


class DeviceSection(Section):
    """Device that is missing in the catalogue, or has other figures there."""

    name: str = Field(description="as [[nodes]] calls it")
    kind: Literal["cuda", "other", "cpu"] = Field(
        "cuda", description="cuda: an NVIDIA or AMD GPU; other: only to plan for; cpu: a processor"
    )
    memory_gb: float = Field(ge=0.001, le=1e6, description="10⁹ bytes")
    peak_teraflops: dict[str, float] = Field(
        default_factory=dict, description="dense, by precision: { bf16 = 312, fp32 = 19.5 }"
    )
    gb_per_second: float | None = Field(None, gt=0, le=1e6, description="of its memory, 10⁹ bytes per second")
    power_watts: float | None = Field(None, gt=0, le=1e5, description="the most it draws")
    cores: int | None = Field(None, ge=1, le=MAX_CORES, description="cpu: what the figures are of")
    host_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="to its host's memory and back, 10⁹ bytes per second and direction"
    )
    link: str | None = Field(None, description="name of what joins devices in a node; default: unknown")
    link_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="of that link, per device and direction"
    )
    link_latency_microseconds: float | None = Field(
        None, ge=0, le=1e6, description="of that link; default: 0.6"
    )

    @field_validator("peak_teraflops")
    @classmethod
    def _known_precisions(cls, value: dict[str, float]) -> dict[str, float]:
        for precision, rate in value.items():
            if precision not in PRECISIONS:
                raise ValueError(
                    f"there is no precision '{precision}'.{did_you_mean(precision, PRECISIONS)} "
                    f"There are: {', '.join(PRECISIONS)}"
                )
            if not 0 < rate <= 1e6:
                raise ValueError(f"{precision} = {rate:g} must be more than 0 and at most 1,000,000")
        return value


class InterGroupSection(Section):
    """Link between nodes of different kinds, where it is not simply the slower of the two."""

    name: str = Field("between", description="what to call it")
    gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="10⁹ bytes per second, device and direction"
    )
    latency_microseconds: float | None = Field(None, ge=0, le=1e6, description="default: 2.7")


class ClusterFile(Section):
    """Contents of a whole cluster file."""

    nodes: list[NodesSection] = Field(min_length=1)
    devices: list[DeviceSection] = Field(default_factory=list)
    between: InterGroupSection = Field(default_factory=InterGroupSection)
