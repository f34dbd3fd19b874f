"""Hierarchical all-reduce: over the ranks of each node, then between nodes, then back.

    scatter   within a node each rank gets the others' share of its part, and adds it up
    between   the owners of a part, one on each node, add it up over the nodes
    gather    within a node each rank sends its part to the others

Of B bytes a ring over n ranks takes 2 (n - 1)/n B out of every node and as much in; here, with N nodes, it is
2 (N - 1)/N B, shared by the node's ranks, in 2 steps between nodes rather than 2 (n - 1) (Thakur et al. 2005,
section 4; Chan et al. 2007, section 7). Everything is sent from rank to rank and added in the order of the
ranks, so that the same numbers have the same sum, bit by bit, on all ranks and in every repetition.

Nodes may have different numbers of ranks. Each cuts the bucket into as many equal parts as it has ranks; a
segment between two neighbouring cuts, of whichever nodes, has one owner on each node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.algorithms.message_batch import MessageBatch

RanksByNode = Sequence[Sequence[int]]
"""Ranks within the group, by node; each rank is on one node, and no node is empty."""

_SCATTER, _INTER_NODE, _INTER_NODE_GATHER, _GATHER = range(4)
"""Message tags of the phases; a rank that is ahead sends messages its peer does not yet wait for."""


def hierarchical_all_reduce(bucket: Tensor, group: dist.ProcessGroup, ranks_by_node: RanksByNode) -> None:
    """Sum `bucket` (elements,), contiguous, over `group`, in place; all its ranks call it alike.

    Args:
        bucket: values of this rank; they become the sum.
        group: process group of all ranks in `ranks_by_node`.
        ranks_by_node: ranks of the group, by node.

    Raises:
        ValueError: `ranks_by_node` do not hold each of the group's ranks once.
        WanmaError: a rank does not answer; names it.
    """
    if sorted(rank for node in ranks_by_node for rank in node) != list(range(group.size())):
        raise ValueError(
            f"nodes {ranks_by_node} do not hold the {group.size()} ranks of the group, each once"
        )
    rank = group.rank()
    own_node = next(number for number, node in enumerate(ranks_by_node) if rank in node)
    peers, elements = ranks_by_node[own_node], bucket.numel()
    messages = MessageBatch(group)
    parts = dict(zip(peers, _split_evenly(0, elements, len(peers)), strict=True))
    own_part = parts[rank]

    # Within the node, nearest first, so that no rank is the first target of all.
    other_peers = _peers_from_next(peers, rank)
    received_parts = {
        peer: messages.receive(torch.empty_like(bucket[own_part]), peer, _SCATTER) for peer in other_peers
    }
    for peer in other_peers:
        messages.send(bucket[parts[peer]], peer, _SCATTER)
    messages.wait()
    _add_up(bucket[own_part], [received_parts.get(peer, bucket[own_part]) for peer in peers])

    for shared in list_bucket_segments(elements, ranks_by_node):
        if shared.owners[own_node] == rank:
            _all_reduce_between_nodes(bucket, shared, own_node, messages)

    for peer in other_peers:
        messages.receive(bucket[parts[peer]], peer, _GATHER)
        messages.send(bucket[own_part], peer, _GATHER)
    messages.wait()


@dataclass(frozen=True)
class BucketSegment:
    """Elements `start` to `stop` of a bucket, with one owner on each node."""

    start: int
    stop: int
    owners: tuple[int, ...]
    """Owner on each node, in order of the nodes, as a rank of the group."""


def list_bucket_segments(elements: int, ranks_by_node: RanksByNode) -> list[BucketSegment]:
    """Return the segments of a bucket of `elements`, in order; each element is in exactly one."""
    starts = [[elements * part // len(node) for part in range(len(node))] for node in ranks_by_node]
    cuts = sorted({elements, *(start for node_starts in starts for start in node_starts)})
    return [
        BucketSegment(
            start,
            stop,
            tuple(node[bisect_right(of, start) - 1] for node, of in zip(ranks_by_node, starts, strict=True)),
        )
        for start, stop in pairwise(cuts)
    ]


def group_ranks_by_node(ranks: Sequence[int], local_world_sizes: Sequence[int]) -> list[list[int]]:
    """Group the ranks of a process group by node.

    Args:
        ranks: global ranks, in the order of the group.
        local_world_sizes: number of ranks on each node of the run; empty: all are on one node.
    """
    first_ranks = [sum(local_world_sizes[:node]) for node in range(len(local_world_sizes))] or [0]
    indices_by_node: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        indices_by_node.setdefault(bisect_right(first_ranks, rank), []).append(index)
    return [indices_by_node[node] for node in sorted(indices_by_node)]


def _all_reduce_between_nodes(
    bucket: Tensor, segment: BucketSegment, own_node: int, messages: MessageBatch
) -> None:
    """Sum one segment over its owners; this rank is the owner on node `own_node`."""
    count = len(segment.owners)
    if count == 1:
        return
    # Two owners exchange the whole segment: as many bytes as by halves, in one step rather than two.
    is_split = count > 2
    cuts = _split_evenly(segment.start, segment.stop, count)
    segment_range = slice(segment.start, segment.stop)
    own_range = cuts[own_node] if is_split else segment_range
    other_nodes = [node for node in range(count) if node != own_node]
    other_nodes = other_nodes[own_node:] + other_nodes[:own_node]
    received_parts = {
        node: messages.receive(torch.empty_like(bucket[own_range]), segment.owners[node], _INTER_NODE)
        for node in other_nodes
    }
    for node in other_nodes:
        messages.send(bucket[cuts[node] if is_split else segment_range], segment.owners[node], _INTER_NODE)
    messages.wait()
    _add_up(bucket[own_range], [received_parts.get(node, bucket[own_range]) for node in range(count)])
    if is_split:
        for node in other_nodes:
            messages.receive(bucket[cuts[node]], segment.owners[node], _INTER_NODE_GATHER)
            messages.send(bucket[own_range], segment.owners[node], _INTER_NODE_GATHER)
        messages.wait()


def _split_evenly(start: int, stop: int, parts: int) -> list[slice]:
    """Return `parts` slices of the range, as even as possible."""
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]


def _peers_from_next(ranks: Sequence[int], rank: int) -> list[int]:
    """Return the other ranks in cyclic order, starting after this one."""
    position = list(ranks).index(rank)
    return [*ranks[position + 1 :], *ranks[:position]]


def _add_up(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of `parts`, added in their order, to `target`, which is one of them."""
    if len(parts) == 1:
        return
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    target.copy_(total)
