"""Device kinds and what their makers promise: dense peak rates, memory, bandwidth, each with its source.

Peaks are dense (no structured sparsity) and what a matrix product can reach through the vendor's
library: tensor-core FP64 where there is one, but FP32 without TensorFloat-32, because `fp32` here
means true fp32. They are the denominators of model FLOPs utilisation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TERA = 1e12
GIGABYTE = 10**9


@dataclass(frozen=True)
class DeviceKind:
    """One row of the catalogue."""

    name: str
    """Our name, unique: 'H100 SXM'."""
    driver_name: str
    """Regular expression that the whole name reported by the driver must match (case ignored)."""
    peak_flops_per_second: Mapping[str, float]
    """Dense peak by precision: fp64, fp32, tf32, bf16, fp16, fp8; a precision without hardware is absent."""
    memory_bytes: int
    """As sold; the driver reports a little less or more."""
    bandwidth_bytes_per_second: float
    source: str


def find_device(driver_name: str) -> DeviceKind | None:
    """The kind of device that a driver calls `driver_name`, e.g. 'NVIDIA H100 80GB HBM3'.

    None when it is not in the catalogue: laptop and export variants of the same chip and slices of a
    device (MIG) have other peaks, so only whole names match.
    """
    for kind in CATALOGUE:
        if re.fullmatch(kind.driver_name, driver_name.strip(), flags=re.IGNORECASE):
            return kind
    return None


def _kind(
    name: str, driver_name: str, teraflops: dict[str, float], gigabytes: int, bandwidth: float, source: str
) -> DeviceKind:
    """`bandwidth` in 10⁹ bytes per second."""
    return DeviceKind(
        name=name,
        driver_name=driver_name,
        peak_flops_per_second=MappingProxyType({key: value * TERA for key, value in teraflops.items()}),
        memory_bytes=gigabytes * GIGABYTE,
        bandwidth_bytes_per_second=bandwidth * GIGABYTE,
        source=source,
    )


_V100 = "NVIDIA V100 datasheet (DS-V100, January 2020)"
_A100 = "NVIDIA A100 datasheet (June 2021; the 40 GB PCIe card: November 2020)"
_H100 = "NVIDIA H100 datasheet (2023), figures with sparsity halved"
_H200 = "NVIDIA H200 datasheet (2024), figures with sparsity halved"
_B200 = "NVIDIA Blackwell architecture technical brief (2024), HGX B200, figures with sparsity halved"
_L40S = "NVIDIA L40S datasheet (2023), dense figures"
_ADA = "NVIDIA Ada GPU architecture whitepaper V2.01, appendix A, fp32 accumulation"
_MI300X = "AMD Instinct MI300X datasheet (2023), figures without sparsity"

_V100_SXM2_RATES = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_V100_PCIE_RATES = {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}
_A100_RATES = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_HOPPER_SXM_RATES = {
    "fp64": 67.0,
    "fp32": 67.0,
    "tf32": 494.5,
    "bf16": 989.5,
    "fp16": 989.5,
    "fp8": 1979.0,
}
_HOPPER_NVL_RATES = {
    "fp64": 60.0,
    "fp32": 60.0,
    "tf32": 417.5,
    "bf16": 835.5,
    "fp16": 835.5,
    "fp8": 1670.5,
}
_H100_PCIE_RATES = {"fp64": 51.0, "fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5, "fp8": 1513.0}
_B200_RATES = {"fp64": 40.0, "fp32": 80.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_L40S_RATES = {"fp64": 1.4, "fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0}
_RTX_4090_RATES = {"fp64": 1.3, "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_MI300X_RATES = {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}

CATALOGUE: tuple[DeviceKind, ...] = (
    _kind("V100 SXM2 16 GB", r"(nvidia |tesla )*v100-sxm2-16gb", _V100_SXM2_RATES, 16, 900, _V100),
    _kind("V100 SXM2 32 GB", r"(nvidia |tesla )*v100-sxm2-32gb", _V100_SXM2_RATES, 32, 900, _V100),
    _kind("V100 PCIe 16 GB", r"(nvidia |tesla )*v100-pcie-16gb", _V100_PCIE_RATES, 16, 900, _V100),
    _kind("V100 PCIe 32 GB", r"(nvidia |tesla )*v100-pcie-32gb", _V100_PCIE_RATES, 32, 900, _V100),
    _kind("A100 SXM 40 GB", r"(nvidia )?a100-sxm4-40gb", _A100_RATES, 40, 1555, _A100),
    _kind("A100 PCIe 40 GB", r"(nvidia )?a100-pcie-40gb", _A100_RATES, 40, 1555, _A100),
    _kind("A100 SXM 80 GB", r"(nvidia )?a100-sxm4-80gb", _A100_RATES, 80, 2039, _A100),
    _kind("A100 PCIe 80 GB", r"(nvidia )?a100( 80gb pcie|-pcie-80gb)", _A100_RATES, 80, 1935, _A100),
    _kind("H100 SXM", r"(nvidia )?h100( 80gb hbm3|-sxm5-80gb)", _HOPPER_SXM_RATES, 80, 3350, _H100),
    _kind("H100 PCIe", r"(nvidia )?h100( pcie|-pcie-80gb)", _H100_PCIE_RATES, 80, 2000, _H100),
    _kind("H100 NVL", r"(nvidia )?h100 nvl", _HOPPER_NVL_RATES, 94, 3900, _H100),
    _kind("H200 SXM", r"(nvidia )?h200", _HOPPER_SXM_RATES, 141, 4800, _H200),
    _kind("H200 NVL", r"(nvidia )?h200 nvl", _HOPPER_NVL_RATES, 141, 4800, _H200),
    _kind("B200", r"(nvidia )?b200", _B200_RATES, 192, 8000, _B200),
    _kind("L40S", r"(nvidia )?l40s", _L40S_RATES, 48, 864, _L40S),
    _kind("RTX 4090", r"(nvidia )?(geforce )?rtx 4090", _RTX_4090_RATES, 24, 1008, _ADA),
    _kind("MI300X", r"(amd )?(instinct )?mi300x( oam)?", _MI300X_RATES, 192, 5300, _MI300X),
)
