"""Replacement of torch's functional all-gather on CPUs, which corrupts memory through Gloo."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.torch_internals.distributed import resolve_process_group
from wanma.torch_internals.operators import FUNCTIONAL_COLLECTIVES, functional_collectives


@cache
def patch_functional_all_gather() -> Library:
    """Route `_c10d_functional.all_gather_into_tensor` of CPU tensors through Gloo's plain all-gather.

    Torch takes Gloo's coalesced all-gather instead. In torch 2.13 some hundred thousand calls of it on two
    ranks are enough for a process to die of SIGSEGV or SIGABRT: in Gloo's thread, in malloc, whose list of
    free blocks has been overwritten (`tests/collectives/stress_all_gather.py` shows it). DTensors, tensor
    parallelism and compiled code all call this operator, so the operator is replaced.

    Returns:
        The library that holds the replacement; torch's operator returns when it is deleted.
    """
    library = Library(FUNCTIONAL_COLLECTIVES, "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library


def _all_gather(part: Tensor, ranks: int, group: Any) -> Tensor:
    if part.is_complex():  # Gloo has no complex types
        return torch.view_as_complex(_all_gather(torch.view_as_real(part), ranks, group))
    if _is_shared(group):  # shared memory has its own coalesced all-gather, without that fault
        (output,) = functional_collectives.all_gather_into_tensor_coalesced([part], ranks, group)
        return output  # type: ignore[no-any-return]
    output = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    gathered: Tensor = functional_collectives.all_gather_into_tensor_out(part, ranks, group, out=output)
    return gathered


def _is_shared(group: Any) -> bool:
    """Return True if a group, or a group by its name, shares memory; operators are given either."""
    if isinstance(group, str):
        group = resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return isinstance(group, SharedMemoryProcessGroup)
