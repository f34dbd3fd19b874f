"""Time that this process, or the stream of its GPU, waits in torch's functional collectives, in seconds.

Tensor, context and expert parallelism communicate within forward and backward. A rank's waits there are the
other ranks' time, the rest is its own. They go to the `CommunicationTimer` in use, by kind; without one they
are added up here.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.library import Library

from wanma.collectives.timing.communication_timer import ParallelismKind, current_timer
from wanma.torch_internals.dispatch import PRIVATE_USE_KEYS
from wanma.torch_internals.distributed import group_name
from wanma.torch_internals.operators import FUNCTIONAL_COLLECTIVES, functional_collectives

MAX_PENDING_ALL_TO_ALLS = 64
"""All-to-alls whose results are remembered until they are waited for."""


@dataclass
class FunctionalWaitTime:
    """Total time of one process that no `CommunicationTimer` has, by the host's clock."""

    seconds: float = 0.0
    """Wait time so far, in seconds."""


def get_functional_wait_time(device: str = "cpu") -> FunctionalWaitTime:
    """Return the wait time of this process, a single object for a type of device.

    From the first call on, waits for tensors there are timed.
    """
    wait_time, _ = _install_timer(device.upper())
    return wait_time


@cache
def _install_timer(dispatch_key: str) -> tuple[FunctionalWaitTime, Library]:
    """Replace the operator by which all functional collectives are waited for, and return its total.

    DTensors, tensor and expert parallelism and compiled code call it, eager or not, forward and backward.
    Only the call of a collective has the group: the storage tells the results of experts' all-to-alls.

    torch has one kernel of each operator for all devices. The replacement calls that kernel under the
    dispatch key of another device, or the call would come back here.
    """
    wait_time, library = FunctionalWaitTime(), Library(FUNCTIONAL_COLLECTIVES, "IMPL")
    wait_operator = functional_collectives.wait_tensor.default
    exchange_operator = functional_collectives.all_to_all_single.default
    exchanged: deque[int] = deque(maxlen=MAX_PENDING_ALL_TO_ALLS)

    def wait(tensor: Tensor) -> Tensor:
        communication_timer = current_timer()
        start = time.perf_counter() if communication_timer is None else communication_timer.now()
        try:
            result: Tensor = wait_operator.redispatch(PRIVATE_USE_KEYS, tensor)
        finally:
            if communication_timer is None:
                wait_time.seconds += time.perf_counter() - start
            elif not communication_timer.blocking_depth:  # else the context counts it
                address = tensor.untyped_storage().data_ptr() if exchanged else 0
                kind: ParallelismKind = communication_timer.functional_kind
                if address in exchanged:
                    exchanged.remove(address)
                    kind = "expert"
                communication_timer.end_blocking_wait(kind, start)
        return result

    def exchange(*arguments: Any) -> Tensor:
        output: Tensor = exchange_operator.redispatch(PRIVATE_USE_KEYS, *arguments)
        communication_timer = current_timer()
        if communication_timer is not None and group_name(arguments[-1]) == communication_timer.expert_group:
            exchanged.append(output.untyped_storage().data_ptr())
        return output

    library.impl("wait_tensor", wait, dispatch_key)
    library.impl("all_to_all_single", exchange, dispatch_key)
    return wait_time, library
