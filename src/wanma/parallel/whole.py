"""Data parallel where every rank holds everything in the precision that it computes in, without FSDP2.

FSDP2 does it too, by copying all parameters into one buffer and out of another before every step, and all
gradients into a third. Here what computes are plain tensors in the memory of the state itself, and
gradients are summed where backward has put them, while it goes on. From outside the state looks the same:
DTensors under the module's own names, over (replicate, shard). Parameters of no dims, which FSDP2 does not
take, are held so beside it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_map_only

from wanma.checkpoint.shards import local_part
from wanma.collectives.stopwatch import Stopwatch
from wanma.parallel.compressed import GradientCompression, whole_slot
from wanma.parallel.compressed_whole import sum_compressed
from wanma.parallel.data_sums import data_sums
from wanma.parallel.forward_changes import ForwardChanges
from wanma.parallel.freezing import refuse_release
from wanma.parallel.gradient_sums import Bucket, GradientSums, Size, buckets
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
    is_fixed: bool = False
    """Frozen for good."""
    began_trained: bool = False
    """It was to be trained when the step began."""

    @property
    def is_early(self) -> bool:
        """Whether the gradient is complete once backward has made it: tensor ranks have no parts of it."""
        return self.tensor_ranks is None or all(place.is_shard() for place in self.tensor_ranks[1])

    def alias(self, on_gradient: Callable[[Tensor], None]) -> nn.Parameter:
        """What computes, in the memory of the state; made anew where that has moved since.

        Args:
            on_gradient: to be called when a backward has made its gradient.
        """
        local = local_part(self.state)
        if self.computing is None or local_part(self.computing).data_ptr() != local.data_ptr():
            value = local
            if self.tensor_ranks is not None:
                value = _joined(local, *self.tensor_ranks, like=self.state)
            can_be_trained = value.is_floating_point() or value.is_complex()
            self.computing = nn.Parameter(value, can_be_trained)
            if can_be_trained:
                self.computing.register_post_accumulate_grad_hook(on_gradient)
        # Who trains may freeze and release parameters between steps; so may the model in its forward.
        self.began_trained = self.state.requires_grad
        self.computing.requires_grad_(self.began_trained)
        return self.computing

    @property
    def is_trained(self) -> bool:
        """Return whether this step may have made a gradient."""
        if self.computing is None:
            return self.state.requires_grad
        return self.began_trained or self.computing.requires_grad

    def take_flag(self) -> None:
        """Freeze or release the state as the model has done with what computes.

        Raises:
            WanmaError: it is frozen for good.
        """
        assert self.computing is not None
        if self.computing.requires_grad != self.began_trained:
            self.state.requires_grad_(self.computing.requires_grad)
        if self.is_fixed and self.state.requires_grad:
            refuse_release(self.full_name, self.state)

    @torch.no_grad()
    def take_data(self) -> None:
        """Copy what a forward pass has assigned to the data of what computes into the state."""
        if self.computing is None:
            return
        given, local = local_part(self.computing), local_part(self.state)
        if given.data_ptr() != local.data_ptr() and given.shape == local.shape:
            local.copy_(given)

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
        scalars_only: leave all parameters alone but those of `kept_whole`.
        compression: sums gradients over the replicas in fewer bytes, after backward; None: as they are.
        fixed: names of parameters that are frozen for good.
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
        fixed: Collection[str] = (),
    ) -> None:
        self.divisor = divisor
        self.communication = stopwatch
        self._input_dtype = input_dtype
        self._tensor_ranks = grid.axis("tp").get_group() if grid.plan.tp > 1 else None
        self._bucket_bytes = grid.plan.bucket_bytes
        # What a pipeline's schedule drives is complete only when its backwards are all done; single numbers
        # beside FSDP2 are not worth it.
        overlaps = grid.plan.overlap and grid.plan.pp == 1 and not scalars_only
        self._axes = data_sums(grid, beside_backward=overlaps)
        self._overlaps = overlaps and len(self._axes) == 1
        self._sums: GradientSums | None = None
        """Of the step whose last micro-batch runs backward."""
        self._is_last = False
        self._strays = Strays(model)
        self._held = _hold(model, grid, scalars_only=scalars_only)
        for one in self._held:
            one.is_fixed = one.full_name in fixed
        self._changes = ForwardChanges([held.full_name for held in self._held])
        self._sizes = [_size(index, held) for index, held in enumerate(self._held)]
        self._layout: tuple[list[Size], list[Bucket]] = [], []
        self._compression = compression if grid.state["replicate"].size() > 1 else None
        if self._compression is not None:
            self._replicas = grid.state["replicate"].get_group()
            for held, size in zip(self._held, self._sizes, strict=True):
                slot = whole_slot(held.full_name, partial(getattr, held, "state"), tuple(size.shape))
                self._compression.register(slot)
        self._computes = self._has_changed = False
        # Outside what is compiled, as FSDP2's are.
        before = torch.compiler.disable(self._before_forward)
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def begin_micro_batch(self, last: bool) -> None:
        """Say whether the next backward is the step's last, in which gradients become complete."""
        self._changes.begin_micro_batch()
        self._sums, self._is_last = None, last

    def refuse_changes(self) -> None:
        """When a backward has failed.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        self._changes.end_backward()

    def end_backward(self) -> None:
        """Give the state its gradients, summed over the data ranks: once per step, after its last backward.

        Raises:
            WanmaError: as of `Strays` and `ForwardChanges`.
        """
        self._strays.refuse()
        self._has_changed = self._changes.end_backward()
        for held in self._held:
            held.take_data()
        gradients = self._over_data_ranks(self._over_tensor_ranks())
        self.rest()
        for index, gradient in gradients.items():
            held = self._held[index]
            if self.divisor != 1:
                gradient.div_(self.divisor)
            state: Any = held.state
            state.grad = _joined(gradient, state.device_mesh, state.placements, like=state)

    def computing(self) -> Iterator[Tensor]:
        """As of `Sharded`."""
        yield from (held.computing for held in self._held if held.computing is not None)
        yield from self._strays.given()

    def meet(self) -> None:
        """As of `Sharded`: here nothing is gathered."""

    def settle(self) -> None:
        """As of `Sharded`: here every rank has its own."""

    def begin_steps(self) -> None:
        """As of `Sharded`: steps are counted by their backwards here."""

    def rest(self) -> None:
        """Let the module's parameters be the state again."""
        if self._computes:
            self._computes = False
            for held in self._held:
                _name(held, held.state)
                held.take_flag()

    def _before_forward(
        self,
        module: nn.Module,  # noqa: ARG002  # a hook's
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._computes:
            self._computes = True
            for index, held in enumerate(self._held):
                _name(held, held.alias(_hears(self, index)))
            self._changes.begin([held.computing for held in self._held if held.computing is not None])
        if self._input_dtype is None:
            return arguments, keywords

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, (arguments, keywords))  # type: ignore[no-any-return]

    @property
    def _compresses(self) -> bool:
        return self._compression is not None and self._compression.is_on

    def _sums_of(self, take: Callable[[int], Tensor | None], axis: int) -> GradientSums:
        sizes = self._trained()
        if sizes != self._layout[0]:  # parameters may be frozen and released as training goes on
            self._layout = sizes, buckets(sizes, self._bucket_bytes)
        first = sizes[0].parameter if sizes else 0
        device = local_part(self._held[first].state).device if sizes else torch.device("cpu")
        sums = self._axes[axis]
        return GradientSums(self._layout[1], device, take, sums.begin, self.communication, sums.join)

    def _trained(self) -> list[Size]:
        return [size for size in self._sizes if self._held[size.parameter].is_trained]

    def _on_gradient(self, index: int) -> None:
        """Backward has made the gradient of a parameter."""
        if self._sums is None and self._is_last and self._overlaps and not self._compresses:
            # Not before: the forward may have frozen or released parameters.
            self._sums = self._sums_of(self._take_complete, axis=0)
        if self._sums is not None:
            self._sums.arrived(index)

    def _take_complete(self, index: int) -> Tensor | None:
        """The gradient of a parameter of which tensor ranks have no parts."""
        gradient = self._held[index].take_gradient()
        return None if gradient is None else local_part(gradient).contiguous()

    def _over_tensor_ranks(self) -> dict[int, Tensor]:
        """What gradients are left, as plain tensors, with the sum of those of which each tensor rank has a
        part."""
        taken = {index: held.take_gradient() for index, held in enumerate(self._held)}
        gradients = {index: gradient for index, gradient in taken.items() if gradient is not None}
        plain = {index: local_part(gradient).contiguous() for index, gradient in gradients.items()}
        owed = [index for index, gradient in gradients.items() if _is_owed(gradient)]
        for dtype in dict.fromkeys(plain[index].dtype for index in owed):
            assert self._tensor_ranks is not None
            members = [index for index in owed if plain[index].dtype == dtype]
            flat = torch.cat([plain[index].view(-1) for index in members])
            with self.communication.waiting("tensor"):
                dist.all_reduce(flat, group=self._tensor_ranks)
            parts = flat.split([plain[index].numel() for index in members])
            for index, part in zip(members, parts, strict=True):
                plain[index] = part.view_as(plain[index])
        return plain

    def _over_data_ranks(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Sums of the gradients; none where no rank has one.

        Args:
            gradients: those that are not under way already.
        """
        if self._compression is not None and self._compression.is_on:
            names = {size.parameter: self._held[size.parameter].full_name for size in self._trained()}
            return sum_compressed(
                gradients,
                buckets(self._trained(), self._bucket_bytes),
                names,
                self._compression,
                self._replicas,
                self.communication,
            )
        for axis in range(len(self._axes)):
            left = gradients

            def take(index: int, left: dict[int, Tensor] = left) -> Tensor | None:
                return left.pop(index, None)

            sums = self._sums if self._sums is not None else self._sums_of(take, axis)
            self._sums, self._is_last = None, False
            gradients = sums.finish(take, self._has_changed)
            self._has_changed = sums.was_said
            # From now on this model's are complete only at the end.
            self._overlaps = self._overlaps and not sums.came_late
        if self._has_changed:
            self._changes.compare([sums.group for sums in self._axes])
        return gradients


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that FSDP2 does not take: of no dims, without elements, or trained in another data type than
    most of the trained ones."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return {
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 0
        or parameter.numel() == 0
        or (parameter.requires_grad and parameter.dtype != usual)
    }


def _hold(model: nn.Module, grid: Grid, *, scalars_only: bool) -> list[_Held]:
    """Make the parameters of `model` its state: DTensors over all ranks that hold them."""
    everywhere = (Replicate(), Replicate())
    held: dict[nn.Parameter, _Held] = {}
    alone = kept_whole(model) if scalars_only else set()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (scalars_only and parameter not in alone):
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


def _hears(whole: Whole, index: int) -> Callable[[Tensor], None]:
    """What tells `whole` of a gradient; it does not keep it alive, as a parameter's hook otherwise would."""
    listener = weakref.ref(whole)

    def on_gradient(_parameter: Tensor) -> None:
        if (found := listener()) is not None:
            found._on_gradient(index)

    return on_gradient


def _size(index: int, held: _Held) -> Size:
    local = local_part(held.state)
    return Size(index, local.shape, local.dtype, held.is_early)


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
