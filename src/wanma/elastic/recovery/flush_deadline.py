"""What still fits between an order to stop and the kill that follows it. Pure: times in, times out.

    |<------------------------------ cluster.grace_seconds ------------------------------>|
    SIGTERM      step under way ends, its checkpoint is written        leave              SIGKILL
                 or, from the last moment on, the copy in memory is

All times are of one clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wanma.elastic.protocol.messages import HeldImage, Image
from wanma.elastic.recovery.restart_policy import newest_whole
from wanma.elastic.workers.progress_board import Position

LEAVE_SECONDS = 2.0
"""Before the kill: to end the ranks, tell the other nodes and leave with the exit code."""
BEGIN_SECONDS = 2.0
"""To kill the ranks and start the process that writes what memory holds, on a busy machine."""
BYTES_PER_SECOND = 100e6
"""At which a node surely writes: to a shared disk that many write to at once."""


def leave_at(until: float) -> float:
    """When nothing may be under way any more."""
    return until - LEAVE_SECONDS


def last_moment(until: float, copy_bytes: int, places: int = 1) -> float:
    """When writing `copy_bytes` of this node has to begin at the latest.

    Args:
        places: where they are written to, one after the other: the disk, and a URL.
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
    """When the step under way is to be given up for the copy in memory.

    A step that will not have ended by the last moment is given up at once: what is left is better spent
    on writing. Its checkpoint has as many bytes as the copy, and so needs the same time.

    Args:
        step_seconds: as measured before; None: unknown, so the last moment decides.
    """
    latest = last_moment(until, copy_bytes, places)
    if latest <= now or (step_seconds is not None and step_began + step_seconds > latest):
        return now
    return latest


class StepPace:
    """How long steps take, as seen on the board every now and then."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """None: not two steps have been seen to end yet."""
        self.began = 0.0
        """When the step under way began, about; 0: none has ended yet."""
        self._done: int | None = None

    def see(self, positions: Iterable[Position]) -> None:
        """Take note of where the ranks stand."""
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
    """What to write when all nodes' ranks are gone: the newest moment that they hold together, and who what.

    Args:
        world_size: of the newest generation.
        nodes: those that are still here, by a name: their own ranks, and all images that they hold.
        by_step: as of `newest_whole`.

    Returns:
        the moment; how many ranks then were; and by node the ranks whose images it writes: its own where it
        can, else any node's that holds a copy; only of nodes that write any. None: they hold no moment of
        all ranks.
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
