"""Device catalogue and search by name: dense peak rates, memory, links and power, each with its source.

Peaks are dense (no structured sparsity) and what a matrix product can reach through the vendor's
library: tensor-core FP64 where it exists, but FP32 without TensorFloat-32, because `fp32` here
means true fp32. They are the denominators of model FLOPs utilization.
"""

from __future__ import annotations

import functools
import re

from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.nvidia import NVIDIA
from wanma.hardware.catalogue.other_accelerators import OTHER_ACCELERATORS
from wanma.hardware.catalogue.processors import PROCESSORS
from wanma.job.errors import JobError, did_you_mean

CATALOGUE: tuple[DeviceKind, ...] = (*NVIDIA, *OTHER_ACCELERATORS, *PROCESSORS)

_MAKERS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct|google|intel)\b", re.IGNORECASE)


def find_by_driver_name(driver_name: str) -> DeviceKind | None:
    """Return the device kind that a driver calls `driver_name`, e.g. 'NVIDIA H100 80GB HBM3'; None: unknown.

    Only whole names match: laptop and export variants of the same chip and slices of a device (MIG)
    have other peaks.
    """
    for kind in CATALOGUE:
        if re.fullmatch(kind.driver_name_pattern, driver_name.strip(), flags=re.IGNORECASE):
            return kind
    return None


def find_by_name(name: str) -> DeviceKind | None:
    """Return the device kind called `name`: catalogue name, short form ('A100-SXM-80GB') or driver's name."""
    return _kinds_by_name().get(_normalize_name(name)) or find_by_driver_name(name)


def require_device_kind(name: str) -> DeviceKind:
    """Return the device kind called `name`, as `find_by_name`, or refuse an unknown name.

    Raises:
        JobError: the catalogue has no such device.
    """
    kind = find_by_name(name)
    if kind is None:
        names = [kind.name for kind in CATALOGUE]
        raise JobError(
            f"'{name}' is not in the device catalogue.{did_you_mean(name, list_known_names())}",
            f"known: {', '.join(names)}; describe other devices under [[devices]] of a cluster file",
        )
    return kind


def list_known_names() -> list[str]:
    """List every name that `find_by_name` accepts, except drivers' names, for suggestions."""
    return [name for kind in CATALOGUE for name in (kind.name, *kind.aliases)]


@functools.cache
def _kinds_by_name() -> dict[str, DeviceKind]:
    return {_normalize_name(name): kind for kind in CATALOGUE for name in (kind.name, *kind.aliases)}


def _normalize_name(name: str) -> str:
    """Normalize a name: drop makers, case, spaces and dashes ('NVIDIA A100-SXM-80GB' to 'a100sxm80gb')."""
    return re.sub(r"[\s_()-]+", "", _MAKERS.sub("", name)).casefold()
