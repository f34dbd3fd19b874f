"""Time budget between a stop command and the kill that follows it; pure functions.

    |<------------------------------ cluster.grace_seconds ------------------------------>|
    SIGTERM      current step ends, its checkpoint is written          leave              SIGKILL
                 or, at the latest start, the in-memory checkpoint is

All times are of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wanma.elastic.protocol.messages import InMemoryCheckpointId, InMemoryCheckpointShard
from wanma.elastic.recovery.restart_policy import find_newest_complete_checkpoint
from wanma.elastic.workers.progress_board import RankProgress

EXIT_MARGIN_SECONDS = 2.0
"""Time before the kill, in seconds, to end the ranks, tell the other nodes and exit."""
FLUSH_STARTUP_SECONDS = 2.0
"""Time, in seconds, to kill the ranks and start the flush process, on a busy node."""
ASSUMED_WRITE_BYTES_PER_SECOND = 100e6
"""Rate at which a node surely writes, in bytes per second: to a disk that many nodes write to at once."""


def compute_drain_end(kill_deadline: float) -> float:
    """Return the time at which nothing may be in progress any more."""
    return kill_deadline - EXIT_MARGIN_SECONDS


def compute_latest_flush_start(kill_deadline: float, checkpoint_bytes: int, destinations: int = 1) -> float:
    """Return the latest time at which this node has to start to write `checkpoint_bytes`.

    Args:
        kill_deadline: time of the kill.
        checkpoint_bytes: size of the node's in-memory checkpoints.
        destinations: number of destinations, written one after the other: the disk, and a URL.
    """
    return compute_drain_end(kill_deadline) - destinations * (
        FLUSH_STARTUP_SECONDS + checkpoint_bytes / ASSUMED_WRITE_BYTES_PER_SECOND
    )


def compute_step_abandon_time(
    now: float,
    kill_deadline: float,
    checkpoint_bytes: int,
    step_start: float,
    step_seconds: float | None,
    destinations: int = 1,
) -> float:
    """Return the time at which to give up the current step for the in-memory checkpoint.

    A step that will not have ended by the latest start of a flush is given up at once: the rest is better
    spent on writing. Its checkpoint has as many bytes as the in-memory one, and so needs the same time.

    Args:
        now: present time.
        kill_deadline: time of the kill.
        checkpoint_bytes: size of the node's in-memory checkpoints.
        step_start: start of the current step.
        step_seconds: measured time of a step; None: unknown, so the latest start decides.
        destinations: number of destinations.
    """
    latest = compute_latest_flush_start(kill_deadline, checkpoint_bytes, destinations)
    if latest <= now or (step_seconds is not None and step_start + step_seconds > latest):
        return now
    return latest


class StepTimeEstimate:
    """Estimate of the time of a step, from samples of the progress board."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """Time of a step, in seconds; None: fewer than two steps have been seen to end."""
        self.step_start = 0.0
        """Approximate start of the current step; 0: none has ended yet."""
        self._last_finished_step: int | None = None

    def update(self, progress: Iterable[RankProgress]) -> None:
        """Update the estimate from the ranks' reports."""
        newest = max(
            (
                (position.last_finished_step, position.finished_at)
                for position in progress
                if position.last_finished_step is not None
            ),
            default=None,
        )
        if newest is None or newest[0] == self._last_finished_step:
            return
        done, at = newest
        if self._last_finished_step is not None and done > self._last_finished_step:
            self.step_seconds = (at - self.step_start) / (done - self._last_finished_step)
        self._last_finished_step, self.step_start = done, at


def assign_flush(
    world_size: int,
    nodes: Mapping[int, tuple[Sequence[int], Sequence[InMemoryCheckpointShard]]],
    *,
    by_step: bool = False,
) -> tuple[InMemoryCheckpointId, int, dict[int, tuple[int, ...]]] | None:
    """Choose the in-memory checkpoint to flush when all nodes' ranks are gone, and each node's share of it.

    Args:
        world_size: of the newest generation.
        nodes: remaining nodes, by name: their own ranks, and all in-memory checkpoints that they hold.
        by_step: as in `find_newest_complete_checkpoint`.

    Returns:
        The newest complete in-memory checkpoint; its number of ranks; and for each node that writes any, the
        ranks it writes: its own if it can, else those whose copies it holds. None: no checkpoint is complete.
    """
    all_shards = [shard for _, shards in nodes.values() for shard in shards]
    moment = find_newest_complete_checkpoint(all_shards, world_size, by_step=by_step)
    if moment is None:
        return None
    ranks = range(
        next(shard.world_size or world_size for shard in all_shards if shard.checkpoint_id == moment)
    )
    writers: dict[int, int] = {}
    for node, (own_ranks, shards) in nodes.items():
        for shard in shards:
            if shard.checkpoint_id == moment and (shard.rank in own_ranks or shard.rank not in writers):
                writers[shard.rank] = node
    shares = {node: tuple(rank for rank in ranks if writers[rank] == node) for node in nodes}
    return moment, len(ranks), {node: share for node, share in shares.items() if share}
