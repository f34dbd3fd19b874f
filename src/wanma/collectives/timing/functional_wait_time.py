"""Time that this process has waited in torch's functional collectives on CPUs, in seconds.

Tensor, context and expert parallelism communicate within forward and backward. A rank's waits there are the
other ranks' time, the rest is its own. Waits outside functional collectives go to a `CommunicationTimer`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from wanma.collectives.timing.communication_timer import is_timed


@dataclass
class FunctionalWaitTime:
    """Total wait time of one process."""

    seconds: float = 0.0
    """Wait time so far, in seconds."""


def get_functional_wait_time() -> FunctionalWaitTime:
    """Return the wait time of this process, a single object."""
    wait_time, _ = _install_timer()
    return wait_time


@cache
def _install_timer() -> tuple[FunctionalWaitTime, Library]:
    """Replace the operator by which all functional collectives are waited for, and return its total.

    DTensors, tensor and expert parallelism and compiled code call it, eager or not, forward and backward.

    torch has one kernel of it for all devices. The replacement calls that kernel under the dispatch key of
    another device, or the call would come back here.
    """
    wait_time, library = FunctionalWaitTime(), Library("_c10d_functional", "IMPL")
    operator = torch.ops._c10d_functional.wait_tensor.default
    backend_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def wait(tensor: Tensor) -> Tensor:
        is_counted, start = is_timed(), time.perf_counter()
        try:
            result: Tensor = operator.redispatch(backend_keys, tensor)
        finally:
            if not is_counted:  # the caller counts it
                wait_time.seconds += time.perf_counter() - start
        return result

    library.impl("wait_tensor", wait, "CPU")
    return wait_time, library
