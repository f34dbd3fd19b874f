"""Process groups: options of c10d's calls, names and backends of groups, functional collectives."""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

from wanma.torch_internals.table import is_available

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "AsyncCollectiveTensor",
    "BarrierOptions",
    "BroadcastOptions",
    "ReduceScatterOptions",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "wait_tensor",
]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of one tensor; the second name is the older one: torch 2.13 warns of it, 2.12 has no other."""
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce-scatter of one tensor, by its new or old name, as `all_gather_single`."""

resolve_process_group: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
"""Process group of a name: an operator takes only the name, and torch has no public way back."""


def group_name(group: Any) -> str:
    """Return the name of a process group as an operator gets it, by name or boxed."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return group if isinstance(group, str) else str(group.group_name)


def is_backend_registered(name: str) -> bool:
    """Return whether a backend of this name was registered in this process."""
    return name.upper() in dist.Backend._plugins


def has_backend_for(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a process group can send tensors of a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def register_gloo_for_cpu(group: dist.ProcessGroup, gloo: Any) -> None:
    """Make a Gloo group the backend of `group` for tensors on the CPU, and its default."""
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def set_default_timeout(gloo: Any, timeout: timedelta) -> None:
    gloo._set_default_timeout(timeout)


def start_sequence_numbers(gloo: Any) -> None:
    """Make a Gloo group number its collectives; newer versions of torch do so themselves."""
    if is_available("torch.distributed:ProcessGroupGloo._set_sequence_number_for_group"):
        gloo._set_sequence_number_for_group()


def make_gloo_group(store: Any, rank: int, ranks: int, host: str, timeout: timedelta) -> Any:
    """Return a Gloo group over the network interface of `host`, which torch does not know by name."""
    gloo: Any = dist.ProcessGroupGloo  # its options are untyped
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, ranks, options)


GroupClass = TypeVar("GroupClass", bound=type[dist.ProcessGroup])


def add_older_method_names(group_class: GroupClass) -> GroupClass:
    """Give a class of process groups the names by which torch up to 2.12 calls its methods.

    The class has the new names: `all_gather_single`, `reduce_scatter_single`, `all_to_all_single`, and the
    first two with `_coalesced`.
    """
    untyped: Any = group_class
    untyped._allgather_base = untyped.all_gather_single
    untyped._reduce_scatter_base = untyped.reduce_scatter_single
    untyped.allgather_into_tensor_coalesced = untyped.all_gather_single_coalesced
    untyped.reduce_scatter_tensor_coalesced = untyped.reduce_scatter_single_coalesced
    untyped.alltoall_base = untyped.all_to_all_single
    return group_class


class ReceiveWork(dist.Work):
    """Work of a message that says which rank has sent it."""

    @abstractmethod
    def source_rank(self) -> int:
        """Return the rank, within the group, that has sent the message."""

    def _source_rank(self) -> int:
        return self.source_rank()
