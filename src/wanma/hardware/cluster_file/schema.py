"""Schema of a cluster file: one typed section per table, with bounds and one-line help; no behavior."""

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

    name: str = Field(description="name of the level, e.g. 'NVLink', 'rail', 'rack', 'spine'")
    inside: bool = Field(False, description="true: joins the devices of one node; false: joins nodes")
    size: int | None = Field(
        None,
        ge=2,
        le=MAX_NODES,
        description="number of devices (inside) or nodes that it joins; default: all",
    )
    gb_per_second: float | None = Field(
        None,
        gt=0,
        le=1e5,
        description="10⁹ bytes per second, device and direction; default: bandwidth of the device link or "
        "the NICs",
    )
    latency_microseconds: float | None = Field(
        None, ge=0, le=1e6, description="latency; default: 2.7, inside a node 0.6"
    )


class NodesSection(Section):
    """Group of `count` equal nodes."""

    count: int = Field(1, ge=1, le=MAX_NODES, description="number of nodes")
    device: str | None = Field(
        None, description="accelerator: a name of the catalogue or of [[devices]]; default: none"
    )
    devices: int | None = Field(
        None,
        ge=1,
        le=MAX_DEVICES,
        description="accelerators of one node; default: as in the reference server of the device",
    )
    network: str | None = Field(
        None,
        description="NICs of one node and Gbit/s of each, '4x100G'; 'none': unknown; default: as in the "
        "reference server",
    )
    cpu: str | None = Field(None, description="processor: a name of the catalogue or of [[devices]]")
    cores: int | None = Field(
        None, ge=1, le=MAX_CORES, description="CPU cores of one node; default: as in the reference server"
    )
    memory_gb: float | None = Field(
        None,
        ge=0.001,
        le=1e6,
        description="host memory of one node, 10⁹ bytes; default: as in the reference server",
    )
    power_watts: float | None = Field(None, gt=0, le=1e6, description="power of one node at full load")
    price_per_hour: float | None = Field(
        None, gt=0, le=1e6, description="price of one node; one currency for the whole file"
    )
    disk_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="write rate of the local disks of one node, 10⁹ bytes per second"
    )
    store_gb_per_second: float | None = Field(
        None,
        gt=0,
        le=1e5,
        description="bandwidth of one node to remote storage of data (s3://, ...), 10⁹ bytes per second",
    )
    store_latency_milliseconds: float | None = Field(
        None, ge=0, le=1e5, description="time of a request to that storage until its first byte"
    )
    days_between_failures: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="mean days between failures of one node; default: the rate of the Llama 3 training run",
    )
    name: str | None = Field(None, description="name in messages; default: the name of the device")
    hosts: list[str] = Field(
        default_factory=list,
        description="host names, neighbours in the network next to each other: ['a[01-08]', 'b1']; node "
        "ranks follow this order",
    )
    levels: list[LevelSection] = Field(default_factory=list, description="interconnect levels")


class DeviceSection(Section):
    """Device that is missing in the catalogue, or has other figures there."""

    name: str = Field(description="name that [[nodes]] refers to")
    kind: Literal["cuda", "other", "cpu"] = Field(
        "cuda", description="cuda: an NVIDIA or AMD GPU; other: for planning only; cpu: a processor"
    )
    memory_gb: float = Field(ge=0.001, le=1e6, description="memory, 10⁹ bytes")
    peak_teraflops: dict[str, float] = Field(
        default_factory=dict, description="dense peak TFLOP/s by precision: { bf16 = 312, fp32 = 19.5 }"
    )
    gb_per_second: float | None = Field(
        None, gt=0, le=1e6, description="memory bandwidth, 10⁹ bytes per second"
    )
    power_watts: float | None = Field(None, gt=0, le=1e5, description="maximum power")
    cores: int | None = Field(
        None, ge=1, le=MAX_CORES, description="cpu: number of cores that the figures refer to"
    )
    host_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="bandwidth to host memory, 10⁹ bytes per second and direction"
    )
    link: str | None = Field(
        None, description="name of the link that joins devices in a node; default: unknown"
    )
    link_gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="bandwidth of the link, 10⁹ bytes per second, device and direction"
    )
    link_latency_microseconds: float | None = Field(
        None, ge=0, le=1e6, description="latency of the link; default: 0.6"
    )

    @field_validator("peak_teraflops")
    @classmethod
    def _known_precisions(cls, value: dict[str, float]) -> dict[str, float]:
        for precision, rate in value.items():
            if precision not in PRECISIONS:
                raise ValueError(
                    f"'{precision}' is not a precision.{did_you_mean(precision, PRECISIONS)} "
                    f"Choose from: {', '.join(PRECISIONS)}"
                )
            if not 0 < rate <= 1e6:
                raise ValueError(f"{precision} = {rate:g} must be more than 0 and at most 1,000,000")
        return value


class InterGroupSection(Section):
    """Link between nodes of different kinds, where it is not simply the slower of the two."""

    name: str = Field("between", description="name in messages")
    gb_per_second: float | None = Field(
        None, gt=0, le=1e5, description="bandwidth, 10⁹ bytes per second, device and direction"
    )
    latency_microseconds: float | None = Field(None, ge=0, le=1e6, description="latency; default: 2.7")


class ClusterFile(Section):
    """Contents of a whole cluster file."""

    nodes: list[NodesSection] = Field(min_length=1)
    devices: list[DeviceSection] = Field(default_factory=list)
    between: InterGroupSection = Field(default_factory=InterGroupSection)
