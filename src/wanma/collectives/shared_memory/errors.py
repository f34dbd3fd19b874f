"""Errors of collectives over shared memory: which collective, of which group, because of which rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from wanma.collectives.shared_memory.native_library import Outcome


class SharedMemoryError(dist.DistBackendError):
    """Failure of a collective, mostly because of another rank; the group is unusable afterwards."""


def failure_text(
    outcome: Outcome, what: str, cause: int | None, late: Sequence[int], own: int, timeout_seconds: float
) -> str:
    """Format the failure of a collective as one sentence.

    Args:
        outcome: result of the collective.
        what: the collective, as 'all_reduce #17 of group data'.
        cause: the rank to blame; None: it could be any rank.
        late: ranks that had not arrived when the time was over.
        own: this rank.
        timeout_seconds: time that was waited.
    """
    if outcome is Outcome.LATE:
        named = ranks_text(late) if late else "any rank" if cause is None else f"rank {cause}"
        return (
            f"{what}: timed out waiting for {named} ({timeout_seconds:g} s): "
            "the hang report, or the logs of those ranks, tell where they are"
        )
    why = {
        Outcome.DEAD: f"connection closed by peer: the process of rank {cause} has ended",
        Outcome.LEFT: f"connection closed by peer: rank {cause} has closed its process group",
        Outcome.ABORTED: (
            "this rank has closed its process group meanwhile"
            if cause == own
            else f"connection closed by peer: rank {cause} has given up"
        ),
        Outcome.MISMATCH: (
            f"rank {cause} and others are in different collectives, or in one with different sizes, types or "
            "roots: all ranks of a group have to call the same ones in the same order"
        ),
        Outcome.UNDER_WAY: f"timed out waiting for it after {timeout_seconds:g} s; it is still under way",
    }
    return f"{what}: {why[outcome]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks: 'rank 3', 'ranks 1, 2 and 5'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
