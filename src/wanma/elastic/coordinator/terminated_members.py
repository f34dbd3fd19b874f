"""Members whose ranks have ended: the in-memory checkpoints that they hold, and their return; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from wanma.elastic.coordinator.member import Member
from wanma.elastic.failure import MAX_FAILURE_CHARACTERS, Failure, truncate_middle
from wanma.elastic.protocol.messages import AbortCommand, InMemoryCheckpointId, PreviousMembership
from wanma.elastic.recovery.flush_round import FlushRound
from wanma.elastic.recovery.restart_policy import (
    find_newest_checkpoint_of_ranks,
    find_newest_complete_checkpoint,
)


def restore_node_rank(
    member: Member,
    previous: PreviousMembership,
    local_world_sizes: Sequence[int],
    taken_node_ranks: Collection[int],
) -> bool:
    """Return its node rank to a node of the newest generation, unless taken; its checkpoints count.

    Args:
        member: node that has just joined again.
        previous: its part in the newest generation.
        local_world_sizes: number of ranks on each node of that generation.
        taken_node_ranks: node ranks that other nodes have.

    Returns:
        False if the node rank is taken, or was none of that generation.
    """
    node_rank = previous.node_rank
    if node_rank in taken_node_ranks or node_rank >= len(local_world_sizes):
        return False
    first = sum(local_world_sizes[:node_rank])
    member.node_rank, member.ranks = node_rank, range(first, first + local_world_sizes[node_rank])
    member.termination = replace(previous.termination, store_port=member.store_port)
    return True


def evict_unhealthy_members(
    members: dict[int, Member], unhealthy_nodes: Mapping[int, Failure]
) -> dict[int, Failure]:
    """Remove the nodes that have failed a health check from `members`; return their failures by name."""
    evicted = {
        name: unhealthy_nodes[member.node_rank]
        for name, member in members.items()
        if member.node_rank in unhealthy_nodes
    }
    for name in evicted:
        del members[name]
    return evicted


def find_restore_point(members: Sequence[Member], world_size: int) -> InMemoryCheckpointId | None:
    """Return the newest in-memory checkpoint that the present nodes hold completely; None: from disk.

    A lost node's partner has those of its ranks. If it has not, the new ranks say so, and all restore from
    disk.

    Args:
        members: nodes that had ranks in the newest generation.
        world_size: of that generation.
    """
    shards = [shard for member in members for shard in member.in_memory_shards]
    ranks = (rank for member in members for rank in member.ranks)
    return find_newest_complete_checkpoint(shards, world_size) or find_newest_checkpoint_of_ranks(
        ranks, shards
    )


def make_flush_round(
    members: Mapping[int, Member],
    unhealthy_nodes: Collection[int],
    world_size: int,
    *,
    end_command: AbortCommand,
    termination_reason: str,
    deadline: float,
    allows_parts: bool = True,
) -> FlushRound:
    """Return the flush of the members' in-memory checkpoints.

    Args:
        members: nodes by name; those without ended ranks take no part.
        unhealthy_nodes: node ranks that take no part either, as their checkpoints are not trusted.
        world_size: of the newest generation.
        end_command: end of the run after the flush.
        termination_reason: reason why the ranks had to be ended.
        deadline: time at which everything is killed, or the flush is given up.
        allows_parts: as of `FlushRound`.
    """
    nodes = {
        name: (member.ranks, member.termination.in_memory_shards)
        for name, member in members.items()
        if member.node_rank >= 0
        and member.termination is not None
        and member.node_rank not in unhealthy_nodes
    }
    reason = truncate_middle(termination_reason, MAX_FAILURE_CHARACTERS)
    return FlushRound(
        world_size,
        nodes,
        end_command=end_command,
        termination_reason=reason,
        deadline=deadline,
        allows_parts=allows_parts,
    )


def make_termination_timeout(
    members: Sequence[Member], timeout_seconds: float, termination_reason: str
) -> Failure:
    """Return the failure of a termination that some nodes do not report in time.

    Args:
        members: nodes that had ranks.
        timeout_seconds: time that was waited.
        termination_reason: reason why the ranks had to be ended.
    """
    unreported = [member.label for member in members if member.termination is None]
    cause = f"the ranks on {', '.join(unreported)} did not exit within {timeout_seconds:.0f} s of SIGKILL"
    hint = (
        "a process blocked in a disk or driver call cannot be killed: inspect that node with `ps` "
        f"and `dmesg`, and restart the blocked device or service; reason for the kill: {termination_reason}"
    )
    return Failure(cause, hint=hint)
