"""Errors of collectives over shared memory: which collective, of which group, because of which rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from wanma.collectives.shared_memory.native_library import CollectiveStatus
from wanma.job.errors import ranks_text


class SharedMemoryError(dist.DistBackendError):
    """Failure of a collective, mostly because of another rank; the group is unusable afterwards."""


def failure_text(
    status: CollectiveStatus,
    collective: str,
    faulty_rank: int | None,
    missing_ranks: Sequence[int],
    own_rank: int,
    timeout_seconds: float,
) -> str:
    """Format the failure of a collective as one sentence.

    Args:
        status: result of the collective.
        collective: the collective, as 'all_reduce #17 of group data'.
        faulty_rank: the rank to blame; None: it could be any rank.
        missing_ranks: ranks that had not arrived when the time was over.
        own_rank: this rank.
        timeout_seconds: time that was waited.
    """
    if status is CollectiveStatus.TIMED_OUT:
        missing_text = (
            ranks_text(missing_ranks)
            if missing_ranks
            else "any rank"
            if faulty_rank is None
            else f"rank {faulty_rank}"
        )
        return (
            f"{collective}: timed out waiting for {missing_text} ({timeout_seconds:g} s): "
            "read the hang report or the logs of those ranks"
        )
    causes = {
        CollectiveStatus.PEER_EXITED: (
            f"connection closed by peer: the process of rank {faulty_rank} has ended"
        ),
        CollectiveStatus.PEER_CLOSED: (
            f"connection closed by peer: rank {faulty_rank} has closed its process group"
        ),
        CollectiveStatus.ABORTED: (
            "this rank has closed its process group"
            if faulty_rank == own_rank
            else f"connection closed by peer: rank {faulty_rank} has aborted its collectives"
        ),
        CollectiveStatus.MISMATCH: (
            f"rank {faulty_rank} and others called different collectives, or one with different sizes, types "
            "or roots: all ranks of a group must call the same collectives in the same order"
        ),
        CollectiveStatus.IN_PROGRESS: (
            f"timed out waiting for it after {timeout_seconds:g} s; it is still in progress"
        ),
    }
    return f"{collective}: {causes[status]}"
