"""How long this process has waited in torch's functional collectives on CPUs.

Tensor, context and expert parallelism exchange within forward and backward. Of a rank's time there, what it
waited is the others' and the rest its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from wanma.collectives.gloo import Stopwatch


def waits() -> Stopwatch:
    """The process's one clock of waiting; `total` rises while a collective is waited for."""
    watch, _ = _timed()
    return watch


@contextmanager
def waiting() -> Iterator[None]:
    """Count what is waited for inside, where it is no functional collective."""
    watch = waits()
    watch.start(time.perf_counter())
    try:
        yield
    finally:
        watch.stop(time.perf_counter())


@cache
def _timed() -> tuple[Stopwatch, Library]:
    """Replace the operator by which all functional collectives are waited for: DTensors, tensor and expert
    parallelism and compiled code call it, eager or not, forward and backward.

    torch has one kernel of it for all devices. It is called as of a device that is not this one, or the call
    would come back here.
    """
    watch, library = Stopwatch(), Library("_c10d_functional", "IMPL")
    operator = torch.ops._c10d_functional.wait_tensor.default
    elsewhere = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def wait(tensor: Tensor) -> Tensor:
        watch.start(time.perf_counter())
        try:
            waited: Tensor = operator.redispatch(elsewhere, tensor)
        finally:
            watch.stop(time.perf_counter())
        return waited

    library.impl("wait_tensor", wait, "CPU")
    return watch, library
