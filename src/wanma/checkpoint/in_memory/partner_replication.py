"""Copies of this rank's images on another node, and this node's files for the images of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from wanma.checkpoint.in_memory.file_transfer import (
    CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    Talk,
    converse,
    receive_image,
    send_image,
)
from wanma.checkpoint.in_memory.memory_file import ImageFile
from wanma.checkpoint.in_memory.partner_ring import host_of
from wanma.job.errors import WanmaError
from wanma.job.run.worker import Images

_WITH_GLOO = 3
"""Times this thread's own share of a core, that an exchange takes with Gloo's thread: measured on loopback
with 256 MB each way (0.07 of 0.2 s)."""
CHUNK_SECONDS = 0.02
"""Longest that training waits behind one message of an exchange that yields."""
YIELD_SHARE = 0.01
"""Share of the time that messages take at most while training never leaves the link to them."""
LONGEST_YIELD_SECONDS = 5.0
"""Between two messages: the other side's patience is longer."""
_POLL_SECONDS = 0.002


class Partner:
    """What one rank sends and takes for each snapshot, in two files for each guest that are used in turn.

    If no rank begins a snapshot before all have finished their exchange of the one before, there is
    always one step of which every rank's image is whole both on its own node and on its partner.

    Args:
        images: whose `guests` this rank takes.
        ranks_by_node: how many ranks each node has.
        group: of all ranks, with Gloo; nothing else uses it, for this happens beside the training.
        is_busy: whether training has something under way to other ranks, which an exchange lets pass; None:
            it takes its share of the link at any time.

    Raises:
        WanmaError: a file for guests cannot be opened.
    """

    def __init__(
        self,
        images: Images,
        rank: int,
        ranks_by_node: Sequence[int],
        group: dist.ProcessGroup,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self.problem = ""
        """Why there are no copies any more; empty while there are."""
        self.processor_seconds = 0.0
        """Of a core, that the last exchange took, about."""
        self._rank, self._group, self._is_busy = rank, group, is_busy
        self._chunk_bytes = LEAST_CHUNK_BYTES if is_busy is not None else CHUNK_BYTES
        self._host = host_of(rank, ranks_by_node)
        try:
            self._guests = {
                guest: [ImageFile(path) for path in paths] for guest, paths in images.guests.items()
            }
        except OSError as error:
            raise WanmaError(
                f"rank {rank} cannot open the memory for other nodes' snapshots: {error}"
            ) from error

    def exchange(self, path: str | None) -> None:
        """Send this rank's image and take those of the guests; in a thread, on all ranks. Never raises.

        Args:
            path: None: this rank has made none. The others' come all the same.
        """
        began = time.thread_time()
        talks = [send_image(path, self._rank, self._host, self._group, self._chunk_bytes)]
        talks += [receive_image(files[0], guest, guest, self._group) for guest, files in self._guests.items()]
        try:
            problems = self._converse(talks)
        except Exception as error:  # a thread has nobody to raise to: whoever waits for it reads `problem`
            problems = [f"the exchange with other nodes broke off: {error}"]
        if problems:
            self.problem = self.problem or "; ".join(problems)
        else:
            for files in self._guests.values():
                files.reverse()
        self.processor_seconds = _WITH_GLOO * (time.thread_time() - began)

    def _converse(self, talks: Sequence[Talk]) -> list[str]:
        """Let training pass, and choose how much the messages of the next exchange carry."""
        if self._is_busy is None:
            return converse(talks)
        rounds: list[float] = []
        ended = time.perf_counter()

        def let_pass() -> None:
            """Measure the round that has just ended, and wait until training has nothing under way."""
            nonlocal ended
            now = time.perf_counter()
            took = now - ended
            rounds.append(took)
            latest = now + min(took / YIELD_SHARE, LONGEST_YIELD_SECONDS)
            while self._is_busy is not None and self._is_busy() and time.perf_counter() < latest:
                time.sleep(_POLL_SECONDS)
            ended = time.perf_counter()

        problems = converse(talks, let_pass)
        full = sorted(rounds[3:-1])  # without the head, the answer, and a chunk that may be short
        if full and full[len(full) // 2] > 0:
            wanted = self._chunk_bytes * CHUNK_SECONDS / full[len(full) // 2]
            self._chunk_bytes = int(min(max(wanted, LEAST_CHUNK_BYTES), CHUNK_BYTES))
        return problems

    @property
    def taken_bytes(self) -> int:
        """Memory that the guests' files take."""
        return sum(file.taken_bytes for files in self._guests.values() for file in files)

    def close(self) -> None:
        for file in (one for files in self._guests.values() for one in files):
            file.close()
        self._guests = {}
