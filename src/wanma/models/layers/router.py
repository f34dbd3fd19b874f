"""Router of a mixture of experts: choice of each token's experts, their weights, and load balancing.

Nothing here depends on which samples share a micro-batch: a balancing loss and capacity couple tokens only
within sample groups that the job fixes, and the bias, which follows the load of a whole
step, is moved once per step, by counts summed over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.keyed_random.sample_context import SampleDependentModule


class RouterGate(nn.Module):
    """Router gate: one logit per token and expert, in at least fp32: rounding would change choices."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden) to (..., experts)."""
        logits: Tensor = _Float32Linear.apply(x, self.weight)  # type: ignore[no-untyped-call]  # torch's
        return logits


class TopKRouter(SampleDependentModule):
    """Choice of each token's experts and their weights from a router's logits.

    Scores are the logits' softmax (Mixtral, Jiang et al. 2024, section 2.1) or sigmoid (DeepSeek-V3,
    DeepSeek-AI 2024, eq. 12 to 16); the experts with the highest are chosen, and their scores,
    normalized to a sum of one and scaled, are the weights. Where experts are in groups, they are chosen
    from the groups whose best two scores add up to the most (DeepSeek-V3, section 2.1.2).

    The load is balanced by one of

    bias    added to the scores for the choice alone; after each step it moves by `balance_rate` towards
            the experts that had less than their share of the step's tokens (Wang et al. 2024)
    loss    per group of `balance_group` samples, experts · Σ over experts of (share of the group's choices
            · mean probability), times `balance_rate` (Fedus et al. 2021, eq. 4; DeepSeek-V3, eq. 17 to 20).
            The job's objective is (Σ of losses + Σ over groups of tokens · balancing loss) / targets

    and capacity, which may join either, drops an expert's tokens of a group beyond `capacity` times an
    even share, in order of position; evaluation drops nothing.

    Attributes:
        bias: (experts,), a buffer that checkpoints keep; only with balance = "bias".
        auxiliary_loss_scale: factor of the losses before backward; the balancing loss takes the same.
        parts: communication with other ranks where samples are split over several.
    """

    bias: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        bias = torch.zeros(config.experts) if config.balance == "bias" else None
        self.register_buffer("bias", bias)
        self.parts = SampleReduction()
        self.auxiliary_loss_scale = 1.0
        self._row_mask: Tensor | None = None
        self._load: Tensor | None = None
        self._balancing_loss_sum: Tensor | None = None

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: (rows, sequence, experts).

        Returns:
            Weights (rows, sequence, experts_per_token), and the experts' numbers, likewise; `experts` is
            the number for none, where capacity is exceeded.

        Raises:
            WanmaError: training with a number of rows that is no multiple of the balancing group.
        """
        shape = self.config
        scores = logits.softmax(-1) if shape.router == "softmax" else logits.sigmoid()
        expert_indices = self._select_experts(scores.detach())
        weights = scores.gather(-1, expert_indices)
        if shape.normalize_routing_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * shape.routing_scale
        if self.training and torch.is_grad_enabled():
            weights = self._attach_balancing_loss(weights, scores, expert_indices)
        if self.training and shape.capacity_factor > 0:
            expert_indices = self._drop_over_capacity(expert_indices)
        return weights, expert_indices

    # ---------------------------------------------------------------- statistics of a step

    @property
    def statistics_numel(self) -> int:
        """Number of elements in the result of `pop_sums`."""
        return self.config.experts + 1

    def pop_sums(self) -> tuple[Tensor, Tensor]:
        """Return the statistics that backward has collected since the last call; start again from zero.

        Returns:
            Tokens of each expert (experts,), and the sum over groups of tokens · balancing loss (). Sums
            over the ranks that hold different tokens.
        """
        load, balance = self._load, self._balancing_loss_sum
        self._load, self._balancing_loss_sum = None, None
        device = self.bias.device if self.bias is not None else None
        if load is None:
            load = torch.zeros(self.config.experts, dtype=torch.int64, device=device)
        if balance is None:
            balance = torch.zeros((), dtype=torch.float64, device=load.device)
        return load, balance

    @torch.no_grad()
    def apply_sums(self, load: Tensor, balance: Tensor) -> None:  # noqa: ARG002  # one protocol for all that note
        """Move the bias by a step's counts.

        Args:
            load: from `pop_sums`, summed over all ranks.
            balance: likewise; it moves nothing.
        """
        if self.bias is not None:
            # Without a division, so that counts that are even give exactly zero.
            direction = torch.sign(load.sum() - len(load) * load)
            self.bias += self.config.balance_rate * direction.to(self.bias)

    def reset_buffers(self) -> None:
        """Set the bias to its initial value, after allocation without any."""
        if self.bias is not None:
            self.bias.zero_()

    # ---------------------------------------------------------------- sample context

    def build_sample_context(self, seed: int, sample_indices: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the mask of real rows: padding rows have no sample."""
        return sample_indices >= 0

    @property
    def sample_context(self) -> Tensor | None:
        return self._row_mask

    @sample_context.setter
    def sample_context(self, real: Tensor | None) -> None:
        self._row_mask = real

    # ---------------------------------------------------------------- inside

    def _select_experts(self, scores: Tensor) -> Tensor:
        shape = self.config
        if self.bias is not None:
            scores = scores + self.bias
        if shape.expert_groups > 1:
            grouped = scores.unflatten(-1, (shape.expert_groups, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            groups = group_scores.topk(shape.expert_groups_per_token, dim=-1).indices
            is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, groups, False)
            scores = grouped.masked_fill(is_excluded.unsqueeze(-1), -math.inf).flatten(-2)
        return scores.topk(shape.experts_per_token, dim=-1).indices

    def _attach_balancing_loss(self, weights: Tensor, scores: Tensor, expert_indices: Tensor) -> Tensor:
        """Let backward count the load, and attach the balancing loss to the weights."""
        counts = self._counts(expert_indices)
        loss = None
        if self.config.balance == "loss":
            loss = self._balancing_loss(scores, counts)
        weights_with_loss: Tensor = _BalancingLossAutograd.apply(
            weights, loss, counts.sum(0), self, self.auxiliary_loss_scale
        )  # type: ignore[no-untyped-call]
        return weights_with_loss

    def _counts(self, expert_indices: Tensor) -> Tensor:
        """Count each row's choices of each expert, (rows, experts); zero for padding rows."""
        rows = expert_indices.shape[0]
        flat = expert_indices.reshape(rows, -1)
        counts = torch.zeros(rows, self.config.experts, dtype=torch.int64, device=expert_indices.device)
        counts.scatter_add_(1, flat, torch.ones_like(flat))
        if self._row_mask is None:  # outside `bind_samples` there is no padding
            return counts
        if self._row_mask.shape[0] != rows:
            raise WanmaError(
                f"a router receives {rows} rows for {self._row_mask.shape[0]} samples",
                "keep the batch in dim 0 of every activation",
            )
        return counts * self._row_mask.unsqueeze(1)

    def _balancing_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return this rank's summands of the sum over groups of tokens · loss: probabilities add over tokens.

        Args:
            scores: (rows, sequence, experts).
            counts: (rows, experts), of this rank's tokens.
        """
        shape = self.config
        probabilities = scores / scores.sum(-1, keepdim=True) if shape.router == "sigmoid" else scores
        sums = self._group_samples(probabilities.sum(1)).sum(1)  # (groups, experts)
        expert_counts = self.parts.all_reduce(self._group_samples(counts).sum(1))  # likewise, of all tokens
        choice_counts = expert_counts.sum(-1).clamp(min=1)  # tokens · experts_per_token
        losses = shape.experts * (expert_counts.to(sums.dtype) * sums).sum(-1) / choice_counts
        return shape.balance_rate * losses.sum()

    def _group_samples(self, rows: Tensor) -> Tensor:
        """Reshape (rows, ...) to (groups, samples of each, ...)."""
        group = self.config.balance_group
        if rows.shape[0] % group:
            raise WanmaError(
                f"expert balancing over groups of {group} samples is not possible with {rows.shape[0]} rows",
                "make the micro-batch of every rank a multiple of model.balance_group "
                "(parallel.micro_batch, train.global_batch), or change model.balance_group",
            )
        grouped: Tensor = rows.unflatten(0, (-1, group))
        return grouped

    def _drop_over_capacity(self, expert_indices: Tensor) -> Tensor:
        """Return the choices, with those beyond an expert's capacity replaced by none."""
        shape = self.config
        sequence_indices = self.parts.gather_sequence(
            expert_indices
        )  # (rows, whole sequence, experts_per_token), by position
        groups = self._group_samples(sequence_indices).flatten(1, 2)  # (groups, tokens, experts_per_token)
        tokens = groups.shape[1]
        capacity = math.ceil(shape.capacity_factor * tokens * shape.experts_per_token / shape.experts)
        assignments = torch.zeros(
            len(groups), tokens, shape.experts, dtype=torch.int32, device=expert_indices.device
        )
        assignments.scatter_(-1, groups, 1)
        queue_position = assignments.cumsum(1, dtype=torch.int32).gather(-1, groups)
        is_within_capacity = (queue_position <= capacity).view_as(sequence_indices)
        return expert_indices.masked_fill(~self.parts.slice_sequence(is_within_capacity), shape.experts)


class SampleReduction(nn.Module):
    """Exchange of a router with ranks that hold other parts of its samples; here there are none.

    Without parameters; expert parallelism (`parallel/expert/expert_parallel.py`) replaces it.
    """

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Sum over the ranks that hold parts of the same samples."""
        return counts

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Gather (rows, part of the sequence, ...) to (rows, sequence, ...), by position."""
        return x

    def slice_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's part of a result of `gather_sequence`."""
        return x


def set_auxiliary_loss_scale(modules: Iterable[nn.Module], scale: float) -> None:
    """Set the factor of a step's losses before backward on its routers."""
    for module in modules:
        if isinstance(module, TopKRouter):
            module.auxiliary_loss_scale = scale


class _BalancingLossAutograd(torch.autograd.Function):
    """Autograd function that returns the weights unchanged.

    Its backward, which runs once per micro-batch even where forward is recomputed, counts the load and starts
    the balancing loss's own backward.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, loss: Tensor | None, load: Tensor, routing: TopKRouter, factor: float
    ) -> Tensor:
        ctx.routing, ctx.factor, ctx.load = routing, factor, load
        ctx.loss = None if loss is None else loss.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        routing, loss = ctx.routing, ctx.loss
        loss_value = torch.zeros((), dtype=torch.float64, device=gradient.device) if loss is None else loss
        routing._load = ctx.load if routing._load is None else routing._load + ctx.load
        previous_sum = routing._balancing_loss_sum
        routing._balancing_loss_sum = (
            loss_value.double() if previous_sum is None else previous_sum + loss_value
        )
        return gradient, None if loss is None else torch.full_like(loss, ctx.factor), None, None, None


class _Float32Linear(torch.autograd.Function):
    """Autograd function of a linear in at least fp32 that saves its input in the original precision.

    In bf16 that is half of what autograd would save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        compute_dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(compute_dtype), weight.to(compute_dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x_gradient = gradient @ weight.to(gradient.dtype)
        weight_gradient = gradient.flatten(0, -2).T @ x.flatten(0, -2).to(gradient.dtype)
        return x_gradient.to(x.dtype), weight_gradient.to(weight.dtype)
