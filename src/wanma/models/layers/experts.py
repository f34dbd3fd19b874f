"""Mixture-of-experts feed-forward: each token is processed by a few of many SwiGLU networks.

The result of a token does not depend on which others share its micro-batch: its experts' results are
added up in the order of its choices, wherever they were computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.feed_forward import FeedForward
from wanma.models.layers.router import RouterGate, TopKRouter
from wanma.torch_internals.fake_tensors import FakeTensor
from wanma.torch_internals.operators import grouped_mm


class MixtureOfExperts(nn.Module):
    """Mixture of experts: routed experts, chosen per token, and shared ones, which process every token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width = config.hidden, config.expert_width
        self.router = RouterGate(hidden, config.experts)
        self.routing = TopKRouter(config)
        self.experts = Experts(config.experts, hidden, width, drops_tokens=config.capacity_factor > 0)
        self.shared = FeedForward(hidden, config.shared_experts * width) if config.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape."""
        weights, expert_indices = self.routing(self.router(x))
        result: Tensor = self.experts(x, weights, expert_indices)
        return result if self.shared is None else result + self.shared(x)


class Experts(nn.Module):
    """Routed experts: SwiGLU networks in stacked matrices, the expert as dim 0.

    Args:
        experts: number of experts.
        hidden: width of a token.
        width: inner width of an expert.
        drops_tokens: if True, tokens may have fewer experts than choices.
    """

    def __init__(self, experts: int, hidden: int, width: int, *, drops_tokens: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.drops_tokens = drops_tokens
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.core: nn.Module = GroupedFeedForward()

    def forward(self, x: Tensor, weights: Tensor, expert_indices: Tensor) -> Tensor:
        """Return the sum over a token's experts of weight · expert(token).

        Args:
            x: (rows, sequence, hidden).
            weights: (rows, sequence, choices), in at least fp32.
            expert_indices: likewise, numbers of experts; `experts` for none.

        Returns:
            (rows, sequence, hidden).
        """
        flat = expert_indices.flatten()
        counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]
        order = flat.argsort(stable=True)
        if self.drops_tokens:
            order = order[: int(counts.sum())]
        positions = inverse_permutation(order, flat.numel()).view_as(expert_indices)
        rows = permute_tokens(x, order, positions)
        row_weights = permute_tokens(weights.unsqueeze(-1), order, positions.unsqueeze(-1))
        results: Tensor = self.core(rows, row_weights, counts, self.gate, self.up, self.down)
        return unpermute_tokens(results, order, positions)


class GroupedFeedForward(nn.Module):
    """Grouped product: rows, sorted by expert, through their experts.

    Without parameters; expert parallelism (`parallel/expert/expert_parallel.py`) replaces it.
    """

    def forward(
        self, rows: Tensor, weights: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        """Return weight · expert(row).

        Args:
            rows: (n, hidden): the first expert's, then the second's, ...
            weights: (n, 1).
            counts: (experts,) int64, rows of each; they add up to n.
            gate: (experts, width, hidden).
            up: (experts, width, hidden).
            down: (experts, hidden, width).

        Returns:
            (n, hidden).
        """
        if grouped_mm is not None and _supports_grouped_mm(rows, gate):
            ends = counts.cumsum(0, dtype=torch.int32)
            inner = weighted_swiglu(
                grouped_mm(rows, gate.transpose(1, 2), offs=ends),
                grouped_mm(rows, up.transpose(1, 2), offs=ends),
                weights,
            )
            return grouped_mm(inner, down.transpose(1, 2), offs=ends)
        sizes = counts_to_list(counts, len(rows))
        # All experts, also those without rows: every parameter then has a gradient on every rank, which
        # the reduction between them requires.
        parts = zip(
            *(rows.split(sizes), weights.split(sizes), gate.unbind(), up.unbind(), down.unbind()), strict=True
        )
        results = [
            F.linear(
                weighted_swiglu(F.linear(expert_rows, expert_gate), F.linear(expert_rows, expert_up), weight),
                expert_down,
            )
            for expert_rows, weight, expert_gate, expert_up, expert_down in parts
        ]
        return torch.cat(results)


def counts_to_list(counts: Tensor, total: int) -> list[Any]:
    """Copy `counts` to the host; in a dry run, whose tensors have no content, return even shares of `total`.

    Args:
        counts: (n,) or (m, n) int64.
        total: sum of each row of `counts`.
    """
    if not isinstance(counts, FakeTensor):
        return counts.tolist()
    parts = counts.shape[-1]
    even_shares = [total // parts + (part < total % parts) for part in range(parts)]
    return even_shares if counts.ndim == 1 else [even_shares] * counts.shape[0]


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """Return weights · SiLU(gate) · up.

    Weighting here, where rows are narrow, saves less for backward than at the experts' output, and gives
    the same sum.

    Args:
        gate: (n, width).
        up: (n, width).
        weights: (n, 1).
    """
    result: Tensor = _WeightedSwiGLU.apply(gate, up, weights)  # type: ignore[no-untyped-call]  # torch's
    return result


def inverse_permutation(permutation: Tensor, size: int) -> Tensor:
    """Return the index in `permutation` of each number in [0, size); `len(order)` for absent numbers."""
    positions = torch.full((size,), len(permutation), dtype=permutation.dtype, device=permutation.device)
    return positions.scatter_(0, permutation, torch.arange(len(permutation), device=permutation.device))


def permute_tokens(x: Tensor, expert_order: Tensor, inverse_order: Tensor) -> Tensor:
    """Copy vectors to rows: row i is vector order[i] // choices. Backward is `unpermute_tokens`.

    Args:
        x: (..., width).
        expert_order: (rows,), each number in [0, vectors · choices) at most once.
        inverse_order: (..., choices), from `inverse_permutation`.

    Returns:
        (rows, width).
    """
    rows: Tensor = _PermuteTokens.apply(x, expert_order, inverse_order)  # type: ignore[no-untyped-call]  # torch's
    return rows


def unpermute_tokens(rows: Tensor, expert_order: Tensor, inverse_order: Tensor) -> Tensor:
    """Sum, for each vector and in the order of its choices, the rows that it was copied to.

    Backward is `permute_tokens`; arguments are as there.

    Returns:
        (..., width).
    """
    result: Tensor = _UnpermuteTokens.apply(rows, expert_order, inverse_order)  # type: ignore[no-untyped-call]  # torch's
    return result


def _supports_grouped_mm(rows: Tensor, gate: Tensor) -> bool:
    """Return True if torch's grouped product applies: bf16 on GPUs, sizes in steps of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == gate.dtype == torch.bfloat16
        and rows.shape[0] > 0
        and all(size % 8 == 0 for size in gate.shape[1:])
    )


def _permute(x: Tensor, expert_order: Tensor, inverse_order: Tensor) -> Tensor:
    choices = inverse_order.shape[-1]
    return x.flatten(0, -2)[expert_order if choices == 1 else expert_order // choices]


def _unpermute(rows: Tensor, inverse_order: Tensor) -> Tensor:
    if len(rows) < inverse_order.numel():  # some have been dropped
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows[inverse_order.squeeze(-1)] if inverse_order.shape[-1] == 1 else rows[inverse_order].sum(-2)


class _PermuteTokens(torch.autograd.Function):
    """Autograd function of `permute_tokens`; autograd's own backward of an index sums rows in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, expert_order: Tensor, inverse_order: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_order)
        return _permute(x, expert_order, inverse_order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return _unpermute(gradient, positions), None, None


class _UnpermuteTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, expert_order: Tensor, inverse_order: Tensor) -> Tensor:
        ctx.save_for_backward(expert_order, inverse_order)
        return _unpermute(rows, inverse_order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, positions = ctx.saved_tensors
        return _permute(gradient, order, positions), None, None


class _WeightedSwiGLU(torch.autograd.Function):
    """Autograd function of `weighted_swiglu`: saves only its inputs, computes in the weights' precision."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        return F.silu(gate.to(weights.dtype)).mul_(up).mul_(weights).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weights = ctx.saved_tensors
        compute_dtype = weights.dtype
        gradient, precise_gate = gradient.to(compute_dtype), gate.to(compute_dtype)
        sigmoid = torch.sigmoid(precise_gate)
        silu = precise_gate * sigmoid
        weights_gradient = (gradient * silu * up).sum(-1, keepdim=True)
        weighted = gradient * weights
        up_gradient = weighted * silu
        # d SiLU(x) / dx = σ(x) · (1 + x · (1 − σ(x)))
        gate_gradient = weighted.mul_(up).mul_(sigmoid + silu * (1 - sigmoid))
        return gate_gradient.to(gate.dtype), up_gradient.to(up.dtype), weights_gradient
