"""Data parallelism without FSDP2: every rank holds all parameters in the precision that it computes in.

FSDP2 does it too, by copying all parameters into one buffer and out of another before every step, and all
gradients into a third. Here plain tensors in the memory of the state itself compute, and gradients are summed
where backward has put them, while backward runs. From outside the state looks the same: DTensors under the
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

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.gradients.gradient_compression import GradientCompression, replicated_layout
from wanma.parallel.gradients.gradient_reducer import Bucket, GradientReducer, GradientSpec, assign_buckets
from wanma.parallel.gradients.reduction_groups import build_reduction_groups
from wanma.parallel.gradients.replicated_compression import all_reduce_compressed
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.forward_changes import ForwardChangeCheck
from wanma.parallel.parameters.replicated_parameters import (
    ReplicatedParameter,
    install_states,
    is_partial,
    replicate_parameters,
    wrap_local,
)
from wanma.parallel.parameters.stale_parameters import StaleParameterCheck
from wanma.torch_internals.dispatch import tree_map_only
from wanma.torch_internals.loaded import DTensor
from wanma.torch_internals.uncompiled import uncompiled


class Replicated:
    """Parameters of one module, or of one stage of it, replicated on every data rank.

    Args:
        input_dtype: dtype to which all floating-point inputs of the module are cast; None leaves them.
        gradient_divisor: number by which summed gradients are divided.
        selected: parameters of `model` to hold; the others are left alone. None: all.
        compression: sums gradients over the replicas in fewer bytes, after backward; None: uncompressed.
        permanently_frozen: names of parameters that are frozen for good.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel_mesh: ParallelMesh,
        communication_timer: CommunicationTimer,
        input_dtype: torch.dtype | None,
        *,
        gradient_divisor: int = 1,
        selected: Collection[nn.Parameter] | None = None,
        compression: GradientCompression | None = None,
        permanently_frozen: Collection[str] = (),
    ) -> None:
        self.gradient_divisor = gradient_divisor
        self.communication_timer = communication_timer
        self._input_dtype = input_dtype
        self._tp_group = parallel_mesh.dim_mesh("tp").get_group() if parallel_mesh.plan.tp > 1 else None
        self._bucket_bytes = parallel_mesh.plan.bucket_bytes
        # Under a pipeline's schedule gradients are complete only after all its backwards; for single numbers
        # beside FSDP2 an overlap is not worth it.
        overlaps = parallel_mesh.plan.overlap and parallel_mesh.plan.pp == 1 and selected is None
        self._reduction_groups = build_reduction_groups(parallel_mesh, overlaps_backward=overlaps)
        self._overlaps = overlaps and len(self._reduction_groups) == 1
        self._reducer: GradientReducer | None = None
        """Reducer of the step whose last micro-batch runs backward; None before it."""
        self._is_last = False
        self._stale_parameter_check = StaleParameterCheck(model)
        self._parameters = replicate_parameters(
            model, parallel_mesh, selected, permanently_frozen=permanently_frozen
        )
        self._change_check = ForwardChangeCheck([parameter.full_name for parameter in self._parameters])
        self._specs = [_gradient_spec(index, parameter) for index, parameter in enumerate(self._parameters)]
        self._bucket_layout: tuple[list[GradientSpec], list[Bucket]] = [], []
        self._compression = compression if parallel_mesh.parameter_mesh["replicate"].size() > 1 else None
        if self._compression is not None:
            self._replica_group = parallel_mesh.parameter_mesh["replicate"].get_group()
            for parameter, size in zip(self._parameters, self._specs, strict=True):
                slot = replicated_layout(
                    parameter.full_name, partial(getattr, parameter, "state"), tuple(size.shape)
                )
                self._compression.register(slot)
        self._is_bound_for_compute = self._has_changed = False
        # Outside what is compiled, as FSDP2's are.
        pre_hook = uncompiled(self._before_forward)
        model.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True)

    def begin_micro_batch(self, is_last: bool) -> None:
        """Begin a micro-batch; the backward of the step's last one completes the gradients."""
        self._change_check.begin_micro_batch()
        self._reducer, self._is_last = None, is_last

    def check_weights_unchanged(self) -> None:
        """Check weights after a backward that has failed.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        self._change_check.end_step()

    def finalize_gradients(self) -> None:
        """Give the state its gradients, summed over the data ranks: once per step, after its last backward.

        Raises:
            WanmaError: a parameter is stale (`StaleParameterCheck`), or a forward has changed one
                (`ForwardChangeCheck`).
        """
        self._stale_parameter_check.check()
        self._has_changed = self._change_check.end_step()
        for parameter in self._parameters:
            parameter.adopt_data()
        gradients = self._reduce_over_dp(self._reduce_over_tp())
        self.reshard()
        for index, gradient in gradients.items():
            parameter = self._parameters[index]
            if self.gradient_divisor != 1:
                gradient.div_(self.gradient_divisor)
            state = parameter.state
            state.grad = (
                wrap_local(gradient, state.device_mesh, state.placements, like=state)
                if isinstance(state, DTensor)
                else gradient
            )

    def forward_parameters(self) -> Iterator[Tensor]:
        """Yield the tensors beside the module's parameters that are or were its parameters."""
        yield from (
            parameter.compute_parameter
            for parameter in self._parameters
            if parameter.compute_parameter is not None
        )
        yield from self._stale_parameter_check.original_parameters()

    def synchronize_gathers(self) -> None:
        """No-op counterpart of `Sharded.synchronize_gathers`: replicated parameters are not gathered."""

    def wait_until_weights_unused(self) -> None:
        """No-op counterpart of `Sharded.wait_until_weights_unused`: every rank has its own weights."""

    def reset_step_count(self) -> None:
        """No-op counterpart of `Sharded.reset_step_count`: steps are counted by their backwards."""

    def reshard(self) -> None:
        """Make the state the module's parameters again."""
        if self._is_bound_for_compute:
            self._is_bound_for_compute = False
            install_states(self._parameters)

    def _before_forward(
        self,
        module: nn.Module,  # noqa: ARG002  # a hook's
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._is_bound_for_compute:
            self._is_bound_for_compute = True
            for index, parameter in enumerate(self._parameters):
                parameter.install(parameter.prepare_compute_parameter(_gradient_hook(self, index)))
            self._change_check.begin_step(
                [
                    parameter.compute_parameter
                    for parameter in self._parameters
                    if parameter.compute_parameter is not None
                ]
            )
        if self._input_dtype is None:
            return arguments, keywords

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, (arguments, keywords))  # type: ignore[no-any-return]

    @property
    def _is_compressed(self) -> bool:
        return self._compression is not None and self._compression.is_active

    def _new_reducer(self, pop_gradient: Callable[[int], Tensor | None], axis: int) -> GradientReducer:
        sizes = self._trained()
        if sizes != self._bucket_layout[0]:  # parameters may be frozen and released during training
            self._bucket_layout = sizes, assign_buckets(sizes, self._bucket_bytes)
        first = sizes[0].parameter_index if sizes else 0
        device = local_tensor(self._parameters[first].state).device if sizes else torch.device("cpu")
        sums = self._reduction_groups[axis]
        return GradientReducer(
            self._bucket_layout[1],
            device,
            pop_gradient,
            sums.start_all_reduce,
            self.communication_timer,
            sums.flatten_bucket,
        )

    def _trained(self) -> list[GradientSpec]:
        return [size for size in self._specs if self._parameters[size.parameter_index].is_trained]

    def _mark_ready(self, index: int) -> None:
        """Report a gradient that backward has made to the reducer of the step's last micro-batch."""
        if self._reducer is None and self._is_last and self._overlaps and not self._is_compressed:
            # Not before: the forward may have frozen or released parameters.
            self._reducer = self._new_reducer(self._pop_complete_gradient, axis=0)
        if self._reducer is not None:
            self._reducer.mark_ready(index)

    def _pop_complete_gradient(self, index: int) -> Tensor | None:
        """Take the gradient of a parameter that is not split over tensor ranks."""
        gradient = self._parameters[index].pop_gradient()
        return None if gradient is None else local_tensor(gradient).contiguous()

    def _reduce_over_tp(self) -> dict[int, Tensor]:
        """Take the remaining gradients as plain tensors, partial ones summed over the tensor ranks."""
        popped = {index: parameter.pop_gradient() for index, parameter in enumerate(self._parameters)}
        gradients = {index: gradient for index, gradient in popped.items() if gradient is not None}
        local_gradients = {
            index: local_tensor(gradient).contiguous() for index, gradient in gradients.items()
        }
        partial_indices = [index for index, gradient in gradients.items() if is_partial(gradient)]
        for dtype in dict.fromkeys(local_gradients[index].dtype for index in partial_indices):
            assert self._tp_group is not None
            members = [index for index in partial_indices if local_gradients[index].dtype == dtype]
            flat = torch.cat([local_gradients[index].view(-1) for index in members])
            with self.communication_timer.time_blocking_transfer("tensor"):
                dist.all_reduce(flat, group=self._tp_group)
            parts = flat.split([local_gradients[index].numel() for index in members])
            for index, part in zip(members, parts, strict=True):
                local_gradients[index] = part.view_as(local_gradients[index])
        return local_gradients

    def _reduce_over_dp(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the sums of the gradients over the data ranks; none where no rank has one.

        Args:
            gradients: gradients of which no sum is in progress.
        """
        if self._compression is not None and self._compression.is_active:
            names = {
                size.parameter_index: self._parameters[size.parameter_index].full_name
                for size in self._trained()
            }
            return all_reduce_compressed(
                gradients,
                assign_buckets(self._trained(), self._bucket_bytes),
                names,
                self._compression,
                self._replica_group,
                self.communication_timer,
            )
        for axis in range(len(self._reduction_groups)):
            left = gradients

            def take(index: int, left: dict[int, Tensor] = left) -> Tensor | None:
                return left.pop(index, None)

            sums = self._reducer if self._reducer is not None else self._new_reducer(take, axis)
            self._reducer, self._is_last = None, False
            gradients = sums.finalize(take, self._has_changed)
            self._has_changed = sums.any_flag
            # From now on this model's gradients are complete only at the end.
            self._overlaps = self._overlaps and not sums.has_late_gradients
        if self._has_changed:
            self._change_check.compare_replicas([sums.group for sums in self._reduction_groups])
        return gradients


def find_replicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 does not take.

    They have no dims, or no elements, or are trained in another dtype than most of the trained ones.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    main_dtype = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return {
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 0
        or parameter.numel() == 0
        or (parameter.requires_grad and parameter.dtype != main_dtype)
    }


def _gradient_hook(replicated: Replicated, index: int) -> Callable[[Tensor], None]:
    """Return a hook that reports a gradient to `replicated`.

    It does not keep `replicated` alive, as a parameter's hook otherwise would.
    """
    reference = weakref.ref(replicated)

    def on_gradient(_parameter: Tensor) -> None:
        if (target := reference()) is not None:
            target._mark_ready(index)

    return on_gradient


def _gradient_spec(index: int, parameter: ReplicatedParameter) -> GradientSpec:
    local = local_tensor(parameter.state)
    return GradientSpec(index, local.shape, local.dtype, parameter.is_complete_in_backward)
