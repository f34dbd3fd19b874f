"""Contribution of one rank to the global gradient norm, correct under every sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from wanma.job.plan.plan import Plan
from wanma.torch_internals.loaded import DTensor
from wanma.torch_internals.operators import foreach_norm


def local_squared_norm(
    gradients: Iterable[Tensor], plan: Plan, exclusive_gradients: Iterable[Tensor] = ()
) -> Tensor:
    """Return a sum of squares whose total over all ranks of a site counts each element once.

    A gradient that several ranks hold alike counts on each of them with weight one over their number.

    Args:
        gradients: gradients by which ranks hold them: plain tensors alike on all, DTensors as placed.
        plan: plan of the run.
        exclusive_gradients: gradients that this rank alone holds.

    Returns:
        float64 scalar on the gradients' device.
    """
    gradients_by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                if not placement.is_replicate():
                    shards *= size
            gradient = gradient.to_local()
        copies = plan.ranks_per_pipeline_rank // shards
        gradients_by_copies[copies].append(gradient)
    gradients_by_copies[1].extend(exclusive_gradients)
    total = torch.zeros((), dtype=torch.float64)
    for copies, tensors in gradients_by_copies.items():
        if not tensors:
            continue
        norms = torch.stack(foreach_norm(tensors)).double()
        total = total.to(norms.device) + norms.square().sum() / copies
    return total
