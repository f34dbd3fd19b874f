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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.job.errors import WanmaError

Nodes = Sequence[Sequence[int]]
"""Ranks within the group, by node; each rank is on one node, and no node is empty."""

_SCATTER, _BETWEEN, _BACK, _GATHER = range(4)
"""Message tags of the phases; a rank that is ahead sends messages its peer does not yet wait for."""


def sum_over_nodes(bucket: Tensor, group: dist.ProcessGroup, nodes: Nodes) -> None:
    """Sum `bucket` (elements,), contiguous, over `group`, in place; all its ranks call it alike.

    Args:
        bucket: values of this rank; they become the sum.
        group: process group of all ranks in `nodes`.
        nodes: ranks of the group, by node.

    Raises:
        ValueError: `nodes` do not hold each of the group's ranks once.
        WanmaError: a rank does not answer; names it.
    """
    if sorted(rank for node in nodes for rank in node) != list(range(group.size())):
        raise ValueError(f"nodes {nodes} do not hold the {group.size()} ranks of the group, each once")
    me = group.rank()
    here = next(number for number, node in enumerate(nodes) if me in node)
    peers, elements = nodes[here], bucket.numel()
    mail = _Mail(group)
    parts = dict(zip(peers, _cut(0, elements, len(peers)), strict=True))
    own = parts[me]

    # Within the node, nearest first, so that no rank is the first target of all.
    others = _turned(peers, me)
    received = {peer: mail.receive(torch.empty_like(bucket[own]), peer, _SCATTER) for peer in others}
    for peer in others:
        mail.send(bucket[parts[peer]], peer, _SCATTER)
    mail.wait()
    _add_up(bucket[own], [received.get(peer, bucket[own]) for peer in peers])

    for shared in segments(elements, nodes):
        if shared.owners[here] == me:
            _between(bucket, shared, here, mail)

    for peer in others:
        mail.receive(bucket[parts[peer]], peer, _GATHER)
        mail.send(bucket[own], peer, _GATHER)
    mail.wait()


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of a bucket, with one owner on each node."""

    start: int
    stop: int
    owners: tuple[int, ...]
    """Owner on each node, in order of the nodes, as a rank of the group."""


def segments(elements: int, nodes: Nodes) -> list[Segment]:
    """Return the segments of a bucket of `elements`, in order; each element is in exactly one."""
    starts = [[elements * part // len(node) for part in range(len(node))] for node in nodes]
    cuts = sorted({elements, *(start for of_node in starts for start in of_node)})
    return [
        Segment(
            start,
            stop,
            tuple(node[bisect_right(of, start) - 1] for node, of in zip(nodes, starts, strict=True)),
        )
        for start, stop in pairwise(cuts)
    ]


def nodes_of(ranks: Sequence[int], ranks_by_node: Sequence[int]) -> list[list[int]]:
    """Group the ranks of a process group by node.

    Args:
        ranks: global ranks, in the order of the group.
        ranks_by_node: number of ranks on each node of the run; empty: all are on one node.
    """
    firsts = [sum(ranks_by_node[:node]) for node in range(len(ranks_by_node))] or [0]
    found: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        found.setdefault(bisect_right(firsts, rank), []).append(index)
    return [found[node] for node in sorted(found)]


def _between(bucket: Tensor, shared: Segment, here: int, mail: _Mail) -> None:
    """Sum one segment over its owners; this rank is the owner on node `here`."""
    count = len(shared.owners)
    if count == 1:
        return
    # Two owners exchange the whole segment: as many bytes as by halves, in one step rather than two.
    by_halves = count > 2
    cuts = _cut(shared.start, shared.stop, count)
    whole = slice(shared.start, shared.stop)
    mine = cuts[here] if by_halves else whole
    away = [node for node in range(count) if node != here]
    away = away[here:] + away[:here]
    received = {
        node: mail.receive(torch.empty_like(bucket[mine]), shared.owners[node], _BETWEEN) for node in away
    }
    for node in away:
        mail.send(bucket[cuts[node] if by_halves else whole], shared.owners[node], _BETWEEN)
    mail.wait()
    _add_up(bucket[mine], [received.get(node, bucket[mine]) for node in range(count)])
    if by_halves:
        for node in away:
            mail.receive(bucket[cuts[node]], shared.owners[node], _BACK)
            mail.send(bucket[mine], shared.owners[node], _BACK)
        mail.wait()


def _cut(start: int, stop: int, parts: int) -> list[slice]:
    """Return `parts` slices of the range, as even as possible."""
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]


def _turned(ranks: Sequence[int], me: int) -> list[int]:
    """Return the other ranks in cyclic order, starting after this one."""
    at = list(ranks).index(me)
    return [*ranks[at + 1 :], *ranks[:at]]


def _add_up(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of `parts`, added in their order, to `target`, which is one of them."""
    if len(parts) == 1:
        return
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    target.copy_(total)


class _Mail:
    """Messages between this rank and others of a group, started at once and waited for together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._under_way: list[tuple[int, Tensor, dist.Work]] = []

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        if tensor.numel():
            with self._told(rank):
                self._under_way.append((rank, tensor, self._group.send([tensor], rank, tag)))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Tensor:
        """Start to receive into `tensor`, which is complete after `wait`."""
        if tensor.numel():
            with self._told(rank):
                self._under_way.append((rank, tensor, self._group.recv([tensor], rank, tag)))
        return tensor

    def wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        for rank, _, work in under_way:
            with self._told(rank):
                work.wait()

    @contextmanager
    def _told(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            silent, mine = self._ranks[rank], self._ranks[self._group.rank()]
            raise WanmaError(
                f"summing gradients over nodes: rank {silent} does not answer rank {mine}: {error}",
                f"its log says more: logs/rank-{silent}.log of the run directory",
            ) from error
