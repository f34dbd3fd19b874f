"""Cost of the optimizer's update per parameter: bytes, FLOPs and communication of each optimizer.

Bytes are of 32-bit numbers, pass by pass as torch 2.11 to 2.13 run them. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from wanma.job.forecast.forecast import Workload
from wanma.job.sections.train import TrainSection
from wanma.models.config.dimensions import DecoderConfig

COMMON_UPDATE_BYTES = 14
"""Bytes per parameter that every optimizer transfers: the gradient norm reads gradients (4), clipping reads
and writes them (8), and the next forward's copy in 16 bits is written (2)."""
NEWTON_SCHULZ_STEPS = 5
"""Newton-Schulz iterations of one Muon update."""


class OptimizerCost(NamedTuple):
    """Cost of the update, per parameter that a rank updates."""

    moved_bytes: int
    flops: float = 0.0
    """FLOPs of matrix products in 16 bits; ranks that share matrices share them too."""
    exchanged_bytes: float = 0.0
    """Bytes of unsharded matrices that are gathered from all ranks with a part, and as many sent back to
    them."""


def optimizer_cost_of(
    train: TrainSection, workload: Workload, dimensions: DecoderConfig | None = None
) -> OptimizerCost:
    """Return the update's cost for a job's optimizer and model.

    Args:
        dimensions: dimensions of a decoder, where the model is one; they give the sides of its matrices.
    """
    decays = train.weight_decay > 0
    if train.optimizer == "sgd":
        # Not fused: the decay makes new gradients, momentum is scaled and then added to, the weights change.
        state_bytes = 12 * decays + 20 * (train.momentum > 0) + 12
        return OptimizerCost(COMMON_UPDATE_BYTES + state_bytes)
    if train.optimizer == "adafactor":
        # Norms of the weights, of rows, of columns and of the update (4 each); the estimate is written (4),
        # divided, bounded, inverted (8 each) and multiplied by gradients (12); the weights change (12).
        return OptimizerCost(COMMON_UPDATE_BYTES + 68 + 8 * decays)
    if train.optimizer == "muon":
        # Momentum is updated and Nesterov's step added (12 each), rounded (6), normed (2) and scaled (4);
        # weights decay (8) and change by an update in 16 bits (10).
        return OptimizerCost(COMMON_UPDATE_BYTES + 54, newton_schulz_flops(workload, dimensions), 2.0)
    # One kernel: it reads a gradient, a weight and two moments and writes three of them.
    return OptimizerCost(COMMON_UPDATE_BYTES + 28)


def newton_schulz_flops(workload: Workload, dimensions: DecoderConfig | None) -> float:
    """Return the FLOPs per parameter of Muon's iterations (Jordan et al. 2024).

    For a matrix r × c with r <= c, each iteration computes x xᵀ (2 r² c), its square (2 r³), and the product
    of that with x (2 r² c).
    """
    flops = size = 0.0
    for short, long in _matrices(workload, dimensions):
        flops += NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
        size += short * long
    return flops / size if size else 0.0


def _matrices(workload: Workload, dimensions: DecoderConfig | None) -> Iterator[tuple[float, float]]:
    """Yield the shorter and the longer side of each matrix of a decoder's block.

    Blocks of another model each count as one square matrix, which costs most.
    """
    if dimensions is None:
        for layer in workload.layers:
            if layer.is_block or layer.count > 1:
                side = math.sqrt(layer.parameters)
                yield side, side
        return
    hidden, width = dimensions.hidden, dimensions.head_dim
    queries, keys = dimensions.heads * width, dimensions.kv_heads * width
    sides = [queries, keys, keys, queries, *[dimensions.feed_forward] * dimensions.feed_forward_matrices]
    for side in sides:
        yield float(min(side, hidden)), float(max(side, hidden))
