"""Processors: peaks of one socket from its instruction rates, at the all-core base clock.

No maker publishes matrix rates of whole processors. Per core and cycle: AVX2 with two FMA units does 32
fp32 operations, AVX-512 with two does 64 (half in fp64); AMX does 2,048 in bf16; AVX-512's dot product
doubles fp32 in bf16. The rate of a rented slice of a processor is measured (`measurement.cpu_peak`).
"""

from __future__ import annotations

from types import MappingProxyType

from wanma.hardware.catalogue.device_kind import GIGABYTE, DeviceKind

_INTEL = "Intel ARK, and the Intel 64 optimization reference manual (AMX: 2,048 bf16 operations a cycle)"
_AMD = "AMD EPYC product page, and the software optimization guide of the core"
_NVIDIA = "NVIDIA Grace CPU Superchip datasheet (2023), a half"


def _make_processor(
    name: str,
    driver_name_pattern: str,
    cores: int,
    gigahertz: float,
    operations: dict[str, int],
    gigabytes: int,
    bandwidth: float,
    power_watts: float,
    source: str,
    aliases: tuple[str, ...] = (),
) -> DeviceKind:
    """Return a processor's row of the catalogue.

    Args:
        name: unique name in the catalogue.
        driver_name_pattern: regular expression of the name in /proc/cpuinfo.
        cores: of one socket.
        gigahertz: all-core base clock.
        operations: floating-point operations per core and cycle, by precision.
        gigabytes: usual memory of a socket, in 10⁹ bytes.
        bandwidth: memory bandwidth in 10⁹ bytes per second.
        power_watts: maximum power draw of a socket.
        source: of the figures.
        aliases: other names in use.
    """
    rates = {precision: cores * gigahertz * 1e9 * count for precision, count in operations.items()}
    return DeviceKind(
        name=name,
        driver_name_pattern=driver_name_pattern,
        peak_flops_per_second=MappingProxyType(rates),
        memory_bytes=gigabytes * GIGABYTE,
        bandwidth_bytes_per_second=bandwidth * GIGABYTE,
        source=source,
        kind="cpu",
        power_watts=power_watts,
        cores=cores,
        aliases=aliases,
    )


_AMX = {"fp64": 32, "fp32": 64, "bf16": 2048}
_AVX512_BF16 = {"fp64": 16, "fp32": 32, "bf16": 64}
_AVX512 = {"fp64": 32, "fp32": 64}
_AVX2 = {"fp64": 16, "fp32": 32}
_NEON = {"fp64": 16, "fp32": 32, "bf16": 128}

PROCESSORS: tuple[DeviceKind, ...] = (
    _make_processor(
        "Xeon Platinum 8480+", r"intel\(r\) xeon\(r\) platinum 8480[+cl]*", 56, 2.0, _AMX,
        512, 307.2, 350, _INTEL, ("Xeon 8480+", "Xeon Platinum 8480C"),
    ),
    _make_processor(
        "Xeon Platinum 8380", r"intel\(r\) xeon\(r\) platinum 8380 cpu @ 2.30ghz", 40, 2.3, _AVX512,
        512, 204.8, 270, _INTEL, ("Xeon 8380",),
    ),
    _make_processor(
        "EPYC 7742", r"amd epyc 7742 64-core processor", 64, 2.25, _AVX2, 512, 204.8, 225, _AMD,
    ),
    _make_processor(
        "EPYC 9654", r"amd epyc 9654 96-core processor", 96, 2.4, _AVX512_BF16, 768, 460.8, 360, _AMD,
    ),
    _make_processor(
        "Grace", r"(nvidia )?grace", 72, 3.1, _NEON, 480, 512, 250, _NVIDIA, ("Grace CPU",),
    ),
)  # fmt: skip
