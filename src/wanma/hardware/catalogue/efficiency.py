"""Sustained fraction of the published peak and link bandwidth, by device kind.

`planner.hardware_model.efficiency_curves` has the dependence on operator shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class LinkEfficiency:
    """Share (0..1) of a link's bandwidth that collectives of very large messages reach."""

    two_devices: float
    many_devices: float
    """Share between more than two devices: lower where they share the host's bridges."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Efficiency of one kind of accelerator, beside the curves of its generation."""

    generation: str
    """Generation: a key of `wanma.planner.hardware_model.efficiency_curves.GENERATION_CURVES`."""
    multiprocessors: int
    """Number of units that compute one tile of a matrix product at a time."""
    sustained_fraction: float
    """Matrix-product rate over hours of training, as a share (0..1) of the isolated measurement."""
    estimate_basis: str = ""
    """Basis of the estimate for a kind that was never measured; empty: measured."""


_LIKE_A100 = "never measured; sustains as much as an A100"
_SCALED_BY_POWER = (
    "never measured; sustains as the SXM module, times the root of their ratio of watts per peak FLOP/s"
)
_LIKE_H100 = "measured operators; sustains as much as an H100, which has the same limit of power"
_LIKE_GB300 = "never measured; sustains as much as a GB300"
_MI300X = "never measured; curves from 620 TFLOP/s in bf16 and 990 in fp8 of large products, recalled"
_TPU = "never measured; a systolic array needs no tiles of its own and is not throttled"

DEVICE_EFFICIENCIES: Mapping[str, DeviceEfficiency] = MappingProxyType(
    {
        # Multiprocessors as the makers' architecture papers count them. Sustained rates are fitted by
        # `benchmarks.planner.sustain` to the half of the published rows that is for fitting, where a kind has
        # five of them without experts (GB200: with), or is the only one with its limit of power (HBM2e).
        "V100 SXM2 16 GB": DeviceEfficiency("volta", 80, 0.90, _LIKE_A100),
        "V100 SXM2 32 GB": DeviceEfficiency("volta", 80, 0.90, _LIKE_A100),
        "V100 PCIe 16 GB": DeviceEfficiency("volta", 80, 0.90, _LIKE_A100),
        "V100 PCIe 32 GB": DeviceEfficiency("volta", 80, 0.90, _LIKE_A100),
        "A100 SXM 40 GB": DeviceEfficiency("ampere", 108, 0.90),
        "A100 SXM 80 GB": DeviceEfficiency("ampere", 108, 0.90),
        # 0.90 × √(250 W / 400 W), and with 300 W.
        "A100 PCIe 40 GB": DeviceEfficiency("ampere", 108, 0.71, _SCALED_BY_POWER),
        "A100 PCIe 80 GB": DeviceEfficiency("ampere", 108, 0.78, _SCALED_BY_POWER),
        "H100 SXM": DeviceEfficiency("hopper", 132, 0.81),
        "H100 SXM 96 GB HBM2e": DeviceEfficiency("hopper", 132, 0.65),
        # 0.81 × √(W / (700 W × peak / 989.5)); for the card with 500 W above that rule says 0.68.
        "H100 PCIe": DeviceEfficiency("hopper", 114, 0.66, _SCALED_BY_POWER),
        "H100 NVL": DeviceEfficiency("hopper", 132, 0.67, _SCALED_BY_POWER),
        "H200 SXM": DeviceEfficiency("hopper", 132, 0.81, _LIKE_H100),
        "H200 NVL": DeviceEfficiency("hopper", 132, 0.82, _SCALED_BY_POWER),
        "B200": DeviceEfficiency("blackwell", 148, 0.62),
        "GB200": DeviceEfficiency("blackwell", 152, 0.79),
        "B300": DeviceEfficiency("blackwell", 148, 0.93, _LIKE_GB300),
        "GB300": DeviceEfficiency("blackwell", 152, 0.93),
        "L40S": DeviceEfficiency("ada", 142, 0.90, "measured operators; sustains as much as an A100"),
        # Halved rates of tensor cores (fp32 accumulation) leave these cards below their limit of power.
        "RTX 4090": DeviceEfficiency("ada geforce", 128, 0.90, _LIKE_A100),
        "RTX 3090": DeviceEfficiency("ampere", 82, 0.90, _LIKE_A100),
        "RTX 2080": DeviceEfficiency("volta", 46, 0.90, _LIKE_A100),
        "Titan RTX": DeviceEfficiency("volta", 72, 0.90, _LIKE_A100),
        "MI300X": DeviceEfficiency("cdna 3", 304, 0.90, _MI300X),
        # Two cores of four arrays.
        "TPU v4": DeviceEfficiency("tpu", 8, 0.95, _TPU),
        "TPU v5p": DeviceEfficiency("tpu", 8, 0.95, _TPU),
    }
)

LINK_EFFICIENCIES: Mapping[str, LinkEfficiency] = MappingProxyType(
    {
        # Fitted by `benchmarks.planner.fit` to gathers and scatters measured on A100 (231 GB/s), H100 (351)
        # and B200 (658); the second generation is taken to be like the third.
        "NVLink 2": LinkEfficiency(0.77, 0.77),
        "NVLink 3": LinkEfficiency(0.77, 0.77),
        "NVLink 4": LinkEfficiency(0.78, 0.78),
        "NVLink 5": LinkEfficiency(0.731, 0.731),
        # In the same measurements, gathers on a server of L40S reach 19.4 GB/s between two and 4.8 between
        # four, of 31.5: then the two pairs have 0.06 of it for each device. Between all eight it was 2; other
        # servers may do better, which `wanma bench machine --save` shows.
        "PCIe 3": LinkEfficiency(0.62, 0.06),
        "PCIe 4": LinkEfficiency(0.62, 0.06),
        "PCIe 5": LinkEfficiency(0.62, 0.06),
    }
)
DEFAULT_LINK_EFFICIENCY = LinkEfficiency(0.77, 0.77)
"""Assumed efficiency of other links, never measured: as NVLink."""
NETWORK_EFFICIENCY = LinkEfficiency(0.9, 0.9)
"""Share of a network card's rate left after headers and acknowledgements, assumed for all networks."""
