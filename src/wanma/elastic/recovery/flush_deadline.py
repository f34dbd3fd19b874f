"""Time budget between a stop command and the kill that follows it; pure functions.

    |<------------------------------ cluster.grace_seconds ------------------------------>|
    SIGTERM      current step ends, its checkpoint is written          leave              SIGKILL
                 or, at the latest start, the in-memory checkpoint is

All times are of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wanma.elastic.protocol.messages import HeldImage, Image
from wanma.elastic.recovery.restart_policy import newest_whole
from wanma.elastic.workers.progress_board import Position

LEAVE_SECONDS = 2.0
"""Time before the kill, in seconds, to end the ranks, tell the other nodes and exit."""
BEGIN_SECONDS = 2.0
"""Time, in seconds, to kill the ranks and start the flush process, on a busy node."""
BYTES_PER_SECOND = 100e6
"""Rate at which a node surely writes, in bytes per second: to a disk that many nodes write to at once."""


def leave_at(until: float) -> float:
    """Return the time at which nothing may be in progress any more."""
    return until - LEAVE_SECONDS


def last_moment(until: float, copy_bytes: int, places: int = 1) -> float:
    """Return the latest time at which this node has to start to write `copy_bytes`.

    Args:
        until: time of the kill.
        copy_bytes: size of the node's in-memory checkpoints.
        places: number of destinations, written one after the other: the disk, and a URL.
    """
    return leave_at(until) - places * (BEGIN_SECONDS + copy_bytes / BYTES_PER_SECOND)


def give_up_at(
    now: float,
    until: float,
    copy_bytes: int,
    step_began: float,
    step_seconds: float | None,
    places: int = 1,
) -> float:
    """Return the time at which to give up the current step for the in-memory checkpoint.

    A step that will not have ended by the latest start of a flush is given up at once: the rest is better
    spent on writing. Its checkpoint has as many bytes as the in-memory one, and so needs the same time.

    Args:
        now: present time.
        until: time of the kill.
        copy_bytes: size of the node's in-memory checkpoints.
        step_began: start of the current step.
        step_seconds: measured time of a step; None: unknown, so the latest start decides.
        places: number of destinations.
    """
    latest = last_moment(until, copy_bytes, places)
    if latest <= now or (step_seconds is not None and step_began + step_seconds > latest):
        return now
    return latest


class StepPace:
    """Estimate of the time of a step, from samples of the progress board."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """Time of a step, in seconds; None: fewer than two steps have been seen to end."""
        self.began = 0.0
        """Approximate start of the current step; 0: none has ended yet."""
        self._done: int | None = None

    def see(self, positions: Iterable[Position]) -> None:
        """Update the estimate from the ranks' reports."""
        newest = max(
            ((position.done, position.done_seconds) for position in positions if position.done is not None),
            default=None,
        )
        if newest is None or newest[0] == self._done:
            return
        done, at = newest
        if self._done is not None and done > self._done:
            self.step_seconds = (at - self.began) / (done - self._done)
        self._done, self.began = done, at


def share_images(
    world_size: int,
    nodes: Mapping[int, tuple[Sequence[int], Sequence[HeldImage]]],
    *,
    by_step: bool = False,
) -> tuple[Image, int, dict[int, tuple[int, ...]]] | None:
    """Choose the in-memory checkpoint to flush when all nodes' ranks are gone, and each node's share of it.

    Args:
        world_size: of the newest generation.
        nodes: remaining nodes, by name: their own ranks, and all in-memory checkpoints that they hold.
        by_step: as in `newest_whole`.

    Returns:
        The newest complete in-memory checkpoint; its number of ranks; and for each node that writes any, the
        ranks it writes: its own if it can, else those whose copies it holds. None: no checkpoint is complete.
    """
    everything = [image for _, held in nodes.values() for image in held]
    moment = newest_whole(everything, world_size, by_step=by_step)
    if moment is None:
        return None
    ranks = range(next(one.world_size or world_size for one in everything if one.image == moment))
    writers: dict[int, int] = {}
    for node, (own, held) in nodes.items():
        for image in held:
            if image.image == moment and (image.rank in own or image.rank not in writers):
                writers[image.rank] = node
    shares = {node: tuple(rank for rank in ranks if writers[rank] == node) for node in nodes}
    return moment, len(ranks), {node: share for node, share in shares.items() if share}
