"""What the catalogue says of one kind of device, and how such a row becomes part of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wanma.hardware.catalogue.efficiency import ATTAINED, Attained
from wanma.job.cluster import Device, DeviceClass, Level

TERA = 1e12
GIGABYTE = 10**9
MICROSECOND = 1e-6

NVLINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 0.6e-6, 1.0e-6, 2.7e-6
"""Latency of a hop: ring, LL protocol, in NCCL's tuning model (src/graph/tuning.cc, `hwLat`)."""


@dataclass(frozen=True)
class Link:
    """How devices of one kind are joined."""

    name: str
    bandwidth_bytes_per_second: float
    """Per direction and device."""
    latency_seconds: float

    def level(self, size: int | None = None) -> Level:
        return Level(self.name, self.bandwidth_bytes_per_second, self.latency_seconds, size)


@dataclass(frozen=True)
class Server:
    """The machine that a kind of device usually comes in; what a cluster file leaves out follows it."""

    source: str
    devices: int
    cores: int
    memory_bytes: int
    nics: int
    nic_bits_per_second: float
    power_watts: float | None = None
    """Of the whole machine at full load, as its maker states."""
    linked: int = 1
    """Machines whose devices share the device link (72 GPUs of an NVL72 are in 18 machines)."""


@dataclass(frozen=True)
class DeviceKind:
    """One row of the catalogue."""

    name: str
    """Our name, unique: 'H100 SXM'."""
    driver_name: str
    """Regular expression that the whole name reported by the driver must match (case ignored)."""
    peak_flops_per_second: Mapping[str, float] = field(hash=False)
    """Dense peak by precision: fp64, fp32, tf32, bf16, fp16, fp8, nvfp4; without hardware for it, absent."""
    memory_bytes: int
    """As sold; the driver reports a little less or more."""
    bandwidth_bytes_per_second: float | None
    """Of its memory; None where nobody says."""
    source: str
    kind: DeviceClass = "cuda"
    power_watts: float | None = None
    """The most it may draw (TDP); None where its maker does not say."""
    link: Link | None = None
    host_link: Link | None = None
    """Between an accelerator and its host; None where nobody says."""
    server: Server | None = None
    attained: Attained | None = None
    """Of an accelerator of the catalogue; None of one that a cluster file describes."""
    cores: int = 0
    """Of a processor."""
    aliases: tuple[str, ...] = ()
    """Other names people use; spaces, dashes and case do not matter."""

    def device(self) -> Device:
        """The device as part of a cluster."""
        return Device(
            self.kind,
            self.name,
            self.memory_bytes,
            dict(self.peak_flops_per_second),
            self.bandwidth_bytes_per_second,
            self.power_watts,
            self.host_link.bandwidth_bytes_per_second if self.host_link else None,
        )

    def processors(self, cores: int, memory_bytes: int) -> Device:
        """`cores` of this processor as one device; what they reach follows their number."""
        share = cores / self.cores
        peak = {precision: rate * share for precision, rate in self.peak_flops_per_second.items()}
        bandwidth, power = self.bandwidth_bytes_per_second, self.power_watts
        return Device(
            "cpu",
            self.name,
            memory_bytes,
            peak,
            None if bandwidth is None else bandwidth * share,
            None if power is None else power * share,
        )


def link(name: str, gigabytes_per_second: float, seconds: float) -> Link:
    """`gigabytes_per_second` in 10⁹ bytes per second, per direction."""
    return Link(name, gigabytes_per_second * GIGABYTE, seconds)


def server(
    source: str,
    devices: int,
    cores: int,
    gigabytes: int,
    nics: tuple[int, float],
    watts: float | None = None,
    linked: int = 1,
) -> Server:
    """`nics`: how many cards, and the Gbit/s of each."""
    number, gigabits = nics
    return Server(
        source, devices, cores, gigabytes * GIGABYTE, number, gigabits * GIGABYTE, watts, linked=linked
    )


def accelerator(
    name: str,
    driver_name: str,
    teraflops: Mapping[str, float],
    gigabytes: float,
    bandwidth: float,
    source: str,
    *,
    watts: float | None,
    joined: Link,
    comes_in: Server,
    host: Link | None = None,
    aliases: tuple[str, ...] = (),
    kind: DeviceClass = "cuda",
) -> DeviceKind:
    """`bandwidth` in 10⁹ bytes per second; cards that PCIe joins reach their host by the same lanes."""
    return DeviceKind(
        name=name,
        driver_name=driver_name,
        peak_flops_per_second=MappingProxyType({key: value * TERA for key, value in teraflops.items()}),
        memory_bytes=round(gigabytes * GIGABYTE),
        bandwidth_bytes_per_second=bandwidth * GIGABYTE,
        source=source,
        kind=kind,
        power_watts=watts,
        link=joined,
        host_link=joined if joined in (PCIE_3, PCIE_4, PCIE_5) else host,
        server=comes_in,
        attained=ATTAINED[name],
        aliases=aliases,
    )


PCIE_3 = link("PCIe 3", 15.75, PCIE_SECONDS)
PCIE_4 = link("PCIe 4", 31.5, PCIE_SECONDS)
PCIE_5 = link("PCIe 5", 63.0, PCIE_SECONDS)
"""Sixteen lanes: 8, 16 and 32 GT/s with 128b/130b coding (PCI-SIG)."""
