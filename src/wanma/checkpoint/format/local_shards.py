"""Shards of this rank: the box of each full tensor that it holds, and the one writer among its replicas.

Everything follows from the tensors' placements, the same on every rank, without communication.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from wanma.checkpoint.format.manifest import DTYPE_BYTES, METADATA_KEY, Box
from wanma.job.errors import WanmaError
from wanma.torch_internals.dtensor import local_shape_and_offset
from wanma.torch_internals.loaded import DTensor, Partial, Replicate, StridedShard

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LocalShard:
    """Shard of one tensor on this rank, and all ranks that hold the same shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    box: Box
    replicas: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * self.box.numel


def local_shards(tensors: Mapping[str, torch.Tensor], replicas: Sequence[int]) -> list[LocalShard]:
    """List the shards that this rank holds; tensors of which it holds nothing are left out.

    Args:
        tensors: full name -> tensor or DTensor.
        replicas: ranks that hold the same plain (not DTensor) tensors under the same names.
    """
    pieces = []
    holders: dict[tuple[object, ...], tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if name == METADATA_KEY:
            raise WanmaError(
                f"a tensor cannot be named {METADATA_KEY}: the safetensors format reserves this name"
            )
        box = local_box(name, tensor)
        if box is not None and (box.numel > 0 or tensor.numel() == 0):
            kept_by = tuple(replicas)
            if isinstance(tensor, DTensor):
                # Few layouts occur among many tensors, and a mesh's ranks take torch long to compute.
                layout = tensor.device_mesh, tensor.placements
                if layout not in holders:
                    holders[layout] = _replica_ranks(tensor)
                kept_by = holders[layout]
            pieces.append(LocalShard(name, dtype_name(name, tensor), tuple(tensor.shape), box, kept_by))
    return pieces


def shard_layout_key(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """Return a key that is equal exactly if the shards are the same; cheap, unlike the shards themselves."""
    return tuple(
        (name, tensor.dtype, tensor.shape, tensor.is_cuda)
        + ((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ())
        for name, tensor in tensors.items()
    )


def assign_writers(shards: Iterable[LocalShard], rank: int) -> list[LocalShard]:
    """Return the shards that `rank` writes: each shard has exactly one writer among its replicas.

    Among ranks that hold the same shards, the largest goes first to the rank with the fewest bytes so far
    (longest processing time first, Graham 1969), so that they write about the same bytes.
    """
    groups: defaultdict[tuple[int, ...], list[LocalShard]] = defaultdict(list)
    for piece in shards:
        groups[piece.replicas].append(piece)
    own_shards = []
    for replicas, members in groups.items():
        loads = [(0, writer) for writer in sorted(replicas)]
        for piece in sorted(members, key=lambda piece: (-piece.bytes, piece.name)):
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + piece.bytes, writer))
            if writer == rank:
                own_shards.append(piece)
    return own_shards


def local_box(name: str, tensor: torch.Tensor) -> Box | None:
    """Return the box of the full tensor that this rank holds; None for a DTensor on other ranks' mesh.

    Raises:
        WanmaError: the tensor's layout is not a box, or it holds partial sums.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        return None
    if any(isinstance(placement, Partial) for placement in placements):
        raise WanmaError(
            f"tensor {name} has the placement Partial ({placements}), which cannot be saved or loaded",
            "reduce it first: tensor.redistribute(placements=[Replicate()])",
        )
    for axis, placement in enumerate(placements):
        # FSDP2 over tensor parallel: the outer mesh dimension splits what the inner ones have split already,
        # which is a contiguous box exactly if `split_factor` is the number of inner parts.
        if isinstance(placement, StridedShard):
            inner = math.prod(
                mesh.size(inner_axis)
                for inner_axis in range(axis + 1, mesh.ndim)
                if getattr(placements[inner_axis], "dim", None) == placement.dim
            )
            if placement.split_factor != inner:
                raise WanmaError(
                    f"tensor {name}: its placements {placements} are interleaved; each rank must hold one "
                    "contiguous box",
                    "redistribute it to plain Shard placements before saving or loading",
                )
    shape, offset = local_shape_and_offset(tensor.shape, mesh, placements)
    local_shape = tuple(local_tensor(tensor).shape)
    if tuple(shape) != local_shape:
        raise WanmaError(
            f"tensor {name}: its placements {placements} give the local shape {tuple(shape)}, but it is "
            f"{local_shape}"
        )
    return Box(tuple(offset), tuple(shape))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local data, which shares memory with `tensor`, without gradient history."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach()


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the dtype as the format spells it.

    Raises:
        WanmaError: the format has no such dtype.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise WanmaError(
            f"tensor {name} has dtype {tensor.dtype}, which checkpoints do not support",
            f"convert it to one of {', '.join(str(dtype) for dtype in DTYPE_NAMES)}",
        )
    return DTYPE_NAMES[tensor.dtype]


def _replica_ranks(tensor: DTensor) -> tuple[int, ...]:
    """Return the global ranks that hold the same shard: replicated mesh dimensions may differ."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # local_box returned a box
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))
