"""Sustained fraction of the published peak and link bandwidth, by device kind.

`planner.hardware_model.efficiency_curves` has the dependence on operator shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class LinkShare:
    """Share (0..1) of a link's bandwidth that collectives of very large messages reach."""

    of_pair: float
    of_more: float
    """Share between more than two devices: lower where they share the host's bridges."""


@dataclass(frozen=True)
class Attained:
    """Efficiency of one kind of accelerator, beside the curves of its generation."""

    generation: str
    """Generation: a key of `wanma.planner.hardware_model.efficiency_curves.GENERATIONS`."""
    multiprocessors: int
    """Number of units that compute one tile of a matrix product at a time."""
    sustained: float
    """Matrix-product rate over hours of training, as a share (0..1) of the isolated measurement."""
    guess: str = ""
    """Basis of the estimate for a kind that was never measured; empty: measured."""


_A100 = "never measured; sustains as much as an A100"
_POWER = "never measured; sustains as the SXM module, times the root of their ratio of watts per peak FLOP/s"
_SAME_POWER = "measured operators; sustains as much as an H100, which has the same limit of power"
_GB300 = "never measured; sustains as much as a GB300"
_MI300X = "never measured; curves from 620 TFLOP/s in bf16 and 990 in fp8 of large products, recalled"
_TPU = "never measured; a systolic array needs no tiles of its own and is not throttled"

ATTAINED: Mapping[str, Attained] = MappingProxyType(
    {
        # Multiprocessors as the makers' architecture papers count them. Sustained rates are fitted by
        # `benchmarks.planner.sustain` to the half of the published rows that is for fitting, where a kind has
        # five of them without experts (GB200: with), or is the only one with its limit of power (HBM2e).
        "V100 SXM2 16 GB": Attained("volta", 80, 0.90, _A100),
        "V100 SXM2 32 GB": Attained("volta", 80, 0.90, _A100),
        "V100 PCIe 16 GB": Attained("volta", 80, 0.90, _A100),
        "V100 PCIe 32 GB": Attained("volta", 80, 0.90, _A100),
        "A100 SXM 40 GB": Attained("ampere", 108, 0.90),
        "A100 SXM 80 GB": Attained("ampere", 108, 0.90),
        # 0.90 × √(250 W / 400 W), and with 300 W.
        "A100 PCIe 40 GB": Attained("ampere", 108, 0.71, _POWER),
        "A100 PCIe 80 GB": Attained("ampere", 108, 0.78, _POWER),
        "H100 SXM": Attained("hopper", 132, 0.81),
        "H100 SXM 96 GB HBM2e": Attained("hopper", 132, 0.65),
        # 0.81 × √(W / (700 W × peak / 989.5)); for the card with 500 W above that rule says 0.68.
        "H100 PCIe": Attained("hopper", 114, 0.66, _POWER),
        "H100 NVL": Attained("hopper", 132, 0.67, _POWER),
        "H200 SXM": Attained("hopper", 132, 0.81, _SAME_POWER),
        "H200 NVL": Attained("hopper", 132, 0.82, _POWER),
        "B200": Attained("blackwell", 148, 0.62),
        "GB200": Attained("blackwell", 152, 0.79),
        "B300": Attained("blackwell", 148, 0.93, _GB300),
        "GB300": Attained("blackwell", 152, 0.93),
        "L40S": Attained("ada", 142, 0.90, "measured operators; sustains as much as an A100"),
        # Halved rates of tensor cores (fp32 accumulation) leave these cards below their limit of power.
        "RTX 4090": Attained("ada geforce", 128, 0.90, _A100),
        "RTX 3090": Attained("ampere", 82, 0.90, _A100),
        "RTX 2080": Attained("volta", 46, 0.90, _A100),
        "Titan RTX": Attained("volta", 72, 0.90, _A100),
        "MI300X": Attained("cdna 3", 304, 0.90, _MI300X),
        # Two cores of four arrays.
        "TPU v4": Attained("tpu", 8, 0.95, _TPU),
        "TPU v5p": Attained("tpu", 8, 0.95, _TPU),
    }
)

LINKS: Mapping[str, LinkShare] = MappingProxyType(
    {
        # Fitted by `benchmarks.planner.fit` to gathers and scatters measured on A100 (231 GB/s), H100 (351)
        # and B200 (658); the second generation is taken to be like the third.
        "NVLink 2": LinkShare(0.77, 0.77),
        "NVLink 3": LinkShare(0.77, 0.77),
        "NVLink 4": LinkShare(0.78, 0.78),
        "NVLink 5": LinkShare(0.731, 0.731),
        # In the same measurements, gathers on a server of L40S reach 19.4 GB/s between two and 4.8 between
        # four, of 31.5: then the two pairs have 0.06 of it for each device. Between all eight it was 2; other
        # servers may do better, which `wanma cluster --calibrate` shows.
        "PCIe 3": LinkShare(0.62, 0.06),
        "PCIe 4": LinkShare(0.62, 0.06),
        "PCIe 5": LinkShare(0.62, 0.06),
    }
)
OTHER_LINK = LinkShare(0.77, 0.77)
"""Assumed efficiency of other links, never measured: as NVLink."""
NETWORK = LinkShare(0.9, 0.9)
"""Share of a network card's rate left after headers and acknowledgements, assumed for all networks."""
