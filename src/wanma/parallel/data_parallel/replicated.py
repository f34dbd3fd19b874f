"""Data parallelism without FSDP2: every rank holds all parameters in the precision that it computes in.

FSDP2 does it too, by copying all parameters into one buffer and out of another before every step, and all
gradients into a third. Here plain tensors in the memory of the state itself compute, and gradients are summed
where backward has put them, while it goes on. From outside the state looks the same: DTensors under the
module's own names, over (replicate, shard). Parameters of no dims, which FSDP2 does not take, are held so
beside it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from wanma.checkpoint.format.local_shards import local_part
from wanma.collectives.timing.communication_timer import Stopwatch
from wanma.parallel.gradients.gradient_compression import GradientCompression, whole_slot
from wanma.parallel.gradients.gradient_reducer import Bucket, GradientSums, Size, buckets
from wanma.parallel.gradients.reduction_groups import data_sums
from wanma.parallel.gradients.replicated_compression import sum_compressed
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.forward_changes import ForwardChanges
from wanma.parallel.parameters.replicated_parameters import Held, hold, is_owed, joined
from wanma.parallel.parameters.stale_parameters import Strays


class Whole:
    """Parameters of one module, or of one stage of it, replicated on every data rank.

    Args:
        input_dtype: dtype to which all floating-point inputs of the module are cast; None leaves them.
        divisor: number by which summed gradients are divided.
        only: parameters of `model` to hold; the others are left alone. None: all.
        compression: sums gradients over the replicas in fewer bytes, after backward; None: uncompressed.
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
        only: Collection[nn.Parameter] | None = None,
        compression: GradientCompression | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        self.divisor = divisor
        self.communication = stopwatch
        self._input_dtype = input_dtype
        self._tensor_ranks = grid.axis("tp").get_group() if grid.plan.tp > 1 else None
        self._bucket_bytes = grid.plan.bucket_bytes
        # Under a pipeline's schedule gradients are complete only after all its backwards; for single numbers
        # beside FSDP2 an overlap is not worth it.
        overlaps = grid.plan.overlap and grid.plan.pp == 1 and only is None
        self._axes = data_sums(grid, beside_backward=overlaps)
        self._overlaps = overlaps and len(self._axes) == 1
        self._sums: GradientSums | None = None
        """Reducer of the step whose last micro-batch runs backward; None before it."""
        self._is_last = False
        self._strays = Strays(model)
        self._held = hold(model, grid, only, fixed=fixed)
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
        """Begin a micro-batch; the backward of the step's last one completes the gradients."""
        self._changes.begin_micro_batch()
        self._sums, self._is_last = None, last

    def refuse_changes(self) -> None:
        """Check weights after a backward that has failed.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        self._changes.end_backward()

    def end_backward(self) -> None:
        """Give the state its gradients, summed over the data ranks: once per step, after its last backward.

        Raises:
            WanmaError: a parameter is stale (`Strays`), or a forward has changed one (`ForwardChanges`).
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
            state.grad = joined(gradient, state.device_mesh, state.placements, like=state)

    def computing(self) -> Iterator[Tensor]:
        """Yield the tensors beside the module's parameters that are or were its parameters."""
        yield from (held.computing for held in self._held if held.computing is not None)
        yield from self._strays.given()

    def meet(self) -> None:
        """No-op counterpart of `Sharded.meet`: replicated parameters are not gathered."""

    def settle(self) -> None:
        """No-op counterpart of `Sharded.settle`: every rank has its own weights."""

    def begin_steps(self) -> None:
        """No-op counterpart of `Sharded.begin_steps`: steps are counted by their backwards."""

    def rest(self) -> None:
        """Make the state the module's parameters again."""
        if self._computes:
            self._computes = False
            for held in self._held:
                held.put(held.state)
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
                held.put(held.alias(_hears(self, index)))
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
        """Report a gradient that backward has made to the reducer of the step's last micro-batch."""
        if self._sums is None and self._is_last and self._overlaps and not self._compresses:
            # Not before: the forward may have frozen or released parameters.
            self._sums = self._sums_of(self._take_complete, axis=0)
        if self._sums is not None:
            self._sums.arrived(index)

    def _take_complete(self, index: int) -> Tensor | None:
        """Take the gradient of a parameter that is not split over tensor ranks."""
        gradient = self._held[index].take_gradient()
        return None if gradient is None else local_part(gradient).contiguous()

    def _over_tensor_ranks(self) -> dict[int, Tensor]:
        """Take the remaining gradients as plain tensors, partial ones summed over the tensor ranks."""
        taken = {index: held.take_gradient() for index, held in enumerate(self._held)}
        gradients = {index: gradient for index, gradient in taken.items() if gradient is not None}
        plain = {index: local_part(gradient).contiguous() for index, gradient in gradients.items()}
        owed = [index for index, gradient in gradients.items() if is_owed(gradient)]
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
        """Return the sums of the gradients over the data ranks; none where no rank has one.

        Args:
            gradients: gradients of which no sum is in progress.
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
            # From now on this model's gradients are complete only at the end.
            self._overlaps = self._overlaps and not sums.came_late
        if self._has_changed:
            self._changes.compare([sums.group for sums in self._axes])
        return gradients


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 does not take.

    They have no dims, or no elements, or are trained in another dtype than most of the trained ones.
    """
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


def _hears(whole: Whole, index: int) -> Callable[[Tensor], None]:
    """Return a hook that reports a gradient to `whole`.

    It does not keep `whole` alive, as a parameter's hook otherwise would.
    """
    listener = weakref.ref(whole)

    def on_gradient(_parameter: Tensor) -> None:
        if (found := listener()) is not None:
            found._on_gradient(index)

    return on_gradient


def _size(index: int, held: Held) -> Size:
    local = local_part(held.state)
    return Size(index, local.shape, local.dtype, held.is_early)
