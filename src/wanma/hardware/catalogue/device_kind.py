"""Record of a device kind in the catalogue, with its link and reference server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wanma.hardware.catalogue.efficiency import DEVICE_EFFICIENCIES, DeviceEfficiency
from wanma.job.cluster import Device, DeviceClass, InterconnectLevel

TERA = 1e12
GIGABYTE = 10**9


NVLINK_LATENCY_SECONDS, PCIE_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 0.6e-6, 1.0e-6, 2.7e-6
"""Latency in seconds of one hop (ring algorithm, LL protocol) in NCCL's tuning model.

Source: src/graph/tuning.cc, `hwLat`.
"""


@dataclass(frozen=True)
class DeviceLink:
    """Link that joins devices of one kind."""

    name: str
    bandwidth_bytes_per_second: float
    """Bandwidth per direction and device, in bytes per second."""
    latency_seconds: float

    def to_level(self, size: int | None = None) -> InterconnectLevel:
        return InterconnectLevel(self.name, self.bandwidth_bytes_per_second, self.latency_seconds, size)


@dataclass(frozen=True)
class ReferenceServer:
    """Reference server: the one that a device kind is usually sold in; source of defaults."""

    source: str
    devices: int
    cores: int
    memory_bytes: int
    nic_count: int
    nic_bits_per_second: float
    power_watts: float | None = None
    """Power of the whole server at full load, in watts, as its maker states; None: unknown."""
    servers_per_link_domain: int = 1
    """Servers whose devices share one device link (72 GPUs of an NVL72 sit in 18 servers)."""


@dataclass(frozen=True)
class DeviceKind:
    """Row of the device catalogue."""

    name: str
    """Unique name in the catalogue, such as 'H100 SXM'."""
    driver_name_pattern: str
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
    link: DeviceLink | None = None
    host_link: DeviceLink | None = None
    """Link between an accelerator and its host; None: not published."""
    server: ReferenceServer | None = None
    efficiency: DeviceEfficiency | None = None
    """Sustained efficiency of a catalogued accelerator; None for a device that a cluster file describes."""
    cores: int = 0
    """Cores of a processor; 0 for an accelerator."""
    aliases: tuple[str, ...] = ()
    """Other names in use; spaces, dashes and case do not matter."""

    def to_device(self) -> Device:
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

    def to_processor(self, cores: int, memory_bytes: int) -> Device:
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


def make_link(name: str, gigabytes_per_second: float, latency_seconds: float) -> DeviceLink:
    """Return a link from its bandwidth in 10⁹ bytes per second and direction, and its latency in seconds."""
    return DeviceLink(name, gigabytes_per_second * GIGABYTE, latency_seconds)


def make_server(
    source: str,
    devices: int,
    cores: int,
    gigabytes: int,
    nics: tuple[int, float],
    power_watts: float | None = None,
    servers_per_link_domain: int = 1,
) -> ReferenceServer:
    """Return a reference server; `nics` is the number of network cards and the Gbit/s of each."""
    number, gigabits = nics
    return ReferenceServer(
        source,
        devices,
        cores,
        gigabytes * GIGABYTE,
        number,
        gigabits * GIGABYTE,
        power_watts,
        servers_per_link_domain=servers_per_link_domain,
    )


def make_accelerator(
    name: str,
    driver_name_pattern: str,
    teraflops: Mapping[str, float],
    gigabytes: float,
    bandwidth: float,
    source: str,
    *,
    power_watts: float | None,
    device_link: DeviceLink,
    reference_server: ReferenceServer,
    host_link: DeviceLink | None = None,
    aliases: tuple[str, ...] = (),
    kind: DeviceClass = "cuda",
) -> DeviceKind:
    """Return an accelerator's row of the catalogue.

    PCIe cards reach their host by the same lanes that join them.

    Args:
        name: unique name in the catalogue.
        driver_name_pattern: regular expression of the driver's name.
        teraflops: dense peak in 10¹² FLOP/s by precision.
        gigabytes: memory in 10⁹ bytes.
        bandwidth: memory bandwidth in 10⁹ bytes per second.
        source: of the figures.
        power_watts: maximum power draw; None: not published.
        device_link: link between devices.
        reference_server: reference server.
        host_link: link to the host, of devices that PCIe does not join.
        aliases: other names in use.
        kind: class of the device.
    """
    return DeviceKind(
        name=name,
        driver_name_pattern=driver_name_pattern,
        peak_flops_per_second=MappingProxyType({key: value * TERA for key, value in teraflops.items()}),
        memory_bytes=round(gigabytes * GIGABYTE),
        bandwidth_bytes_per_second=bandwidth * GIGABYTE,
        source=source,
        kind=kind,
        power_watts=power_watts,
        link=device_link,
        host_link=device_link if device_link in (PCIE_3, PCIE_4, PCIE_5) else host_link,
        server=reference_server,
        efficiency=DEVICE_EFFICIENCIES[name],
        aliases=aliases,
    )


PCIE_3 = make_link("PCIe 3", 15.75, PCIE_LATENCY_SECONDS)
PCIE_4 = make_link("PCIe 4", 31.5, PCIE_LATENCY_SECONDS)
PCIE_5 = make_link("PCIe 5", 63.0, PCIE_LATENCY_SECONDS)
"""Links of sixteen lanes: 8, 16 and 32 GT/s with 128b/130b coding (PCI-SIG)."""
