"""Partner ring: backed-up ranks of each rank, and the plan of transfers after a loss. Pure, torch-free.

The nodes form a ring: each node's memory files are also stored by the next one, its partner, so that the loss
of one node loses none of them. A rank sends its own to the rank with its local rank there; where the partner
has fewer ranks, some receive several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def node_spans(ranks_by_node: Sequence[int]) -> list[range]:
    """Return the ranks of each node.

    Args:
        ranks_by_node: number of ranks of each node.
    """
    return [range(first, stop) for first, stop in pairwise(accumulate(ranks_by_node, initial=0))]


def node_of(rank: int, ranks_by_node: Sequence[int]) -> int:
    return next(node for node, span in enumerate(node_spans(ranks_by_node)) if rank in span)


def host_of(rank: int, ranks_by_node: Sequence[int]) -> int:
    """Return the rank on the partner node that stores the memory files of `rank`.

    Raises:
        ValueError: there is one node only.
    """
    if len(ranks_by_node) < 2:
        raise ValueError("one node has no partner")
    spans, node = node_spans(ranks_by_node), node_of(rank, ranks_by_node)
    partner = spans[(node + 1) % len(spans)]
    return partner[(rank - spans[node].start) % len(partner)]


def guests_of(rank: int, ranks_by_node: Sequence[int]) -> tuple[int, ...]:
    """Return the backed-up ranks whose memory files `rank` stores; empty on a single node."""
    if len(ranks_by_node) < 2:
        return ()
    before = node_spans(ranks_by_node)[node_of(rank, ranks_by_node) - 1]
    return tuple(guest for guest in before if host_of(guest, ranks_by_node) == rank)


@dataclass(frozen=True)
class Fetch:
    """Transfer of one memory file that its owner's node has lost, and another node has."""

    owner: int
    """Rank that wrote it; the present rank of the same number receives it."""
    source: int
    """Rank that sends it."""


def plan_fetches(
    held: Mapping[int, Collection[int]], ranks_by_node: Sequence[int]
) -> tuple[list[Fetch], list[int]]:
    """Plan the transfers that give each node its own ranks' memory files, and list the ranks without any.

    Args:
        held: node -> ranks whose memory file it has.
        ranks_by_node: number of ranks of each node.
    """
    spans = node_spans(ranks_by_node)
    fetches, lost = [], []
    for node, span in enumerate(spans):
        for local_rank, owner in enumerate(span):
            if owner in held[node]:
                continue
            for other in _after(node, len(spans)):
                if owner in held[other]:
                    source = spans[other][local_rank % len(spans[other])]
                    fetches.append(Fetch(owner, source))
                    break
            else:
                lost.append(owner)
    return fetches, lost


def _after(node: int, nodes: int) -> Iterator[int]:
    """Return the other nodes, the partner first."""
    return ((node + distance) % nodes for distance in range(1, nodes))
