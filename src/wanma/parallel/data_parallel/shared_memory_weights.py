"""Weights of which the ranks of one node share one full copy: each rank's shard is its part of it.

Ranks that shard parameters and share memory need not send them to each other. To gather them is to know that
everybody has written its part, and the gathered weights take no memory of their own: a model that is sharded
over the ranks of one node lies there once, in full. In 16 bits the full copy is beside the shards, and
each rank rounds its part into it.

FSDP2 asks a shard for the tensors to gather, and hands back the gathered ones (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`, its way in for other formats of weights): here one element, and the full tensor.
Parameters split along another dim than the first are gathered as usual.

Ranks meet twice a step: before weights change, when nobody computes with them any more
(`CommonWeights.settle`), and as the first are gathered after that, when all have been changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from wanma.collectives.shared_memory.backend import shared_group
from wanma.collectives.shared_memory.process_group import SharedGroup
from wanma.collectives.timing.communication_timer import Stopwatch
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.parameters.forward_changes import checksum, is_watched, refuse_lost_change
from wanma.parallel.parameters.fsdp_units import group_of, units


class CommonWeights:
    """Shared weights of one rank: its groups that compute with the same tensors, and their barriers."""

    def __init__(self, groups: Sequence[SharedGroup], stopwatch: Stopwatch) -> None:
        self._groups, self._stopwatch = groups, stopwatch
        self.tensors: list[Common] = []
        self._may_have_changed = True
        """True if a rank may have changed its part, and not all ranks have met since."""
        self._is_between_steps = True
        self._steps = 0

    def begin_micro_batch(self, last: bool) -> None:
        """Begin a micro-batch, before its forward; weights may have changed between two steps."""
        self._may_have_changed |= self._is_between_steps
        self._is_between_steps = last

    def settle(self) -> None:
        """Wait until no rank computes with the weights, so that each may change its part; all call it.

        Raises:
            WanmaError: a module has changed a weight in its forward.
        """
        for tensor in self.tensors:
            tensor.check()
        self._meet()
        self._may_have_changed = True

    def gathered(self) -> None:
        """Wait until all ranks have written their parts; all call it, before they compute."""
        if self._may_have_changed:
            for tensor in self.tensors:
                tensor.write()
            self._meet()
            self._may_have_changed = False
            for tensor in self.tensors if is_watched(self._steps) else ():
                tensor.note()
            self._steps += 1

    def begin_steps(self) -> None:
        """Begin counting steps anew: the first ones are watched for changes by a forward."""
        self._steps = 0

    def _meet(self) -> None:
        with self._stopwatch.waiting("data"):
            for group in self._groups:
                options = BarrierOptions()
                options.asyncOp = False
                group.barrier(options)


def share_weights(model: nn.Module, plan: Plan, stopwatch: Stopwatch) -> CommonWeights | None:
    """Make ranks compute with shared copies of FSDP2's shards; every rank of a shard group calls it.

    Values stay.

    Returns:
        None where nothing can be shared: other devices, ranks of several nodes or without shared memory,
            offloaded parameters.
    """
    if plan.device != "cpu" or plan.offload_parameters != "none":
        return None
    shards: dict[SharedGroup, list[tuple[str, Any]]] = {}
    for name, shard in _named_shards(model):
        if _is_by_rows(shard) and (group := shared_group(shard.mesh_info.shard_process_group)) is not None:
            shards.setdefault(group, []).append((name, shard))
    if not shards:
        return None
    weights, common = CommonWeights(tuple(shards), stopwatch), set()
    for group, of_group in shards.items():
        parts = [(shard._sharded_param_data.numel(), _computed_in(shard)) for _, shard in of_group]
        for (name, shard), found in zip(of_group, group.allocate_common(parts), strict=True):
            if found is not None:
                weights.tensors.append(Common(name, shard, *found))
                common.add(id(shard))
    for unit in units(model):
        if (of_unit := group_of(unit)) is not None:
            is_all = common.issuperset(id(shard) for shard in of_unit.fsdp_params)
            unit.set_custom_all_gather(_Gather(weights, None if is_all else of_unit._all_gather_comm))

    def keep(*_: Any) -> None:
        for tensor in weights.tensors:
            tensor.keep()

    # Before FSDP2's own, which looks at what it holds.
    model.register_forward_pre_hook(keep, prepend=True)
    return weights


def is_common(group: Any) -> bool:
    """Return whether all parameters of one of FSDP2's groups lie unsharded in memory that ranks share.

    A gather copies nothing then. A group that is not sharded computes with a copy.
    """
    gather = group._all_gather_comm
    return isinstance(gather, _Gather) and gather.is_all


def communicates(group: Any) -> bool:
    """Return whether parameters of one of FSDP2's groups come from other ranks at each gather."""
    shards: int = getattr(group.mesh_info, "shard_mesh_size", 1)
    return shards > 1 and not is_common(group)


class _Gather(AllGather):
    """All-gather of a unit of which some parameters, or all, are in shared memory."""

    def __init__(self, weights: CommonWeights, usual: AllGather | None) -> None:
        self._weights, self._usual = weights, usual

    @property
    def is_all(self) -> bool:
        """True if all parameters are in shared memory, so that nothing is left to gather."""
        return self._usual is None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._usual is not None:
            return self._usual.allocate(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._weights.gathered()
        if self._usual is not None:
            return self._usual(output_tensor, input_tensor, group, async_op)
        return None  # FSDP2 continues with one element of each parameter, which nobody reads


class Common:
    """Full copy of one parameter in shared memory.

    Where it computes in the precision of the state, the shard itself becomes this rank's part of it.

    Args:
        name: name of the parameter.
        shard: FSDP2's parameter.
        whole: flat tensor that computes, with padding for the last ranks' parts.
        part: memory of this rank's part of it as a tensor of its own. Were it a view, autograd would hold a
            change to the shard against whoever computes with `whole`.
    """

    def __init__(self, name: str, shard: Any, whole: Tensor, part: Tensor) -> None:
        self._name, self._shard = name, weakref.ref(shard)
        self._whole = whole[: shard._orig_size.numel()].view(shard._orig_size)
        self._part = part
        self._before = _Before(torch.zeros(1, dtype=whole.dtype))
        self._is_shard = shard.sharded_param.dtype == whole.dtype
        self._changes = self._whole._version
        self._noted: Tensor | None = None
        self.keep()

    def __deepcopy__(self, memo: Any) -> Common:
        """Return this object: a copy of a parameter is no part of the shared memory."""
        return self

    @torch.no_grad()
    def keep(self) -> None:
        """Restore the shard as this rank's part, where another tensor has taken its place.

        `Module.to` and `load_state_dict(assign=True)` replace it.
        """
        shard: Any = self._shard()
        if shard is None or hasattr(shard.sharded_param._local_tensor, "fsdp_pre_all_gather"):
            return
        local: Any = shard.sharded_param._local_tensor
        if self._is_shard:
            if local.dtype != self._part.dtype:
                raise WanmaError(
                    f"{self._name} has become {local.dtype} after it was prepared as {self._part.dtype}",
                    "convert the model before it is prepared; train.precision says in what it computes",
                )
            mine = self._part[: local.numel()].view(local.size())
            if mine.data_ptr() != local.data_ptr():
                mine.copy_(local)
            shard._sharded_param_data, shard.sharded_param._local_tensor = self._part, mine
            local = mine
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before, self._after
        shard._init_extensions()

    @torch.no_grad()
    def write(self) -> None:
        """Copy the shard into this rank's part."""
        shard: Any = self._shard()
        if not self._is_shard and shard is not None:
            local = shard.sharded_param._local_tensor
            self._part[: local.numel()].copy_(local.view(-1))

    def note(self) -> None:
        """Keep a checksum of this rank's part, before anybody computes with it."""
        self._noted = checksum(self._part)

    def check(self) -> None:
        """Check that no forward has changed the weight.

        Raises:
            WanmaError: a module has changed a weight in its forward.
        """
        noted, self._noted = self._noted, None
        if self._whole._version != self._changes or (noted is not None and checksum(self._part) != noted):
            raise refuse_lost_change(self._name, on_cpu=True)

    def _after(
        self, _outputs: Any, _metadata: None, _dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        return (self._whole, ()) if out is None else None


class _Before:
    """Answer to FSDP2's question for the tensors to gather: one element.

    FSDP2 looks at the signature of whoever answers at every gather of every parameter. To find out that of a
    method took longer than all the rest of a gather; so this object states it.
    """

    __signature__ = Signature([Parameter("mesh", Parameter.POSITIONAL_ONLY)])

    def __init__(self, token: Tensor) -> None:
        self._token = token

    def __call__(self, _mesh: Any, /) -> tuple[tuple[Tensor, ...], None]:
        return (self._token,), None


def _named_shards(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's parameters of all units with their names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in units(model):
        group = group_of(unit)
        for shard in group.fsdp_params if group is not None else ():
            yield names.get(id(shard.sharded_param), "a parameter"), shard


def _is_by_rows(shard: Any) -> bool:
    """Return whether the ranks' shards, padded to equal length, follow each other in the full tensor.

    They must also be gathered as they are.
    """
    return bool(
        getattr(shard.mesh_info, "shard_mesh_size", 1) > 1
        and shard.fsdp_placement.dim == 0
        and shard._orig_size.numel() > 0
        and not hasattr(shard.sharded_param._local_tensor, "fsdp_pre_all_gather")
    )


def _computed_in(shard: Any) -> torch.dtype:
    own: torch.dtype = shard.sharded_param.dtype
    return (shard.mp_policy.param_dtype or own) if own.is_floating_point else own
