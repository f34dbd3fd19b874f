"""Data parallel where every rank holds everything in the precision that it computes in, without FSDP2.

FSDP2 does it too, by copying all parameters into one buffer and out of another before every step, and all
gradients into a third. Here what computes are plain tensors in the memory of the state itself, and
gradients are summed where backward has put them. From outside the state looks the same: DTensors under the
module's own names, over (replicate, shard). Parameters of no dims, which FSDP2 does not take, are held so
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_map_only

from wanma.checkpoint.shards import local_part
from wanma.collectives.gloo import Stopwatch
from wanma.job.plan import REDUCED_TOGETHER_BYTES
from wanma.parallel.compressed import GradientCompression, whole_slot
from wanma.parallel.mesh import Grid
from wanma.parallel.strays import Strays


@dataclass
class _Held:
    """One parameter, and the modules that name it: several where modules share it."""

    full_name: str
    """In the model, as the first of those modules has it."""
    state: nn.Parameter
    tensor_ranks: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """How `tp` splits it."""
    named: list[tuple[nn.Module, str]] = field(default_factory=list)
    computing: nn.Parameter | None = None

    def alias(self) -> nn.Parameter:
        """What computes, in the memory of the state; made anew where that has moved since."""
        local = local_part(self.state)
        if self.computing is None or local_part(self.computing).data_ptr() != local.data_ptr():
            value = local
            if self.tensor_ranks is not None:
                value = _joined(local, *self.tensor_ranks, like=self.state)
            self.computing = nn.Parameter(value, self.state.requires_grad)
        # Who trains may freeze and release parameters between steps.
        self.computing.requires_grad_(self.state.requires_grad)
        return self.computing

    def take_gradient(self) -> Tensor | None:
        """This rank's, from where backward has put it: placed as the parameter, or a part of its sum."""
        if self.computing is None:
            return None
        gradient, self.computing.grad = self.computing.grad, None
        if isinstance(gradient, DTensor) and self.tensor_ranks is not None:
            _, placements = self.tensor_ranks
            # What computes with DTensors, as no module of ours does, may place it otherwise.
            if not _is_owed(gradient) and gradient.placements != placements:
                return gradient.redistribute(placements=placements)
        return gradient


class Whole:
    """The parameters of one module, or of one stage of it, whole on every data rank.

    Args:
        input_dtype: given to all floating-point tensors that come into the module; None leaves them.
        divisor: of gradients, beside their sum.
        scalars_only: leave all other parameters alone.
        compression: sums gradients over the data ranks in fewer bytes; None: they are summed as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        stopwatch: Stopwatch,
        input_dtype: torch.dtype | None,
        *,
        divisor: int = 1,
        scalars_only: bool = False,
        compression: GradientCompression | None = None,
    ) -> None:
        self.divisor = divisor
        self.communication = stopwatch
        self._input_dtype = input_dtype
        data_axes = (grid.state[name] for name in ("replicate", "shard"))
        self._data_ranks = [axis.get_group() for axis in data_axes if axis.size() > 1]
        self._tensor_ranks = grid.axis("tp").get_group() if grid.plan.tp > 1 else None
        self._strays = Strays(model)
        self._held = _hold(model, grid, scalars_only=scalars_only)
        self._compression = compression if self._data_ranks else None
        if self._compression is not None:
            for held in self._held:
                shape = tuple(local_part(held.state).shape)
                self._compression.register(whole_slot(held.full_name, partial(getattr, held, "state"), shape))
        self._computes = False
        # Outside what is compiled, as FSDP2's are.
        before = torch.compiler.disable(self._before_forward)
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def begin_micro_batch(self, last: bool) -> None:
        """As of `Sharded`; here nothing is communicated before `end_backward`."""

    def end_backward(self) -> None:
        """Give the state its gradients, summed over the data ranks: once per step, after its last backward.

        Raises:
            JobError: as of `Strays`.
        """
        self._strays.refuse()
        self.communication.start(time.perf_counter())
        gradients = self._over_tensor_ranks([held.take_gradient() for held in self._held])
        for ranks in self._data_ranks:
            gradients = self._over_data_ranks(gradients, ranks)
        self.communication.stop(time.perf_counter())
        self.rest()
        for held, gradient in zip(self._held, gradients, strict=True):
            if gradient is not None:
                if self.divisor != 1:
                    gradient.div_(self.divisor)
                state: Any = held.state
                state.grad = _joined(gradient, state.device_mesh, state.placements, like=state)

    def rest(self) -> None:
        """Let the module's parameters be the state again."""
        if self._computes:
            self._computes = False
            for held in self._held:
                _name(held, held.state)

    def _before_forward(
        self,
        module: nn.Module,  # noqa: ARG002  # a hook's
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._computes:
            self._computes = True
            for held in self._held:
                _name(held, held.alias())
        if self._input_dtype is None:
            return arguments, keywords

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, (arguments, keywords))  # type: ignore[no-any-return]

    def _over_tensor_ranks(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """As plain tensors, with the sum of those of which each tensor rank has a part."""
        plain = [None if gradient is None else local_part(gradient).contiguous() for gradient in gradients]
        owed = {
            index: whole
            for index, (gradient, whole) in enumerate(zip(gradients, plain, strict=True))
            if gradient is not None and whole is not None and _is_owed(gradient)
        }
        if owed:
            assert self._tensor_ranks is not None
            works, sums = _sum_together(list(owed.values()), self._tensor_ranks)
            for work in works:
                work.wait()
            for index, total in zip(owed, sums, strict=True):
                plain[index] = total
        return plain

    def _over_data_ranks(self, sums: list[Tensor | None], group: dist.ProcessGroup) -> list[Tensor | None]:
        """Their sums, which take their place; None where no rank has a gradient.

        Which of them have one may differ, as where an expert got no token: all send the same tensors, zeros
        for what they do not have, and whether they have it.
        """
        trained = [index for index, held in enumerate(self._held) if held.state.requires_grad]
        if not trained:
            return sums
        device = local_part(self._held[0].state).device
        has = torch.tensor([float(sums[index] is not None) for index in trained], device=device)
        works = [_all_reduce(has, group)]
        exchanged = trained
        compresses = self._compression is not None and self._compression.is_on
        if compresses:
            works.pop().wait()  # where nobody has a gradient, what was left out of earlier ones stays
            exchanged = _anywhere(trained, has)
        for bucket in _buckets([(index, local_part(self._held[index].state).nbytes) for index in exchanged]):
            mine = [_or_zeros(sums[index], self._held[index].state) for index in bucket]
            under_way, totals = (
                self._compressed(bucket, mine, group) if compresses else _sum_together(mine, group)
            )
            works += under_way
            for index, total in zip(bucket, totals, strict=True):
                sums[index] = total
        for work in works:
            work.wait()
        anywhere = set(_anywhere(trained, has))
        return [total if index in anywhere else None for index, total in enumerate(sums)]

    def _compressed(
        self, bucket: list[int], mine: list[Tensor], group: dist.ProcessGroup
    ) -> tuple[list[dist.Work], list[Tensor]]:
        """As `_sum_together`, through `compression`."""
        assert self._compression is not None
        rows = [tensor.view(1, tensor.numel()) for tensor in mine]
        names = [self._held[index].full_name for index in bucket]
        self._compression.exchange([(name, row, None) for name, row in zip(names, rows, strict=True)], group)
        return [], mine


def _hold(model: nn.Module, grid: Grid, *, scalars_only: bool) -> list[_Held]:
    """Make the parameters of `model` its state: DTensors over all ranks that hold them."""
    everywhere = (Replicate(), Replicate())
    held: dict[nn.Parameter, _Held] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (scalars_only and parameter.ndim > 0):
                continue
            if parameter not in held:
                if isinstance(parameter, DTensor):
                    ranks = parameter.device_mesh, tuple(parameter.placements)
                    mesh, placements = grid.state["replicate", "shard", "state_tp"], (*everywhere, *ranks[1])
                else:
                    ranks, mesh, placements = None, grid.state_mesh, everywhere
                state = _joined(local_part(parameter), mesh, placements, like=parameter)
                full_name = f"{path}.{name}" if path else name
                held[parameter] = _Held(full_name, nn.Parameter(state, parameter.requires_grad), ranks)
            held[parameter].named.append((module, name))
    for one in held.values():
        _name(one, one.state)
    return list(held.values())


def _name(held: _Held, parameter: nn.Parameter) -> None:
    for module, name in held.named:
        module._parameters[name] = parameter


def _is_owed(gradient: Tensor) -> bool:
    """Whether each tensor rank has a summand of it."""
    return isinstance(gradient, DTensor) and gradient.placements[0].is_partial("sum")


@torch.no_grad()
def _joined(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """The DTensor of the shape of `like` of which this rank holds `local`."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _buckets(sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Runs of (parameter, bytes) that are reduced together, from the last, whose gradient is made first.

    A large one goes alone, where it is: nothing is copied.
    """
    bucket: list[int] = []
    held = 0
    for parameter, nbytes in reversed(sizes):
        if nbytes >= REDUCED_TOGETHER_BYTES and bucket:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += nbytes
        if held >= REDUCED_TOGETHER_BYTES:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def _anywhere(trained: list[int], has: Tensor) -> list[int]:
    """Those of `trained` of which some rank has a gradient.

    Args:
        has: by parameter, on how many ranks. In a dry run it has no values, and what one rank has all have.
    """
    ranks = [1.0] * len(trained) if is_fake(has) else has.tolist()
    return [index for index, number in zip(trained, ranks, strict=True) if number]


def _or_zeros(gradient: Tensor | None, state: Tensor) -> Tensor:
    return torch.zeros_like(local_part(state)) if gradient is None else gradient


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> tuple[list[dist.Work], list[Tensor]]:
    """Sums over the ranks of `group`, in a message for each dtype; there when the works have ended."""
    works: list[dist.Work] = []
    sums = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        if len(members) == 1:
            works.append(_all_reduce(tensors[members[0]], group))
            continue
        flat = torch.cat([tensors[index].view(-1) for index in members])
        works.append(_all_reduce(flat, group))
        for index, part in zip(
            members, flat.split([tensors[index].numel() for index in members]), strict=True
        ):
            sums[index] = part.view_as(tensors[index])
    return works, sums


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None  # what is asynchronous has a handle
    return work
