"""Partner ring: backed-up ranks of each rank, and the plan of transfers after a loss. Pure, torch-free.

The nodes form a ring: each node's memory files are also stored by the next one, its partner, so that the loss
of one node loses none of them. A rank sends its own to the rank with its local rank there; where the partner
has fewer ranks, some receive several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def node_rank_ranges(local_world_sizes: Sequence[int]) -> list[range]:
    """Return the ranks of each node.

    Args:
        local_world_sizes: number of ranks of each node.
    """
    return [range(first, stop) for first, stop in pairwise(accumulate(local_world_sizes, initial=0))]


def node_of(rank: int, local_world_sizes: Sequence[int]) -> int:
    return next(node for node, span in enumerate(node_rank_ranges(local_world_sizes)) if rank in span)


def backup_rank_of(rank: int, local_world_sizes: Sequence[int]) -> int:
    """Return the rank on the partner node that stores the memory files of `rank`.

    Raises:
        ValueError: there is one node only.
    """
    if len(local_world_sizes) < 2:
        raise ValueError("one node has no partner")
    spans, node = node_rank_ranges(local_world_sizes), node_of(rank, local_world_sizes)
    partner = spans[(node + 1) % len(spans)]
    return partner[(rank - spans[node].start) % len(partner)]


def backed_up_ranks(rank: int, local_world_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the backed-up ranks whose memory files `rank` stores; empty on a single node."""
    if len(local_world_sizes) < 2:
        return ()
    previous_node = node_rank_ranges(local_world_sizes)[node_of(rank, local_world_sizes) - 1]
    return tuple(owner for owner in previous_node if backup_rank_of(owner, local_world_sizes) == rank)


@dataclass(frozen=True)
class RestoreTransfer:
    """Transfer of one memory file that its owner's node has lost, and another node has."""

    owner: int
    """Rank that wrote it; the present rank of the same number receives it."""
    source: int
    """Rank that sends it."""


def plan_restore(
    available_owners: Mapping[int, Collection[int]], local_world_sizes: Sequence[int]
) -> tuple[list[RestoreTransfer], list[int]]:
    """Plan the transfers that give each node its own ranks' memory files, and list the ranks without any.

    Args:
        available_owners: node -> ranks whose memory file it has.
        local_world_sizes: number of ranks of each node.
    """
    spans = node_rank_ranges(local_world_sizes)
    transfers, missing = [], []
    for node, span in enumerate(spans):
        for local_rank, owner in enumerate(span):
            if owner in available_owners[node]:
                continue
            for partner in _partner_candidates(node, len(spans)):
                if owner in available_owners[partner]:
                    source = spans[partner][local_rank % len(spans[partner])]
                    transfers.append(RestoreTransfer(owner, source))
                    break
            else:
                missing.append(owner)
    return transfers, missing


def _partner_candidates(node: int, node_count: int) -> Iterator[int]:
    """Return the other nodes, the partner first."""
    return ((node + distance) % node_count for distance in range(1, node_count))
