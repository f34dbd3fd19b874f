"""Accelerators of other makers: AMD's GPUs, and Google's TPUs, which wanma forecasts but does not run on."""

from __future__ import annotations

from wanma.hardware.catalogue.device_kind import (
    NVLINK_LATENCY_SECONDS,
    PCIE_5,
    PCIE_LATENCY_SECONDS,
    DeviceKind,
    make_accelerator,
    make_link,
    make_server,
)

_MI300X = "AMD Instinct MI300X datasheet (2023), figures without sparsity"
_TPU_V4 = "Jouppi et al., TPU v4 (ISCA 2023), table 4"
_TPU_V5P = "Google Cloud documentation, TPU v5p: 1,200 GB/s of interconnect in both directions"

_MI300X_RATES = {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
_MI300X_PLATFORM = make_server(
    "AMD Instinct MI300X platform datasheet (2023); host and network as in Dell's XE9680",
    8, 112, 2000, (8, 400),
)  # fmt: skip
_TPU_V4_HOST = make_server(
    "Google Cloud documentation, TPU v4: 4 chips a host", 4, 120, 407, (1, 100), servers_per_link_domain=1024
)
_TPU_V5P_HOST = make_server(
    "Google Cloud documentation, TPU v5p: 4 chips a host", 4, 104, 448, (1, 200), servers_per_link_domain=1536
)

OTHER_ACCELERATORS: tuple[DeviceKind, ...] = (
    make_accelerator(
        "MI300X", r"(amd )?(instinct )?mi300x( oam)?", _MI300X_RATES, 192, 5300, _MI300X,
        power_watts=750, host_link=PCIE_5, reference_server=_MI300X_PLATFORM,
        # Seven links of 64 GB/s and direction; latency assumed to be that of NVLink.
        device_link=make_link("Infinity Fabric", 448, NVLINK_LATENCY_SECONDS),
    ),
    make_accelerator(
        "TPU v4", r"(google )?tpu v4", {"bf16": 275.0}, 32, 1200, _TPU_V4,
        power_watts=192, device_link=make_link("ICI v4", 300, PCIE_LATENCY_SECONDS),
        reference_server=_TPU_V4_HOST, kind="other",
    ),
    make_accelerator(
        "TPU v5p", r"(google )?tpu v5p", {"bf16": 459.0}, 95, 2765, _TPU_V5P,
        power_watts=None, device_link=make_link("ICI v5p", 600, PCIE_LATENCY_SECONDS),
        reference_server=_TPU_V5P_HOST, kind="other",
    ),
)  # fmt: skip
