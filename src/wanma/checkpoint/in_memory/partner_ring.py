"""Which ranks keep copies of whose images, and who fetches which after a loss. Pure, torch-free.

The nodes are a ring: each node's images are also kept by the next one, its partner, so that the loss of a
node loses none of them. A rank sends its own to the rank of its local number there; where the partner has
fewer ranks, some take several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def node_spans(ranks_by_node: Sequence[int]) -> list[range]:
    """The ranks of each node.

    Args:
        ranks_by_node: how many each node has.
    """
    return [range(first, stop) for first, stop in pairwise(accumulate(ranks_by_node, initial=0))]


def node_of(rank: int, ranks_by_node: Sequence[int]) -> int:
    return next(node for node, span in enumerate(node_spans(ranks_by_node)) if rank in span)


def host_of(rank: int, ranks_by_node: Sequence[int]) -> int:
    """The rank on another node that takes the images of `rank`.

    Raises:
        ValueError: there is one node only.
    """
    if len(ranks_by_node) < 2:
        raise ValueError("one node has no partner")
    spans, node = node_spans(ranks_by_node), node_of(rank, ranks_by_node)
    partner = spans[(node + 1) % len(spans)]
    return partner[(rank - spans[node].start) % len(partner)]


def guests_of(rank: int, ranks_by_node: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose images `rank` takes; none on a single node."""
    if len(ranks_by_node) < 2:
        return ()
    before = node_spans(ranks_by_node)[node_of(rank, ranks_by_node) - 1]
    return tuple(guest for guest in before if host_of(guest, ranks_by_node) == rank)


@dataclass(frozen=True)
class Fetch:
    """One image that its owner's node has lost, and another keeps."""

    owner: int
    """Rank that left it, and whose number the rank has that now takes it up."""
    source: int
    """Rank that sends it."""


def plan_fetches(
    held: Mapping[int, Collection[int]], ranks_by_node: Sequence[int]
) -> tuple[list[Fetch], list[int]]:
    """How each node gets the images of its own ranks, and of which ranks nobody has one.

    Args:
        held: node -> ranks of which it has an image.
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
    """The other nodes, the partner first."""
    return ((node + distance) % nodes for distance in range(1, nodes))
