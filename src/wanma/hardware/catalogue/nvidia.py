"""NVIDIA's devices: peaks as `lookup` defines them, their reference servers, and every source."""

from __future__ import annotations

from wanma.hardware.catalogue.device_kind import (
    NVLINK_LATENCY_SECONDS,
    PCIE_3,
    PCIE_4,
    PCIE_5,
    DeviceKind,
    make_accelerator,
    make_link,
    make_server,
)

_V100 = "NVIDIA V100 datasheet (DS-V100, January 2020)"
_A100 = "NVIDIA A100 datasheet (June 2021; the 40 GB PCIe card: November 2020)"
_H100 = "NVIDIA H100 datasheet (2023), figures with sparsity halved"
_H100_96 = f"{_H100}; memory and limit of 500 W as torchtitan's docs/results/performance.md states them"
_H200 = "NVIDIA H200 datasheet (2024), figures with sparsity halved"
_B200 = "NVIDIA Blackwell architecture technical brief (2024), HGX B200, figures with sparsity halved"
_GB200 = "NVIDIA GB200 NVL72 datasheet (2024), a 72nd of the rack, figures with sparsity halved"
_B300 = "NVIDIA HGX platform page (2025), HGX B300, an eighth, figures with sparsity halved"
_GB300 = "NVIDIA GB300 NVL72 page (2025), a 72nd of the rack, figures with sparsity halved"
_L40S = "NVIDIA L40S datasheet (2023), dense figures"
_ADA = "NVIDIA Ada GPU architecture whitepaper V2.01, appendix A, fp32 accumulation"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper V2.1, appendix A, fp32 accumulation, dense"
_TURING = "NVIDIA Turing GPU architecture whitepaper (2018), appendix A, reference clocks, fp32 accumulation"
_TITAN = "NVIDIA TITAN RTX product page (2018); true fp32 and fp64 from 4,608 cores at 1,770 MHz"

NVLINK_2 = make_link("NVLink 2", 150, NVLINK_LATENCY_SECONDS)
NVLINK_3 = make_link("NVLink 3", 300, NVLINK_LATENCY_SECONDS)
NVLINK_4 = make_link("NVLink 4", 450, NVLINK_LATENCY_SECONDS)
NVLINK_5 = make_link("NVLink 5", 900, NVLINK_LATENCY_SECONDS)
"""NVLink per direction: half of the datasheets' figure for both (300, 600, 900 and 1,800 GB/s)."""
NVLINK_C2C = make_link("NVLink-C2C", 225, NVLINK_LATENCY_SECONDS)
"""Host link of each of Grace's two GPUs, per direction: a quarter of 900 GB/s (GB200, GB300 datasheets).

Other GPUs reach their host by PCIe as their datasheets say: 3 (V100), 4 (A100) or 5 (Hopper, HGX B200
and B300).
"""

_DGX_1 = make_server("NVIDIA DGX-1 with V100 datasheet (2018)", 8, 40, 512, (4, 100), 3500)
_DGX_A100_320 = make_server("NVIDIA DGX A100 datasheet (2020), 8 × 40 GB", 8, 128, 1000, (8, 200), 6500)
_DGX_A100_640 = make_server("NVIDIA DGX A100 datasheet (2021), 8 × 80 GB", 8, 128, 2000, (8, 200), 6500)
_DGX_H100 = make_server("NVIDIA DGX H100 datasheet (2023)", 8, 112, 2000, (8, 400), 10200)
_DGX_B200 = make_server("NVIDIA DGX B200 datasheet (2024)", 8, 112, 2000, (8, 400), 14300)
_DGX_B300 = make_server("NVIDIA DGX B300 datasheet (2025)", 8, 128, 2000, (8, 800), 14000)
_NVL72 = make_server("NVIDIA DGX GB200 user guide (2025), one of 18 trays", 4, 144, 960, (4, 400), 6700, 18)
_NVL72_ULTRA = make_server(
    "NVIDIA DGX GB300 user guide (2025), one of 18 trays", 4, 144, 960, (4, 800), 7300, 18
)
_PCIE_SERVER = make_server("assumed: a two-socket server with eight cards", 8, 64, 512, (2, 200))
_SMALL_SERVER = make_server("assumed: a two-socket server with eight cards", 8, 32, 256, (1, 100))

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
_B200_RATES = {
    "fp64": 40.0,
    "fp32": 80.0,
    "tf32": 1100.0,
    "bf16": 2250.0,
    "fp16": 2250.0,
    "fp8": 4500.0,
    "nvfp4": 9000.0,
}
_GB200_RATES = {
    "fp64": 40.0,
    "fp32": 80.0,
    "tf32": 1250.0,
    "bf16": 2500.0,
    "fp16": 2500.0,
    "fp8": 5000.0,
    "nvfp4": 10000.0,
}
_B300_RATES = {
    "fp64": 1.25,
    "fp32": 75.0,
    "tf32": 1125.0,
    "bf16": 2250.0,
    "fp16": 2250.0,
    "fp8": 4500.0,
    "nvfp4": 13500.0,
}
_GB300_RATES = {
    "fp64": 1.4,
    "fp32": 83.3,
    "tf32": 1250.0,
    "bf16": 2500.0,
    "fp16": 2500.0,
    "fp8": 5000.0,
    "nvfp4": 15000.0,
}
_L40S_RATES = {"fp64": 1.4, "fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0}
_RTX_4090_RATES = {"fp64": 1.3, "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_RTX_3090_RATES = {"fp64": 0.56, "fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}
_RTX_2080_RATES = {"fp64": 0.31, "fp32": 10.0, "fp16": 40.3}
_TITAN_RTX_RATES = {"fp64": 0.51, "fp32": 16.3, "fp16": 130.5}

NVIDIA: tuple[DeviceKind, ...] = (
    make_accelerator(
        "V100 SXM2 16 GB", r"(nvidia |tesla )*v100-sxm2-16gb", _V100_SXM2_RATES, 16, 900, _V100,
        power_watts=300, device_link=NVLINK_2, host_link=PCIE_3, reference_server=_DGX_1,
        aliases=("V100 SXM 16 GB", "V100 16 GB", "V100"),
    ),
    make_accelerator(
        "V100 SXM2 32 GB", r"(nvidia |tesla )*v100-sxm2-32gb", _V100_SXM2_RATES, 32, 900, _V100,
        power_watts=300, device_link=NVLINK_2, host_link=PCIE_3, reference_server=_DGX_1,
        aliases=("V100 SXM 32 GB", "V100 32 GB"),
    ),
    make_accelerator(
        "V100 PCIe 16 GB", r"(nvidia |tesla )*v100-pcie-16gb", _V100_PCIE_RATES, 16, 900, _V100,
        power_watts=250, device_link=PCIE_3, reference_server=_SMALL_SERVER, aliases=("V100 PCIe",),
    ),
    make_accelerator(
        "V100 PCIe 32 GB", r"(nvidia |tesla )*v100-pcie-32gb", _V100_PCIE_RATES, 32, 900, _V100,
        power_watts=250, device_link=PCIE_3, reference_server=_SMALL_SERVER,
    ),
    make_accelerator(
        "A100 SXM 40 GB", r"(nvidia )?a100-sxm4-40gb", _A100_RATES, 40, 1555, _A100,
        power_watts=400, device_link=NVLINK_3, host_link=PCIE_4, reference_server=_DGX_A100_320,
        aliases=("A100 40 GB", "A100 SXM4 40 GB", "A100-SXM-40GB (DGX-A100)", "DGX A100 40 GB"),
    ),
    make_accelerator(
        "A100 PCIe 40 GB", r"(nvidia )?a100-pcie-40gb", _A100_RATES, 40, 1555, _A100,
        power_watts=250, device_link=PCIE_4, reference_server=_PCIE_SERVER,
    ),
    make_accelerator(
        "A100 SXM 80 GB", r"(nvidia )?a100-sxm4-80gb", _A100_RATES, 80, 2039, _A100,
        power_watts=400, device_link=NVLINK_3, host_link=PCIE_4, reference_server=_DGX_A100_640,
        aliases=("A100", "A100 SXM", "A100 80 GB", "A100 SXM4 80 GB", "DGX A100"),
    ),
    make_accelerator(
        "A100 PCIe 80 GB", r"(nvidia )?a100( 80gb pcie|-pcie-80gb)", _A100_RATES, 80, 1935, _A100,
        power_watts=300, device_link=PCIE_4, reference_server=_PCIE_SERVER, aliases=("A100 PCIe",),
    ),
    make_accelerator(
        "H100 SXM", r"(nvidia )?h100( 80gb hbm3|-sxm5-80gb)", _HOPPER_SXM_RATES, 80, 3350, _H100,
        power_watts=700, device_link=NVLINK_4, host_link=PCIE_5, reference_server=_DGX_H100,
        aliases=("H100", "H100 80 GB", "H100 SXM 80 GB", "H100 SXM5", "H100 SXM5 80 GB", "DGX H100"),
    ),
    make_accelerator(
        "H100 SXM 96 GB HBM2e", r"(nvidia )?h100 96gb hbm2e", _HOPPER_SXM_RATES, 96, 2400, _H100_96,
        power_watts=500, device_link=NVLINK_4, host_link=PCIE_5, reference_server=_DGX_H100,
        aliases=("H100-96GB-HBM2e-500W", "H100 96 GB"),
    ),
    make_accelerator(
        "H100 PCIe", r"(nvidia )?h100( pcie|-pcie-80gb)", _H100_PCIE_RATES, 80, 2000, _H100,
        power_watts=350, device_link=PCIE_5, reference_server=_PCIE_SERVER, aliases=("H100 PCIe 80 GB",),
    ),
    make_accelerator(
        "H100 NVL", r"(nvidia )?h100 nvl", _HOPPER_NVL_RATES, 94, 3900, _H100,
        power_watts=400, device_link=PCIE_5, reference_server=_PCIE_SERVER,
    ),
    make_accelerator(
        "H200 SXM", r"(nvidia )?h200", _HOPPER_SXM_RATES, 141, 4800, _H200,
        power_watts=700, device_link=NVLINK_4, host_link=PCIE_5, reference_server=_DGX_H100,
        aliases=("H200", "H200 141 GB", "DGX H200"),
    ),
    make_accelerator(
        "H200 NVL", r"(nvidia )?h200 nvl", _HOPPER_NVL_RATES, 141, 4800, _H200,
        power_watts=600, device_link=PCIE_5, reference_server=_PCIE_SERVER,
    ),
    make_accelerator(
        "B200", r"(nvidia )?b200", _B200_RATES, 192, 8000, _B200,
        power_watts=1000, device_link=NVLINK_5, host_link=PCIE_5, reference_server=_DGX_B200,
        aliases=("B200 SXM", "DGX B200"),
    ),
    make_accelerator(
        "GB200", r"(nvidia )?gb200", _GB200_RATES, 186, 8000, _GB200,
        power_watts=1200, device_link=NVLINK_5, host_link=NVLINK_C2C, reference_server=_NVL72,
        aliases=("GB200 NVL72",),
    ),
    make_accelerator(
        "B300", r"(nvidia )?b300( sxm6 ac)?", _B300_RATES, 270, 8000, _B300,
        power_watts=1100, device_link=NVLINK_5, host_link=PCIE_5, reference_server=_DGX_B300,
        aliases=("B300 SXM", "DGX B300"),
    ),
    make_accelerator(
        "GB300", r"(nvidia )?gb300", _GB300_RATES, 279, 8000, _GB300,
        power_watts=1400, device_link=NVLINK_5, host_link=NVLINK_C2C, reference_server=_NVL72_ULTRA,
        aliases=("GB300 NVL72",),
    ),
    make_accelerator(
        "L40S", r"(nvidia )?l40s", _L40S_RATES, 48, 864, _L40S,
        power_watts=350, device_link=PCIE_4, reference_server=_PCIE_SERVER,
    ),
    make_accelerator(
        "RTX 4090", r"(nvidia )?(geforce )?rtx 4090", _RTX_4090_RATES, 24, 1008, _ADA,
        power_watts=450, device_link=PCIE_4, reference_server=_SMALL_SERVER,
    ),
    make_accelerator(
        "RTX 3090", r"(nvidia )?(geforce )?rtx 3090", _RTX_3090_RATES, 24, 936, _AMPERE,
        power_watts=350, device_link=PCIE_4, reference_server=_SMALL_SERVER,
    ),
    make_accelerator(
        "RTX 2080", r"(nvidia )?(geforce )?rtx 2080", _RTX_2080_RATES, 8, 448, _TURING,
        power_watts=215, device_link=PCIE_3, reference_server=_SMALL_SERVER,
    ),
    make_accelerator(
        "Titan RTX", r"(nvidia )?titan rtx", _TITAN_RTX_RATES, 24, 672, _TITAN,
        power_watts=280, device_link=PCIE_3, reference_server=_SMALL_SERVER,
    ),
)  # fmt: skip
