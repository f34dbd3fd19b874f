"""DTensors: local parts, specifications, placements and caches of them, and views of a device mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wanma.torch_internals.loaded import DTensor, Placement

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's tensor itself, with what is attached to it; `to_local` returns a view."""
    return tensor._local_tensor


def set_local_part(tensor: DTensor, local: Tensor) -> None:
    """Put another tensor of the same shape in place of this rank's."""
    tensor._local_tensor = local


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """Return the DTensor of the placements of `like`, of which `local` is this rank's part."""
    return wrap_by_spec(local, spec_of(like))


def wrap_by_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the DTensor of a specification, of which `local` is this rank's part."""
    return DTensor(local, spec, requires_grad=False)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return mesh, placements, shape and dtype of a DTensor, which outlive it."""
    return tensor._spec


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor, dtype: torch.dtype
) -> DTensorSpec:
    """Return the specification of a DTensor with the shape and strides of `like`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def unflatten_mesh(
    root: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...], backends: Mapping[str, Any]
) -> DeviceMesh:
    """Return a view of a mesh of one dimension as a mesh of several.

    Args:
        root: mesh of one dimension.
        sizes: sizes of the dimensions.
        names: names of the dimensions.
        backends: backend of the group of a dimension, by its name; others have the default.
    """
    return root._unflatten(0, sizes, names, dict(backends) or None)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and its position in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def clear_dtensor_caches() -> None:
    """Empty the caches that DTensor fills in a process, so that the groups of meshes no longer used end.

    A process group of Gloo's has threads, file descriptors and shared memory. DTensor fills the caches anew.
    """
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
