"""Record of a device kind in the catalogue, with its link and reference server."""

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
"""Latency in seconds of one hop (ring algorithm, LL protocol) in NCCL's tuning model.

Source: src/graph/tuning.cc, `hwLat`.
"""


@dataclass(frozen=True)
class Link:
    """Link that joins devices of one kind."""

    name: str
    bandwidth_bytes_per_second: float
    """Bandwidth per direction and device, in bytes per second."""
    latency_seconds: float

    def level(self, size: int | None = None) -> Level:
        return Level(self.name, self.bandwidth_bytes_per_second, self.latency_seconds, size)


@dataclass(frozen=True)
class Server:
    """Reference server: the one that a device kind is usually sold in; source of defaults."""

    source: str
    devices: int
    cores: int
    memory_bytes: int
    nics: int
    nic_bits_per_second: float
    power_watts: float | None = None
    """Power of the whole server at full load, in watts, as its maker states; None: unknown."""
    linked: int = 1
    """Servers whose devices share one device link (72 GPUs of an NVL72 sit in 18 servers)."""


@dataclass(frozen=True)
class DeviceKind:
    """Row of the device catalogue."""

    name: str
    """Unique name in the catalogue, such as 'H100 SXM'."""
    driver_name: str
    """Regular expression that the whole name reported by the driver must match (case ignored)."""
    peak_flops_per_second: Mapping[str, float] = field(hash=False)
    """Dense peak in FLOP/s by precision; a precision without hardware support is absent.

    Precisions: fp64, fp32, tf32, bf16, fp16, fp8, nvfp4.
    """
    memory_bytes: int
    """Nominal memory in bytes; the driver reports a little less or more."""
    bandwidth_bytes_per_second: float | None
    """Memory bandwidth in bytes per second; None: not published."""
    source: str
    kind: DeviceClass = "cuda"
    power_watts: float | None = None
    """Maximum power draw (TDP) in watts; None: not published."""
    link: Link | None = None
    host_link: Link | None = None
    """Link between an accelerator and its host; None: not published."""
    server: Server | None = None
    attained: Attained | None = None
    """Sustained efficiency of a catalogued accelerator; None for a device that a cluster file describes."""
    cores: int = 0
    """Cores of a processor; 0 for an accelerator."""
    aliases: tuple[str, ...] = ()
    """Other names in use; spaces, dashes and case do not matter."""

    def device(self) -> Device:
        """Return the device as part of a cluster."""
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
        """Return `cores` of this processor as one device, with proportional peak, bandwidth and power."""
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
    """Return a link from its bandwidth in 10⁹ bytes per second and direction, and its latency in seconds."""
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
    """Return a reference server; `nics` is the number of network cards and the Gbit/s of each."""
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
    """Return an accelerator's row of the catalogue.

    PCIe cards reach their host by the same lanes that join them.

    Args:
        name: unique name in the catalogue.
        driver_name: regular expression of the driver's name.
        teraflops: dense peak in 10¹² FLOP/s by precision.
        gigabytes: memory in 10⁹ bytes.
        bandwidth: memory bandwidth in 10⁹ bytes per second.
        source: of the figures.
        watts: maximum power draw; None: not published.
        joined: link between devices.
        comes_in: reference server.
        host: link to the host, of devices that PCIe does not join.
        aliases: other names in use.
        kind: class of the device.
    """
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
"""Links of sixteen lanes: 8, 16 and 32 GT/s with 128b/130b coding (PCI-SIG)."""
