"""Process groups over which the data ranks sum their gradients, and their node hierarchy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.algorithms.hierarchical_all_reduce import group_ranks_by_node
from wanma.collectives.all_reduce.bucket_all_reduce import (
    FlattenBucket,
    StartAllReduce,
    ThreadedAllReduce,
    make_backend_all_reduce,
    make_bucket_flattener,
)
from wanma.collectives.compression.hierarchical import NodeGroups
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import ParallelMesh


@dataclass(frozen=True)
class ReductionGroup:
    """Group over which gradients are summed along one mesh dimension, and the way of the sum."""

    group: dist.ProcessGroup
    start_all_reduce: StartAllReduce
    flatten_bucket: FlattenBucket
    """Function that makes the buckets that `start_all_reduce` is given."""


def build_reduction_groups(parallel_mesh: ParallelMesh, *, overlaps_backward: bool) -> list[ReductionGroup]:
    """Return one entry per mesh dimension over which gradients are summed, in order; every rank calls it.

    Args:
        parallel_mesh: device meshes of the plan.
        overlaps_backward: true if sums run during backward.
    """
    # Torch may have one group for the replicas and for the ranks of `cp`, which communicate within a backward
    # too: the order of both would depend on which gradients a rank has.
    is_shared = overlaps_backward and parallel_mesh.plan.cp > 1
    groups: list[ReductionGroup] = []
    for name in ("replicate", "shard"):
        dim_mesh = parallel_mesh.parameter_mesh[name]
        if dim_mesh.size() == 1:
            continue
        group = (
            _new_replica_group(parallel_mesh) if name == "replicate" and is_shared else dim_mesh.get_group()
        )
        if name == "replicate" and parallel_mesh.plan.all_reduces_by_messages:
            begin = _make_message_all_reduce(parallel_mesh, group)
            groups.append(ReductionGroup(group, begin, torch.cat))
        else:
            groups.append(ReductionGroup(group, make_backend_all_reduce(group), make_bucket_flattener(group)))
    return groups


def _make_message_all_reduce(parallel_mesh: ParallelMesh, group: dist.ProcessGroup) -> StartAllReduce:
    """Return a function that starts the plan's algorithm of `collectives.algorithms` over `group`."""
    all_reduce = ALGORITHMS["all_reduce"][parallel_mesh.plan.all_reduce]
    nodes = group_ranks_by_node(dist.get_process_group_ranks(group), parallel_mesh.local_world_sizes)
    return ThreadedAllReduce(lambda bucket: all_reduce(bucket, group, nodes))


def build_node_groups(parallel_mesh: ParallelMesh) -> NodeGroups | None:
    """Return the node hierarchy of the replicas of this rank's part of the model.

    It has two groups: the replicas on this rank's node, and those at its position on the other nodes.
    Every rank calls it.

    Returns:
        None where the plan does not sum by nodes first.
    """
    if parallel_mesh.plan.all_reduce != "hierarchical":
        return None
    intra_node: dist.ProcessGroup | None = None
    inter_node: dist.ProcessGroup | None = None
    for members in _replica_ranks(parallel_mesh.plan):
        nodes = [
            [members[index] for index in node]
            for node in group_ranks_by_node(members, parallel_mesh.local_world_sizes)
        ]
        for node in nodes:
            group = dist.new_group(node)
            intra_node = group if parallel_mesh.rank in node else intra_node
        for peers in zip(*nodes, strict=True):  # equally many on each node, by the plan
            group = dist.new_group(list(peers))
            inter_node = group if parallel_mesh.rank in peers else inter_node
    assert intra_node is not None
    assert inter_node is not None
    return NodeGroups(intra_node, inter_node)


def _new_replica_group(parallel_mesh: ParallelMesh) -> dist.ProcessGroup:
    """Create the group of the replicas of this rank's part; torch wants every rank to make every group."""
    own_group: dist.ProcessGroup | None = None
    for members in _replica_ranks(parallel_mesh.plan):
        group = dist.new_group(members)
        if parallel_mesh.rank in members:
            own_group = group
    assert own_group is not None
    return own_group


def _replica_ranks(plan: Plan) -> list[list[int]]:
    """Return the ranks that hold the same part of the model, for each part."""
    ranks = torch.arange(plan.world_size).view(
        plan.sites, plan.pp, plan.replicate_group_size, plan.shard_group_size, plan.tp
    )
    groups: list[list[int]] = ranks.movedim(2, -1).flatten(0, -2).tolist()
    return groups
