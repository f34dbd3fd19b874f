"""Expert parallelism: each rank of `ep` holds some of every layer's experts; tokens travel to them and back.

The ranks of `ep` are data and context ranks with different tokens. A layer's rows, sorted by expert, go to
the experts' ranks and their results come back, in one exchange each. Within an expert `tp` splits the inner
width: all its ranks then work on the same rows, and their results are summed, after the rows have come back,
where they are narrow. A router works on single tokens, wherever they are; for facts about whole samples it
asks the ranks that share them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from wanma.job.errors import JobError
from wanma.models.layers.experts import (
    Experts,
    counts_to_list,
    inverse_permutation,
    permute_tokens,
    unpermute_tokens,
)
from wanma.models.layers.router import SampleReduction, TopKRouter
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.context.sequence_shards import context_rank_positions
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.tensor.local_parameters import local_shard, redistribute_local, use_local_parameters
from wanma.torch_internals.distributed import all_to_all_single, all_to_all_single_autograd


def apply_expert_parallel(model: nn.Module, parallel_spec: ParallelSpec, parallel_mesh: ParallelMesh) -> None:
    """Split the modules that `parallel_spec.expert_modules` names over `ep`, and their inner dim over `tp`.

    Raises:
        JobError: `ep` is more than one and the model has no experts, or `ep` or `tp` does not divide them.
    """
    plan = parallel_mesh.plan
    experts = [
        m
        for name, m in model.named_modules()
        if parallel_spec.expert_modules and fnmatchcase(name, parallel_spec.expert_modules)
    ]
    if plan.ep > 1 and parallel_spec.expert_modules is None:
        raise JobError(
            f"parallel.ep = {plan.ep}: {type(model).__name__} has no experts",
            "set parallel.ep = 1, or set model.experts",
        )
    for module in experts if plan.ep * plan.tp > 1 else []:
        if not isinstance(module, Experts):
            raise JobError(
                f"parallel.ep = {plan.ep}, parallel.tp = {plan.tp}: splitting experts of type "
                f"{type(module).__name__} is not supported",
                "set parallel.ep = 1 and parallel.tp = 1",
            )
        _distribute_experts(module, parallel_mesh)
    if plan.sequence_parallel or plan.cp > 1:
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.parts = ShardedSampleReduction(parallel_mesh)


def _distribute_experts(module: Experts, parallel_mesh: ParallelMesh) -> None:
    plan = parallel_mesh.plan
    count, width = module.gate.shape[:2]
    if count % plan.ep:
        raise JobError(
            f"parallel.ep = {plan.ep} does not divide the model's {count} experts",
            "choose an ep that divides model.experts",
        )
    if width % plan.tp:
        raise JobError(
            f"parallel.tp = {plan.tp} does not divide the experts' feed-forward width of {width}",
            "choose a tp that divides model.expert_feed_forward",
        )
    # FSDP2 takes parameters on a one-dimensional mesh of `tp`, or a two-dimensional one with `ep` before it.
    if plan.ep > 1:
        assert parallel_mesh.expert_mesh is not None
        mesh = parallel_mesh.expert_mesh["ep", "expert_tp"]
    else:
        mesh = parallel_mesh.dim_mesh("tp")
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        parameter = module.get_parameter(name)
        placements = [Shard(0), Shard(dim)][-mesh.ndim :]
        split = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    use_local_parameters(module, dict.fromkeys(("gate", "up", "down"), local_shard))
    if plan.tp > 1:
        residual: Placement = Shard(1) if plan.sequence_parallel else Replicate()
        _reduce_over_tensor_ranks(module, parallel_mesh.dim_mesh("tp"), residual)
    if plan.ep > 1:
        module.core = TokenDispatcher(module.core, parallel_mesh.dim_mesh("ep").get_group())


def _reduce_over_tensor_ranks(module: nn.Module, mesh: DeviceMesh, residual_placement: Placement) -> None:
    """Put `Experts`, whose matrices the ranks of `mesh` share, between their parts of the residual stream."""
    forward = module.forward

    def summed(x: Tensor, weights: Tensor, expert_indices: Tensor) -> Tensor:
        x, weights, expert_indices = (
            redistribute_local(part, mesh, residual_placement, Replicate())
            for part in (x, weights, expert_indices)
        )
        return redistribute_local(forward(x, weights, expert_indices), mesh, Partial(), residual_placement)

    module.forward = summed


class TokenDispatcher(nn.Module):
    """Token dispatch, in place of `GroupedFeedForward`: rows go to the ranks of their experts and back.

    Each rank of `group` holds the next experts in their order.

    Args:
        core: module that computes with the experts of this rank.
        group: ranks among which the experts are split.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self._group = group

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor, *matrices: Tensor) -> Tensor:
        """Compute `GroupedFeedForward`; `counts` are of all experts, `matrices` of this rank's."""
        ranks = self._group.size()
        send_counts = counts.view(ranks, -1)  # (ranks, experts of each)
        receive_counts = all_to_all_single(send_counts, None, None, self._group)  # (ranks, experts here)
        # Both at once: the host waits for a GPU here.
        sent_rows, received_rows = counts_to_list(
            torch.stack([send_counts.sum(1), receive_counts.sum(1)]), len(rows)
        )
        rows = all_to_all_single_autograd(rows, received_rows, sent_rows, self._group)
        weights = all_to_all_single_autograd(weights, received_rows, sent_rows, self._group)

        # From the ranks' order to the experts'.
        experts = torch.arange(receive_counts.shape[1], device=counts.device).repeat(ranks)
        order = experts.repeat_interleave(receive_counts.flatten(), output_size=sum(received_rows)).argsort(
            stable=True
        )
        positions = inverse_permutation(order, len(order)).unsqueeze(1)
        results = self.core(
            permute_tokens(rows, order, positions),
            permute_tokens(weights, order, positions),
            receive_counts.sum(0),
            *matrices,
        )
        output: Tensor = all_to_all_single_autograd(
            unpermute_tokens(results, order, positions), sent_rows, received_rows, self._group
        )
        return output


class ShardedSampleReduction(SampleReduction):
    """`SampleReduction` over the ranks of `cp` and, with sequence parallelism, of `tp`."""

    def __init__(self, parallel_mesh: ParallelMesh) -> None:
        super().__init__()
        plan = parallel_mesh.plan
        self._cp_method, self._context_ranks, self._context_rank = (
            plan.cp_method,
            plan.cp,
            parallel_mesh.coordinate("cp"),
        )
        self._cp_group = parallel_mesh.dim_mesh("cp").get_group() if plan.cp > 1 else None
        self._tp_group = parallel_mesh.dim_mesh("tp").get_group() if plan.sequence_parallel else None

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Sum `counts` over the ranks that hold parts of the same samples."""
        counts = counts.contiguous()
        for group in (self._tp_group, self._cp_group):
            if group is not None:
                dist.all_reduce(counts, group=group)
        return counts

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Gather (rows, part of the sequence, ...) to (rows, sequence, ...), in the order of positions."""
        if self._tp_group is not None:
            x = _gather(x, self._tp_group)
        if self._cp_group is None:
            return x
        # Ranks hold positions in an order of their own.
        gathered, order = _gather(x, self._cp_group), self._gathered_positions(x.shape[1], x.device)
        return gathered[:, inverse_permutation(order, len(order))]

    def slice_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor that `gather_sequence` gathered."""
        if self._cp_group is not None:
            positions_by_rank = self._gathered_positions(x.shape[1] // self._context_ranks, x.device).chunk(
                self._context_ranks
            )
            x = x[:, positions_by_rank[self._context_rank]]
        if self._tp_group is not None:
            x = x.chunk(self._tp_group.size(), dim=1)[self._tp_group.rank()]
        return x

    def _gathered_positions(self, local: int, device: torch.device) -> Tensor:
        """Return the positions that the context ranks hold, one rank after the other."""
        ranks, length = self._context_ranks, local * self._context_ranks
        positions_by_rank = [
            context_rank_positions(length, self._cp_method, ranks, rank) for rank in range(ranks)
        ]
        return torch.cat(positions_by_rank).to(device)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts one after the other along dim 1."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)
