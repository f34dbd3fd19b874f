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
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from wanma.job.errors import JobError
from wanma.models.layers.experts import Experts, collect, on_host, positions_in, spread
from wanma.models.layers.router import Routing, WholeSamples
from wanma.models.structure.parallel_spec import Layout
from wanma.parallel.context.sequence_shards import context_positions
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.tensor.local_parameters import compute_locally, convert, own_shard


def split_experts(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Split the modules that `layout.experts` names over `ep`, and their inner dim over `tp`.

    Raises:
        JobError: `ep` is more than one and the model has no experts, or `ep` or `tp` does not divide them.
    """
    plan = grid.plan
    experts = [m for name, m in model.named_modules() if layout.experts and fnmatchcase(name, layout.experts)]
    if plan.ep > 1 and layout.experts is None:
        raise JobError(
            f"parallel.ep = {plan.ep}: {type(model).__name__} has no experts",
            "set parallel.ep = 1, or give the model some (model.experts)",
        )
    for module in experts if plan.ep * plan.tp > 1 else []:
        if not isinstance(module, Experts):
            raise JobError(
                f"parallel.ep = {plan.ep}, parallel.tp = {plan.tp}: experts of type {type(module).__name__} "
                "cannot be split",
                "set both to 1",
            )
        _split(module, grid)
    if plan.sequence_parallel or plan.cp > 1:
        for router in (module for module in model.modules() if isinstance(module, Routing)):
            router.parts = SplitSamples(grid)


def _split(module: Experts, grid: Grid) -> None:
    plan = grid.plan
    count, width = module.gate.shape[:2]
    if count % plan.ep:
        raise JobError(
            f"parallel.ep = {plan.ep} does not divide the model's {count} experts",
            "choose an ep that divides model.experts",
        )
    if width % plan.tp:
        raise JobError(
            f"parallel.tp = {plan.tp} does not divide the experts' inner width of {width}",
            "choose a tp that divides model.expert_feed_forward",
        )
    # FSDP2 takes parameters on a one-dimensional mesh of `tp`, or a two-dimensional one with `ep` before it.
    if plan.ep > 1:
        assert grid.experts is not None
        mesh = grid.experts["ep", "expert_tp"]
    else:
        mesh = grid.axis("tp")
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        whole = module.get_parameter(name)
        placements = [Shard(0), Shard(dim)][-mesh.ndim :]
        split = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))
    compute_locally(module, dict.fromkeys(("gate", "up", "down"), own_shard))
    if plan.tp > 1:
        residual: Placement = Shard(1) if plan.sequence_parallel else Replicate()
        _sum_parts(module, grid.axis("tp"), residual)
    if plan.ep > 1:
        module.core = Exchange(module.core, grid.axis("ep").get_group())


def _sum_parts(module: nn.Module, mesh: DeviceMesh, residual: Placement) -> None:
    """Put `Experts`, whose matrices the ranks of `mesh` share, between their parts of the residual stream."""
    forward = module.forward

    def summed(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        x, weights, chosen = (convert(part, mesh, residual, Replicate()) for part in (x, weights, chosen))
        return convert(forward(x, weights, chosen), mesh, Partial(), residual)

    module.forward = summed


class Exchange(nn.Module):
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
        going = counts.view(ranks, -1)  # (ranks, experts of each)
        coming = all_to_all_single(going, None, None, self._group)  # (ranks, experts here)
        # Both at once: the host waits for a GPU here.
        sent, received = on_host(torch.stack([going.sum(1), coming.sum(1)]), len(rows))
        rows = all_to_all_single_autograd(rows, received, sent, self._group)
        weights = all_to_all_single_autograd(weights, received, sent, self._group)

        # From the ranks' order to the experts'.
        experts = torch.arange(coming.shape[1], device=counts.device).repeat(ranks)
        order = experts.repeat_interleave(coming.flatten(), output_size=sum(received)).argsort(stable=True)
        places = positions_in(order, len(order)).unsqueeze(1)
        results = self.core(
            spread(rows, order, places), spread(weights, order, places), coming.sum(0), *matrices
        )
        back: Tensor = all_to_all_single_autograd(
            collect(results, order, places), sent, received, self._group
        )
        return back


class SplitSamples(WholeSamples):
    """Replacement of `WholeSamples` that asks the ranks of `cp`, and under `plan.sequence` those of `tp`."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        plan = grid.plan
        self._kind, self._context_ranks, self._context_rank = plan.cp_method, plan.cp, grid.at("cp")
        self._context = grid.axis("cp").get_group() if plan.cp > 1 else None
        self._tensor = grid.axis("tp").get_group() if plan.sequence_parallel else None

    def total(self, counts: Tensor) -> Tensor:
        """Sum `counts` over the ranks that hold parts of the same samples."""
        counts = counts.contiguous()
        for group in (self._tensor, self._context):
            if group is not None:
                dist.all_reduce(counts, group=group)
        return counts

    def whole(self, x: Tensor) -> Tensor:
        """Gather (rows, part of the sequence, ...) to (rows, sequence, ...), in the order of positions."""
        if self._tensor is not None:
            x = _gather(x, self._tensor)
        if self._context is None:
            return x
        # Ranks hold positions in an order of their own.
        gathered, order = _gather(x, self._context), self._order(x.shape[1], x.device)
        return gathered[:, positions_in(order, len(order))]

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor that `whole` gathered."""
        if self._context is not None:
            mine = self._order(x.shape[1] // self._context_ranks, x.device).chunk(self._context_ranks)
            x = x[:, mine[self._context_rank]]
        if self._tensor is not None:
            x = x.chunk(self._tensor.size(), dim=1)[self._tensor.rank()]
        return x

    def _order(self, local: int, device: torch.device) -> Tensor:
        """Return the positions that the context ranks hold, one rank after the other."""
        ranks, length = self._context_ranks, local * self._context_ranks
        held = [context_positions(length, self._kind, ranks, rank) for rank in range(ranks)]
        return torch.cat(held).to(device)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts one after the other along dim 1."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)
