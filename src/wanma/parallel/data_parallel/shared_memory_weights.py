"""Weights of which the ranks of one machine have one whole copy: each keeps its shard as its part of it.

Ranks that shard parameters and share memory need not send them to each other. To gather them is to know that
everybody has written its part, and what was gathered takes no memory of its own: a model that is sharded over
the ranks of one machine lies there once, whole. In 16 bits the whole copy is beside the shards, and each rank
rounds its part into it.

FSDP2 asks a shard what is to be gathered and what became of it (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`, its way in for other formats of weights): here one element, and the whole tensor. What
is split along another dim than the first is gathered as usual.

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
    """Of one rank: the groups whose ranks compute with the same tensors, and when they meet."""

    def __init__(self, groups: Sequence[SharedGroup], stopwatch: Stopwatch) -> None:
        self._groups, self._stopwatch = groups, stopwatch
        self.tensors: list[Common] = []
        self._may_have_changed = True
        """Since ranks met: not all may have written their parts."""
        self._is_between_steps = True
        self._steps = 0

    def begin_micro_batch(self, last: bool) -> None:
        """Before the forward of one; whoever has the weights may have changed them between two steps."""
        self._may_have_changed |= self._is_between_steps
        self._is_between_steps = last

    def settle(self) -> None:
        """Until no rank computes with the weights any more, so that each may change its part; all call it.

        Raises:
            WanmaError: a module has changed a weight as it computed.
        """
        for tensor in self.tensors:
            tensor.check()
        self._meet()
        self._may_have_changed = True

    def gathered(self) -> None:
        """Until all have changed what they were to change; all call it, before they compute."""
        if self._may_have_changed:
            for tensor in self.tensors:
                tensor.write()
            self._meet()
            self._may_have_changed = False
            for tensor in self.tensors if is_watched(self._steps) else ():
                tensor.note()
            self._steps += 1

    def begin_steps(self) -> None:
        """Watch the first steps from here on."""
        self._steps = 0

    def _meet(self) -> None:
        with self._stopwatch.waiting("data"):
            for group in self._groups:
                options = BarrierOptions()
                options.asyncOp = False
                group.barrier(options)


def share_weights(model: nn.Module, plan: Plan, stopwatch: Stopwatch) -> CommonWeights | None:
    """Let ranks compute with common copies of what FSDP2 has sharded; every rank of a shard group calls it.

    Values stay. None where there is nothing to have in common: other devices, ranks of several machines or
    without shared memory, offloaded parameters.
    """
    if plan.device != "cpu" or plan.offload_parameters != "nothing":
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
    """Say whether all parameters of one of FSDP2's groups lie whole in memory that ranks share.

    To gather them copies nothing then. A group that is not sharded computes with a copy.
    """
    gather = group._all_gather_comm
    return isinstance(gather, _Gather) and gather.is_all


def communicates(group: Any) -> bool:
    """Return whether parameters of one of FSDP2's groups come from other ranks at each gather."""
    shards: int = getattr(group.mesh_info, "shard_mesh_size", 1)
    return shards > 1 and not is_common(group)


class _Gather(AllGather):
    """Of a unit of which some is common, or all."""

    def __init__(self, weights: CommonWeights, usual: AllGather | None) -> None:
        self._weights, self._usual = weights, usual

    @property
    def is_all(self) -> bool:
        """Nothing is left to be gathered."""
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
        return None  # what FSDP2 goes on with is one element of each parameter, which nobody reads


class Common:
    """One parameter's whole copy. Where it computes in the precision of the state, the shard itself becomes
    this rank's part of it.

    Args:
        whole: what computes, and what fills the last ranks' parts up.
        part: the memory of this rank's part of it as a tensor of its own. Were it a view, autograd would hold
            a change to the shard against whoever computes with the whole.
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
        """A copy of a parameter is no part of the whole."""
        return self

    @torch.no_grad()
    def keep(self) -> None:
        """Make the shard what it has to be, where somebody has put another in its place: `Module.to` and
        `load_state_dict(assign=True)` do."""
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
        """Bring this rank's part to what its shard has become."""
        shard: Any = self._shard()
        if not self._is_shard and shard is not None:
            local = shard.sharded_param._local_tensor
            self._part[: local.numel()].copy_(local.view(-1))

    def note(self) -> None:
        """Remember the values of this rank's part, before anybody computes with them."""
        self._noted = checksum(self._part)

    def check(self) -> None:
        """
        Raises:
            WanmaError: as of `CommonWeights.settle`.
        """
        noted, self._noted = self._noted, None
        if self._whole._version != self._changes or (noted is not None and checksum(self._part) != noted):
            raise refuse_lost_change(self._name, on_cpu=True)

    def _after(
        self, _outputs: Any, _metadata: None, _dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        return (self._whole, ()) if out is None else None


class _Before:
    """Answers what is to be gathered: one element.

    FSDP2 looks at the signature of whoever answers at every gather of every parameter. To find that of a
    method out took longer than all the rest of a gather; this one is told.
    """

    __signature__ = Signature([Parameter("mesh", Parameter.POSITIONAL_ONLY)])

    def __init__(self, token: Tensor) -> None:
        self._token = token

    def __call__(self, _mesh: Any, /) -> tuple[tuple[Tensor, ...], None]:
        return (self._token,), None


def _named_shards(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's, of all units, with the parameters' names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in units(model):
        group = group_of(unit)
        for shard in group.fsdp_params if group is not None else ():
            yield names.get(id(shard.sharded_param), "a parameter"), shard


def _is_by_rows(shard: Any) -> bool:
    """Whether the ranks' shards, filled up to equal lengths, follow each other in the whole, and are gathered
    as they are."""
    return bool(
        getattr(shard.mesh_info, "shard_mesh_size", 1) > 1
        and shard.fsdp_placement.dim == 0
        and shard._orig_size.numel() > 0
        and not hasattr(shard.sharded_param._local_tensor, "fsdp_pre_all_gather")
    )


def _computed_in(shard: Any) -> torch.dtype:
    own: torch.dtype = shard.sharded_param.dtype
    return (shard.mp_policy.param_dtype or own) if own.is_floating_point else own
