"""Weights of which the ranks of one node share one full copy: each rank's shard is its part of it.

Ranks that shard parameters and share memory need not send them to each other. To gather them is to know that
everybody has written its part, and the gathered weights take no memory of their own: a model that is sharded
over the ranks of one node lies there once, in full. In 16 bits the full copy is beside the shards, and
each rank rounds its part into it.

FSDP2 asks a shard for the tensors to gather, and hands back the gathered ones (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`, its way in for other formats of weights): here one element, and the full tensor.
Parameters split along another dim than the first are gathered as usual.

Ranks meet twice a step: before weights change, when no rank computes with them any more
(`SharedMemoryWeights.wait_until_weights_unused`), and as the first are gathered after that, when all have
been changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.parameters.forward_changes import checksum, is_checked_step, lost_change_error
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.torch_internals.autograd import version_counter
from wanma.torch_internals.distributed import BarrierOptions
from wanma.torch_internals.dtensor import local_part, set_local_part
from wanma.torch_internals.fsdp import (
    AllGather,
    FsdpParameter,
    FsdpParameterGroup,
    adopt_gather_extensions,
    all_gather_of,
    full_size,
    parameter_group,
    set_shard_data,
    shard_data,
)


class SharedMemoryWeights:
    """Shared weights of one rank: its groups that compute with the same tensors, and their barriers."""

    def __init__(
        self, groups: Sequence[SharedMemoryProcessGroup], communication_timer: CommunicationTimer
    ) -> None:
        self._groups, self._communication_timer = groups, communication_timer
        self.parameters: list[SharedMemoryParameter] = []
        self._is_stale = True
        """True if a rank may have changed its part, and not all ranks have met since."""
        self._is_between_steps = True
        self._steps = 0

    def begin_micro_batch(self, is_last: bool) -> None:
        """Begin a micro-batch, before its forward; weights may have changed between two steps."""
        self._is_stale |= self._is_between_steps
        self._is_between_steps = is_last

    def wait_until_weights_unused(self) -> None:
        """Wait until no rank computes with the weights, so that each may change its part; all call it.

        Raises:
            WanmaError: a module has changed a weight in its forward.
        """
        for tensor in self.parameters:
            tensor.check_unmodified()
        self._barrier()
        self._is_stale = True

    def publish_updates(self) -> None:
        """Wait until all ranks have written their parts; all call it, before they compute."""
        if self._is_stale:
            for tensor in self.parameters:
                tensor.copy_shard_in()
            self._barrier()
            self._is_stale = False
            for tensor in self.parameters if is_checked_step(self._steps) else ():
                tensor.record_checksum()
            self._steps += 1

    def reset_step_count(self) -> None:
        """Reset the step count: the first ones are watched for changes by a forward."""
        self._steps = 0

    def _barrier(self) -> None:
        with self._communication_timer.time_blocking_transfer("data"):
            for group in self._groups:
                options = BarrierOptions()
                options.asyncOp = False
                group.barrier(options)


def share_weights_in_memory(
    model: nn.Module, plan: Plan, communication_timer: CommunicationTimer
) -> SharedMemoryWeights | None:
    """Make ranks compute with shared copies of FSDP2's shards; every rank of a shard group calls it.

    Values stay.

    Returns:
        None where nothing can be shared: other devices, ranks of several nodes or without shared memory,
            offloaded parameters.
    """
    if plan.device != "cpu" or plan.offload_parameters != "none":
        return None
    shards: dict[SharedMemoryProcessGroup, list[tuple[str, FsdpParameter]]] = {}
    for name, shard in _named_fsdp_params(model):
        if (
            _is_dim0_sharded(shard)
            and (group := as_shared_memory_group(shard.mesh_info.shard_process_group)) is not None
        ):
            shards.setdefault(group, []).append((name, shard))
    if not shards:
        return None
    weights, shared_ids = SharedMemoryWeights(tuple(shards), communication_timer), set()
    for group, group_shards in shards.items():
        parts = [(shard_data(shard).numel(), _compute_dtype(shard)) for _, shard in group_shards]
        for (name, shard), shared_views in zip(group_shards, group.allocate_shared(parts), strict=True):
            if shared_views is not None:
                weights.parameters.append(SharedMemoryParameter(name, shard, *shared_views))
                shared_ids.add(id(shard))
    for unit in fsdp_units(model):
        if (unit_group := parameter_group(unit)) is not None:
            is_fully_shared = shared_ids.issuperset(id(shard) for shard in unit_group.fsdp_params)
            unit.set_custom_all_gather(
                _SharedMemoryGather(weights, None if is_fully_shared else all_gather_of(unit_group))
            )

    def keep(*_: Any) -> None:
        for tensor in weights.parameters:
            tensor.attach_shard()

    # Before FSDP2's own, which looks at what it holds.
    model.register_forward_pre_hook(keep, prepend=True)
    return weights


def is_in_shared_memory(group: FsdpParameterGroup) -> bool:
    """Return whether all parameters of one of FSDP2's groups lie unsharded in memory that ranks share.

    A gather copies nothing then. A group that is not sharded computes with a copy.
    """
    gather = all_gather_of(group)
    return isinstance(gather, _SharedMemoryGather) and gather.is_complete


def gathers_from_other_ranks(group: FsdpParameterGroup) -> bool:
    """Return whether parameters of one of FSDP2's groups come from other ranks at each gather."""
    shards: int = getattr(group.mesh_info, "shard_mesh_size", 1)
    return shards > 1 and not is_in_shared_memory(group)


class _SharedMemoryGather(AllGather):
    """All-gather of a unit of which some parameters, or all, are in shared memory."""

    def __init__(self, shared_memory_weights: SharedMemoryWeights, fallback: AllGather | None) -> None:
        self._shared_memory_weights, self._fallback = shared_memory_weights, fallback

    @property
    def is_complete(self) -> bool:
        """True if all parameters are in shared memory, so that nothing is left to gather."""
        return self._fallback is None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._fallback is not None:
            return self._fallback.allocate(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._shared_memory_weights.publish_updates()
        if self._fallback is not None:
            return self._fallback(output_tensor, input_tensor, group, async_op)
        return None  # FSDP2 continues with one element of each parameter, which is never read


class SharedMemoryParameter:
    """Full copy of one parameter in shared memory.

    Where it computes in the precision of the state, the shard itself becomes this rank's part of it.

    Args:
        name: name of the parameter.
        shard: FSDP2's parameter.
        full_tensor: flat tensor that computes, with padding for the last ranks' parts.
        own_part: memory of this rank's part of it as a tensor of its own. Were it a view, autograd would
            hold a change to the shard against whoever computes with `full_tensor`.
    """

    def __init__(self, name: str, shard: FsdpParameter, full_tensor: Tensor, own_part: Tensor) -> None:
        self._name, self._shard = name, weakref.ref(shard)
        self._full_tensor = full_tensor[: full_size(shard).numel()].view(full_size(shard))
        self._own_part = own_part
        self._pre_all_gather = _PreAllGather(torch.zeros(1, dtype=full_tensor.dtype))
        self._is_shard = shard.sharded_param.dtype == full_tensor.dtype
        self._version = version_counter(self._full_tensor)
        self._checksum: Tensor | None = None
        self.attach_shard()

    def __deepcopy__(self, memo: Any) -> SharedMemoryParameter:
        """Return this object: a copy of a parameter is no part of the shared memory."""
        return self

    @torch.no_grad()
    def attach_shard(self) -> None:
        """Restore the shard as this rank's part, where another tensor has taken its place.

        `Module.to` and `load_state_dict(assign=True)` replace it.
        """
        shard = self._shard()
        if shard is None or hasattr(local_part(shard.sharded_param), "fsdp_pre_all_gather"):
            return
        local: Any = local_part(shard.sharded_param)
        if self._is_shard:
            if local.dtype != self._own_part.dtype:
                raise WanmaError(
                    f"{self._name} was converted from {self._own_part.dtype} to {local.dtype} after "
                    "it was prepared",
                    "convert the model before it is prepared; train.precision sets the precision of "
                    "computation",
                )
            own_part = self._own_part[: local.numel()].view(local.size())
            if own_part.data_ptr() != local.data_ptr():
                own_part.copy_(local)
            set_shard_data(shard, self._own_part)
            set_local_part(shard.sharded_param, own_part)
            local = own_part
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._pre_all_gather, self._post_all_gather
        adopt_gather_extensions(shard)

    @torch.no_grad()
    def copy_shard_in(self) -> None:
        """Copy the shard into this rank's part."""
        shard = self._shard()
        if not self._is_shard and shard is not None:
            local = local_part(shard.sharded_param)
            self._own_part[: local.numel()].copy_(local.view(-1))

    def record_checksum(self) -> None:
        """Keep a checksum of this rank's part, before anybody computes with it."""
        self._checksum = checksum(self._own_part)

    def check_unmodified(self) -> None:
        """Check that no forward has changed the weight.

        Raises:
            WanmaError: a module has changed a weight in its forward.
        """
        previous_checksum, self._checksum = self._checksum, None
        if version_counter(self._full_tensor) != self._version or (
            previous_checksum is not None and checksum(self._own_part) != previous_checksum
        ):
            raise lost_change_error(self._name, on_cpu=True)

    def _post_all_gather(
        self, _outputs: Any, _metadata: None, _dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        return (self._full_tensor, ()) if out is None else None


class _PreAllGather:
    """Answer to FSDP2's question for the tensors to gather: one element.

    FSDP2 looks at the signature of whoever answers at every gather of every parameter. To find out that of a
    method took longer than all the rest of a gather; so this object states it.
    """

    __signature__ = Signature([Parameter("mesh", Parameter.POSITIONAL_ONLY)])

    def __init__(self, token: Tensor) -> None:
        self._token = token

    def __call__(self, _mesh: Any, /) -> tuple[tuple[Tensor, ...], None]:
        return (self._token,), None


def _named_fsdp_params(model: nn.Module) -> Iterator[tuple[str, FsdpParameter]]:
    """Yield FSDP2's parameters of all units with their names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in fsdp_units(model):
        group = parameter_group(unit)
        for shard in group.fsdp_params if group is not None else ():
            yield names.get(id(shard.sharded_param), "a parameter"), shard


def _is_dim0_sharded(shard: FsdpParameter) -> bool:
    """Return whether the ranks' shards, padded to equal length, follow each other in the full tensor.

    They must also be gathered as they are.
    """
    return bool(
        getattr(shard.mesh_info, "shard_mesh_size", 1) > 1
        and shard.fsdp_placement.dim == 0
        and full_size(shard).numel() > 0
        and not hasattr(local_part(shard.sharded_param), "fsdp_pre_all_gather")
    )


def _compute_dtype(shard: FsdpParameter) -> torch.dtype:
    dtype: torch.dtype = shard.sharded_param.dtype
    return (shard.mp_policy.param_dtype or dtype) if dtype.is_floating_point else dtype
