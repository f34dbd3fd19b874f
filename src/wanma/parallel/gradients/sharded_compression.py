"""Compressed sums of gradients under FSDP2, through its communication hooks.

Without replicas the reduce-scatter of the shards is compressed. With replicas (hybrid shard) it is the
all-reduce between them, which crosses the slower links; the reduce-scatter within one replica then stays
uncompressed.

FSDP2 accepts another reduce-scatter, but no other all-reduce: it asks the replicas' process group for that.
So a group that sums as the plan says takes the place of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from wanma.job.errors import WanmaError
from wanma.parallel.gradients.gradient_compression import (
    GradientCompression,
    GradientLayout,
    replicated_layout,
)
from wanma.torch_internals.fsdp import (
    FsdpParameter,
    ReduceScatter,
    full_size,
    module_parameter,
    parameter_group,
    reduce_scatter_of,
)

_MAX_NAMES_IN_MESSAGE = 5
"""Largest number of parameters named in one message."""


def compress_fsdp_unit(
    unit: FSDPModule,
    compression: GradientCompression,
    names: Mapping[int, str],
) -> None:
    """Make one unit of FSDP2 sum its gradients through `compression`; no effect on a single data rank.

    Until compression begins they are summed as without it.

    Args:
        unit: unit of FSDP2.
        compression: compressed exchanges of this rank.
        names: id of each sharded parameter → its name in the full model.
    """
    group = parameter_group(unit)
    if group is None:
        return
    shards, replicas = group.mesh_info.shard_mesh_size, group.mesh_info.replicate_mesh_size
    parameters = group.fsdp_params
    if replicas > 1:
        layouts = [_hsdp_layout(parameter, names[id(parameter.sharded_param)]) for parameter in parameters]
        info = group.mesh_info
        info.replicate_process_group = CompressedReplicaGroup(
            info.replicate_process_group, compression, layouts
        )
    elif shards > 1:
        layouts = [
            _reduce_scatter_layout(parameter, names[id(parameter.sharded_param)], shards)
            for parameter in parameters
        ]
        inner = reduce_scatter_of(group)
        unit.set_custom_reduce_scatter(CompressedReduceScatter(compression, layouts, inner))
    else:
        return
    for layout in layouts:
        compression.register(layout)


class CompressedReduceScatter(ReduceScatter):
    """Compressed reduce-scatter of one unit.

    Its buffer holds for each rank its shard of each parameter, one after the other.
    """

    def __init__(
        self, compression: GradientCompression, layouts: Sequence[GradientLayout], inner: ReduceScatter
    ) -> None:
        self._compression, self._layouts, self._inner = compression, layouts, inner

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self._compression.is_active:
            return self._inner(output_tensor, input_tensor, group, op, async_op)
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"only sums are compressed, not {op}")
        rows = input_tensor.view(group.size(), -1)
        pieces = [
            (layout.name, rows[:, start:stop], output_tensor[start:stop])
            for layout, start, stop in _buffer_slices(self._layouts, rows.shape[1])
        ]
        self._compression.reduce([pieces], group)
        return None


class CompressedReplicaGroup(dist.ProcessGroup):
    """Process group of the replicas that serves one call of FSDP2: the all-reduce of a unit's shards.

    Nothing else goes through it, and torch does not know it by name.
    """

    def __init__(
        self, group: dist.ProcessGroup, compression: GradientCompression, layouts: Sequence[GradientLayout]
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # torch lists another only
        self._group, self._compression, self._layouts = group, compression, layouts

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work | None:  # type: ignore[override]
        """Sum `tensors` over the replicas; torch calls it as it calls its own groups, and need not wait."""
        (flat,) = tensors
        if not self._compression.is_active:
            dist.all_reduce(flat, op=options.reduceOp, group=self._group)
            return None
        if options.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"only sums are compressed, not {options.reduceOp}")
        row = flat.view(1, -1)
        pieces = [
            (layout.name, row[:, start:stop], None)
            for layout, start, stop in _buffer_slices(self._layouts, row.shape[1])
        ]
        self._compression.reduce([pieces], self._group)
        return None


def _buffer_slices(layouts: Sequence[GradientLayout], width: int) -> list[tuple[GradientLayout, int, int]]:
    """Return the slice of each trained parameter in a buffer of `width` elements.

    Raises:
        WanmaError: the buffer does not hold all of them.
    """
    trained = [layout for layout in layouts if layout.get_parameter().requires_grad]
    if sum(layout.elements_per_shard for layout in trained) != width:
        names = ", ".join(layout.name for layout in trained[:_MAX_NAMES_IN_MESSAGE]) + (
            ", …" if len(trained) > _MAX_NAMES_IN_MESSAGE else ""
        )
        raise WanmaError(
            "compression of sharded gradients needs a gradient of every trained parameter, but one "
            f"of {names} had none in this step",
            "freeze unused parameters (train.parameter_groups, frozen = true), or unset parallel.compression",
        )
    places, start = [], 0
    for layout in trained:
        if layout.elements_per_shard:
            places.append((layout, start, start + layout.elements_per_shard))
        start += layout.elements_per_shard
    return places


def _hsdp_layout(parameter: FsdpParameter, name: str) -> GradientLayout:
    """Return the layout of this rank's shard of a parameter, which all its replicas hold alike."""
    padded_shape = tuple(parameter.padded_sharded_param_size)
    layout = replicated_layout(name, partial(module_parameter, parameter), padded_shape)
    return GradientLayout(
        name,
        layout.get_parameter,
        1,
        layout.elements_per_shard,
        layout.matrix_columns,
        tuple(parameter.sharded_size),
    )


def _reduce_scatter_layout(parameter: FsdpParameter, name: str, shards: int) -> GradientLayout:
    """Return the layout of a full parameter whose sum is scattered among its shards.

    One that is cut along another dim than the first comes with its parts below each other.
    """
    padded_shape = tuple(parameter.padded_sharded_param_size)
    full_shape = tuple(full_size(parameter))
    if parameter.fsdp_placement.dim != 0:
        full_shape = (shards * padded_shape[0], *padded_shape[1:])
    length = math.prod(padded_shape)
    columns = max(math.prod(padded_shape[1:]), 1)
    return GradientLayout(name, partial(module_parameter, parameter), shards, length, columns, full_shape)


def parameter_names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id, while all of them are sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
