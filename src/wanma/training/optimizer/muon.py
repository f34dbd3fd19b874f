"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices of any placement.

An update is orthogonalised as one matrix, however it is split: its parts are gathered, Newton-Schulz runs on
the full matrix, and each rank takes its part of the result. `torch.optim.Muon` would iterate on the DTensor,
with collectives in its fifteen products, and round each rank's sum to bf16 where one process rounds the full
one. Ranks that share matrices share the work: each orthogonalises its turn of them and sends the result to
the others (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3), which also keeps replicas on
different hardware equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from wanma.checkpoint.format.local_shards import local_box, local_tensor
from wanma.job.errors import JobError
from wanma.job.sections.train import ParameterGroupSection
from wanma.models.structure.parameter_roles import ParameterRole
from wanma.torch_internals.loaded import DTensor

_NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients with the steepest slope at zero; singular values end between about 0.7 and 1.2."""
_ITERATIONS = 5
_EPSILON = 1e-7


class Muon(Optimizer):
    """Optimizer with orthogonalised Nesterov momentum and decoupled weight decay.

    On one process it is `torch.optim.Muon`, bit for bit.

    Args:
        parameters: groups of matrices, in the same order on all ranks that hold parts of them.
        lr: learning rate.
        momentum: momentum, 0 .. 1.
    """

    def __init__(self, parameters: Iterable[Any], *, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002  # takes none
        """Update every matrix that has a gradient; the same ones on all ranks."""
        for group in self.param_groups:
            by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    mesh = matrix.device_mesh if isinstance(matrix, DTensor) else None
                    by_mesh.setdefault(mesh, []).append(matrix)
            for mesh, matrices in by_mesh.items():
                turns = mesh.size() if mesh is not None else 1
                for start in range(0, len(matrices), turns):
                    self._update(matrices[start : start + turns], mesh, group)

    def _update(self, matrices: list[Tensor], mesh: DeviceMesh | None, group: dict[str, Any]) -> None:
        """Update at most as many matrices as there are ranks: each rank orthogonalises one."""
        ranks = list(product(*(range(size) for size in mesh.shape))) if mesh is not None else [()]
        local_coordinate = tuple(mesh.get_coordinate() or ()) if mesh is not None else ()
        orthogonalized = torch.empty(0)
        for matrix, rank in zip(matrices, ranks, strict=False):
            full_update = _full_matrix(self._nesterov_update(matrix, group["momentum"]), matrix)
            if rank == local_coordinate:
                orthogonalized = orthogonalize(full_update)
        for matrix, rank in zip(matrices, ranks, strict=False):
            if rank == local_coordinate:
                result = orthogonalized.contiguous()
            else:
                result = torch.empty(matrix.shape, dtype=torch.bfloat16, device=local_tensor(matrix).device)
            if mesh is not None:
                _broadcast(result, mesh, rank, local_coordinate)
            rate = group["lr"] * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1]))
            local_tensor(matrix).mul_(1 - group["lr"] * group["weight_decay"]).add_(
                _local_shard(result, matrix), alpha=-rate
            )

    def _nesterov_update(self, matrix: Tensor, momentum: float) -> Tensor:
        """Advance the momentum, and return this rank's part of the matrix to orthogonalise, in bf16."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        gradient, average = local_tensor(matrix.grad), local_tensor(state["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).bfloat16()


def is_for_muon(name: str, role: ParameterRole, group: ParameterGroupSection | None) -> bool:
    """Return whether Muon updates a parameter: hidden matrices only (Jordan et al. 2024).

    Embeddings, heads, norms and biases go to AdamW.
    """
    if group is not None and group.frozen:
        return False
    if group is not None and group.muon is not None:
        if group.muon and not role.is_matrix:
            raise JobError(
                f"train.parameter_groups: muon = true matches {name}, which is not a matrix",
                "match only parameters with two dimensions",
            )
        return group.muon
    if role.is_hidden_matrix is None:
        raise JobError(
            f"train.optimizer = 'muon': {name} is a matrix of a custom module, so wanma cannot see "
            "whether it is a hidden matrix (for Muon) or a lookup table (for AdamW)",
            f'set it: [[train.parameter_groups]] match = "{name}", muon = true or false',
        )
    return role.is_hidden_matrix


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U Vᵀ of the matrix U S Vᵀ, by Newton-Schulz iterations.

    Args:
        matrix: (rows, columns) bf16.
    """
    a, b, c = _NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)  # the largest singular value is at most 1
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _full_matrix(part: Tensor, sharded: Tensor) -> Tensor:
    """Gather the matrix of which each rank has the part that it has of `sharded`."""
    if not isinstance(sharded, DTensor):
        return part
    split = DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return split.full_tensor()


def _local_shard(matrix: Tensor, sharded: Tensor) -> Tensor:
    """Return the part of `matrix` that this rank has of `sharded`."""
    box = local_box("", sharded)
    assert box is not None  # parameters lie on this rank's own mesh
    return matrix[
        tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
    ]


def _broadcast(
    tensor: Tensor, mesh: DeviceMesh, source: tuple[int, ...], coordinate: tuple[int, ...]
) -> None:
    """Broadcast from the rank at `source` to all of `mesh`, along its dimensions from last to first."""
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1 and coordinate[:axis] == source[:axis]:
            dist.broadcast(tensor, group=mesh.get_group(axis), group_src=source[axis])
