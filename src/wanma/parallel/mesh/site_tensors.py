"""Tensors that all sites hold alike, beside those of which each site has its own.

The tensors with which a site computes are DTensors over the ranks of that site. The same local part as a
DTensor over all sites says that every site has it: it is then saved once, compared among all, and found under
its own name by a plan without sites.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.torch_internals.dtensor import make_spec, wrap_by_spec
from wanma.torch_internals.loaded import DTensor, Replicate


def replicate_local_over_sites(local: Tensor, like: Tensor, parallel_mesh: ParallelMesh) -> Tensor:
    """Return a tensor of the shape of `like`, equal on all sites, of which this rank holds `local`.

    Args:
        local: this rank's part, on any device, in the shape of the local part of `like`.
        like: tensor of this site. A plain tensor is the same everywhere already.
        parallel_mesh: device meshes of the plan.
    """
    if not isinstance(like, DTensor):
        return local
    names = like.device_mesh.mesh_dim_names
    assert names is not None, "the mesh names all its dimensions"
    if names[0].startswith("expert"):
        assert parallel_mesh.expert_mesh is not None
        mesh = parallel_mesh.expert_mesh["expert_site", *names]
    else:
        mesh = parallel_mesh.parameter_mesh["state_site", *names]
    return wrap_by_spec(local, make_spec(mesh, (Replicate(), *like.placements), like, local.dtype))


def replicate_over_sites(tensor: Tensor, parallel_mesh: ParallelMesh) -> Tensor:
    """Return this site's `tensor` as a tensor that all sites hold alike."""
    return replicate_local_over_sites(local_tensor(tensor), tensor, parallel_mesh)


def place_on_site(tensor: Tensor, parallel_mesh: ParallelMesh) -> Tensor:
    """Return `tensor` as a DTensor of this site alone; a plain tensor is replicated on its ranks."""
    if isinstance(tensor, DTensor):
        return tensor
    mesh = parallel_mesh.parameter_mesh["replicate", "shard"]
    spec = make_spec(mesh, (Replicate(), Replicate()), tensor, tensor.dtype)
    with torch.no_grad():
        return wrap_by_spec(tensor.detach(), spec)
