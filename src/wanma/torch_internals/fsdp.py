"""FSDP2: parameter groups of its units, its parameters, and its communication objects.

Protocols name the attributes of torch's private classes that wanma uses; functions reach those whose names
are private too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.torch_internals.table import is_available

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor import Shard

__all__ = ["AllGather", "ReduceScatter"]

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"


def __getattr__(name: str) -> Any:
    """Return one of the base classes of communication, whose module imports the compiler."""
    if name not in __all__:
        raise AttributeError(name)
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return {"AllGather": AllGather, "ReduceScatter": ReduceScatter}[name]


class FsdpMesh(Protocol):
    """Ranks of one of FSDP2's groups; a mesh without shards, or without replicas, lacks their attributes."""

    shard_mesh_size: int
    shard_mesh_rank: int
    shard_process_group: dist.ProcessGroup
    replicate_mesh_size: int
    replicate_process_group: dist.ProcessGroup


class FsdpParameter(Protocol):
    """Parameter of FSDP2: this rank's shard, and the tensor that is gathered from all shards."""

    sharded_param: Any
    """Shard as a parameter, whose data is a DTensor."""
    mesh_info: FsdpMesh
    fsdp_placement: Shard
    """Dim along which the parameter is sharded."""
    mp_policy: MixedPrecisionPolicy
    padded_sharded_param_size: torch.Size
    """Shape of a shard, padded to that of the first rank's."""
    sharded_size: torch.Size
    """Shape of this rank's shard."""

    @property
    def unsharded_param(self) -> nn.Parameter:
        """Gathered parameter; it has memory only while the group is unsharded."""


class FsdpParameterGroup(Protocol):
    """Parameters of one unit, which FSDP2 gathers and reduces together."""

    fsdp_params: Sequence[FsdpParameter]
    mesh_info: FsdpMesh
    device: torch.device
    reduce_grads: bool
    """True if a backward reduces gradients, false if it only accumulates them."""
    reshard_after_backward: bool
    pre_forward: Callable[..., Any]
    post_forward: Callable[..., Any]
    post_backward: Callable[..., Any]
    wait_for_unshard: Callable[..., Any]
    finalize_backward: Callable[..., Any]
    """Hooks around uses of the unit, and waits; an attribute of the group takes their place."""

    @property
    def is_sharded(self) -> bool: ...

    @property
    def is_unsharded(self) -> bool: ...

    def reshard(self) -> None: ...


def parameter_group(unit: FSDPModule) -> FsdpParameterGroup | None:
    """Return the parameter group of a unit; None where the unit holds no parameters."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    return group  # type: ignore[no-any-return]


def training_state(group: FsdpParameterGroup) -> Any:
    """Return the phase of a step in which FSDP2 holds a group to be."""
    untyped: Any = group
    return untyped._training_state


def set_training_state(group: FsdpParameterGroup, state: Any) -> None:
    untyped: Any = group
    untyped._training_state = state


def all_gather_of(group: FsdpParameterGroup) -> AllGather:
    """Return the object that gathers a group's parameters."""
    untyped: Any = group
    gather: AllGather = untyped._all_gather_comm
    return gather


def reduce_scatter_of(group: FsdpParameterGroup) -> ReduceScatter:
    """Return the object that reduces a group's gradients."""
    untyped: Any = group
    reduction: ReduceScatter = untyped._reduce_scatter_comm
    return reduction


def choose_gradient_dtype(group: FsdpParameterGroup) -> None:
    """Make FSDP2 choose the precision in which it sums a group's gradients, after parameters were released.

    It chooses once, before the first forward: up to torch 2.13 not where all parameters are frozen, later by
    frozen ones too.
    """
    untyped: Any = group
    if hasattr(untyped, "_orig_dtype") and untyped._orig_dtype is None:
        untyped._init_mp_dtypes()


def finish_reductions(group: FsdpParameterGroup) -> None:
    """Wait for the reductions of a group on GPUs, and end its backward.

    Up to torch 2.14 the end itself waits.
    """
    untyped: Any = group
    untyped._wait_for_post_backward()
    untyped.finalize_backward()


def pending_gradient(parameter: FsdpParameter) -> Tensor | None:
    """Return the unsharded gradient of a parameter that has not been reduced."""
    unsharded = unsharded_or_none(parameter)
    accumulated: Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)
    if accumulated is not None or unsharded is None:
        return accumulated
    return unsharded.grad


def set_zero_gradient(parameter: FsdpParameter) -> None:
    """Give a parameter that has been gathered a gradient of zeros."""
    unsharded = parameter.unsharded_param
    # FSDP2 of torch 2.15 keeps the sum of gradients here, in the precision of their reduction.
    unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)


def unify_gradient_dtypes(parameters: Sequence[FsdpParameter]) -> None:
    """Bring pending gradients to one precision where FSDP2 reduces no others together.

    Up to torch 2.14 it keeps sums of gradients in the precision of their reduction, beside new gradients.
    """
    if not is_available(f"{_PARAMETER}.to_accumulated_grad_if_needed"):
        return
    untyped: Sequence[Any] = parameters
    if any(parameter.unsharded_accumulated_grad is not None for parameter in untyped):
        for parameter in untyped:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def unsharded_or_none(parameter: FsdpParameter) -> nn.Parameter | None:
    """Return the gathered parameter; None before it was gathered for the first time."""
    return getattr(parameter, "_unsharded_param", None)


def full_size(parameter: FsdpParameter) -> torch.Size:
    """Return the shape of the parameter before it was sharded."""
    untyped: Any = parameter
    size: torch.Size = untyped._orig_size
    return size


def shard_data(parameter: FsdpParameter) -> Tensor:
    """Return the flat, padded shard, which FSDP2 gathers and of which `sharded_param` is a view."""
    untyped: Any = parameter
    data: Tensor = untyped._sharded_param_data
    return data


def set_shard_data(parameter: FsdpParameter, data: Tensor) -> None:
    untyped: Any = parameter
    untyped._sharded_param_data = data


def adopt_gather_extensions(parameter: FsdpParameter) -> None:
    """Make FSDP2 look for `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a shard's local tensor."""
    untyped: Any = parameter
    untyped._init_extensions()


def module_parameter(parameter: FsdpParameter) -> Tensor:
    """Return the parameter as checkpoints know it: while it is sharded, the one in its module.

    It may be another than FSDP2 was given, which finds it before the first forward.
    """
    untyped: Any = parameter
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    if untyped.sharded_state is ShardedState.SHARDED:
        info = untyped._module_info
        held: Tensor = getattr(info.module, info.param_name)
        return held
    sharded: Tensor = untyped.sharded_param
    return sharded
