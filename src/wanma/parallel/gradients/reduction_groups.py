"""Process groups over which the data ranks sum their gradients, and their node hierarchy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from wanma.collectives.algorithms.hierarchical_all_reduce import nodes_of, sum_over_nodes
from wanma.collectives.all_reduce.bucket_all_reduce import Begin, InTurn, Join, join_for, over_group
from wanma.collectives.compression.hierarchical import Levels
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import Grid


@dataclass(frozen=True)
class DataSums:
    """Group over which gradients are summed along one mesh dimension, and the way of the sum."""

    group: dist.ProcessGroup
    begin: Begin
    join: Join
    """Function that makes the buckets that `begin` is given."""


def data_sums(grid: Grid, *, beside_backward: bool) -> list[DataSums]:
    """Return one entry per mesh dimension over which gradients are summed, in order; every rank calls it.

    Args:
        grid: device meshes of the plan.
        beside_backward: true if sums are in progress while a backward goes on.
    """
    # Torch may have one group for the replicas and for the ranks of `cp`, which communicate within a backward
    # too: the order of both would depend on which gradients a rank has.
    is_shared = beside_backward and grid.plan.cp > 1
    sums: list[DataSums] = []
    for name in ("replicate", "shard"):
        axis = grid.state[name]
        if axis.size() == 1:
            continue
        group = _own_group(grid) if name == "replicate" and is_shared else axis.get_group()
        if name == "replicate" and grid.plan.hierarchical:
            nodes = nodes_of(dist.get_process_group_ranks(group), grid.ranks_by_node)
            begin: Begin = InTurn(partial(sum_over_nodes, group=group, nodes=nodes))
        else:
            begin = over_group(group)
        sums.append(DataSums(group, begin, join_for(group)))
    return sums


def levels_of(grid: Grid) -> Levels | None:
    """Return the node hierarchy of the replicas of this rank's part of the model.

    It has two groups: the replicas on this rank's node, and those at its position on the other nodes.
    Every rank calls it.

    Returns:
        None where the plan does not sum by nodes first.
    """
    if not grid.plan.hierarchical:
        return None
    within: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None
    for members in _replicas(grid.plan):
        nodes = [[members[index] for index in node] for node in nodes_of(members, grid.ranks_by_node)]
        for node in nodes:
            group = dist.new_group(node)
            within = group if grid.rank in node else within
        for apart in zip(*nodes, strict=True):  # equally many on each node, by the plan
            group = dist.new_group(list(apart))
            between = group if grid.rank in apart else between
    assert within is not None
    assert between is not None
    return Levels(within, between)


def _own_group(grid: Grid) -> dist.ProcessGroup:
    """Create the group of the replicas of this rank's part; torch wants every rank to make every group."""
    mine: dist.ProcessGroup | None = None
    for members in _replicas(grid.plan):
        group = dist.new_group(members)
        if grid.rank in members:
            mine = group
    assert mine is not None
    return mine


def _replicas(plan: Plan) -> list[list[int]]:
    """Return the ranks that hold the same part of the model, for each part."""
    ranks = torch.arange(plan.world_size).view(plan.sites, plan.pp, plan.replicas, plan.shard_ranks, plan.tp)
    found: list[list[int]] = ranks.movedim(2, -1).flatten(0, -2).tolist()
    return found
