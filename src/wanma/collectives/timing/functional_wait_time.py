"""How long this process has waited in torch's functional collectives on CPUs.

Tensor, context and expert parallelism exchange within forward and backward. Of a rank's time there, what it
waited is the others' and the rest its own. What is waited for in another way tells a `Stopwatch`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from wanma.collectives.timing.communication_timer import is_told


@dataclass
class Waits:
    """Of one process."""

    seconds: float = 0.0
    """So far."""


def waits() -> Waits:
    """The process's one clock of waiting."""
    found, _ = _timed()
    return found


@cache
def _timed() -> tuple[Waits, Library]:
    """Replace the operator by which all functional collectives are waited for: DTensors, tensor and expert
    parallelism and compiled code call it, eager or not, forward and backward.

    torch has one kernel of it for all devices. It is called as of a device that is not this one, or the call
    would come back here.
    """
    found, library = Waits(), Library("_c10d_functional", "IMPL")
    operator = torch.ops._c10d_functional.wait_tensor.default
    elsewhere = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def wait(tensor: Tensor) -> Tensor:
        told, began = is_told(), time.perf_counter()
        try:
            waited: Tensor = operator.redispatch(elsewhere, tensor)
        finally:
            if not told:  # who called this counts it
                found.seconds += time.perf_counter() - began
        return waited

    library.impl("wait_tensor", wait, "CPU")
    return found, library
