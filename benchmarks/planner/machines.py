"""The machines of the published rows, as far as their sources or their makers' data sheets describe them."""

from __future__ import annotations

from wanma.planner.curves import GENERATIONS
from wanma.planner.machine import Chip, Link, Machine

TERA, GIGA = 1e12, 1e9


def _chip(
    name: str, generation: str, peaks: dict[str, float], bandwidth: float, processors: int, sustained: float
) -> Chip:
    curves = GENERATIONS[generation]
    rates = {key: value * TERA for key, value in peaks.items()}
    return Chip(
        name,
        rates,
        bandwidth * GIGA,
        processors,
        {key: curve for key, curve in curves.products.items() if key in rates},
        curves.attention,
        sustained=sustained,
    )


_AMPERE = {"bf16": 312.0, "fp16": 312.0}
_HOPPER = {"bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}

_B200 = {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "nvfp4": 9000.0}
_GB200 = {"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "nvfp4": 10000.0}

# Dense peaks of the makers' data sheets; GB300 and B300 have half as much again in nvfp4. The last number is
# the rate sustained over hours (`sustain`, from the fitted rows); a kind without five dense rows of its own,
# but for the one with another power limit and the GB200, takes that of the nearest kind.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("A100 SXM 40 GB", "ampere", _AMPERE, 1555, 108, 0.88),
        _chip("A100 SXM", "ampere", _AMPERE, 2039, 108, 0.88),
        _chip("H100 SXM", "hopper", _HOPPER, 3350, 132, 0.82),
        # Grand Teton's: HBM2e and 500 W (torchtitan's benchmark page).
        _chip("H100 HBM2e 500 W", "hopper", _HOPPER, 2400, 132, 0.65),
        _chip("H200", "hopper", _HOPPER, 4800, 132, 0.82),
        _chip("B200", "blackwell", _B200, 8000, 148, 0.61),
        _chip("B300", "blackwell", {**_B200, "nvfp4": 13500}, 8000, 148, 0.93),
        _chip("GB200", "blackwell", _GB200, 8000, 152, 0.78),
        _chip("GB300", "blackwell", {**_GB200, "nvfp4": 15000}, 8000, 152, 0.93),
        _chip("L40S", "ada", {"bf16": 362.05, "fp16": 362.05, "fp8": 733}, 864, 142, 0.88),
    )
}

# Of one direction, in 10⁹ bytes per second, with a latency of one step and a ramp: from NCCL's measured
# gathers and scatters (`fit`); a B300 has the links of a B200. Between nodes 0.9 of a card's rate.
_NVLINK = {"A100": 231.0, "H100": 351.0, "H200": 351.0, "B": 658.0, "G": 658.0}
_LATENCY = 1e-6
_RAMP = 10e6
_OUTER_LATENCY = 8e-6


def machine(chip: str, devices: int, network_gigabits: float, domain: int) -> Machine:
    """
    Args:
        network_gigabits: of one device's share of the network.
        domain: devices that NVLink joins.
    """
    inner = min(domain, devices)
    rate = next(rate for prefix, rate in _NVLINK.items() if chip.startswith(prefix))
    links = [Link(inner, _LATENCY, rate * GIGA, _RAMP)]
    if devices > domain:
        links.append(Link(devices, _OUTER_LATENCY, 0.9 * network_gigabits / 8 * GIGA, _RAMP))
    return Machine(CHIPS[chip], tuple(links))
