"""Replication of this rank's memory files to its partner node, and memory for those of backed-up ranks."""

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
"""Core seconds of an exchange relative to this thread's own, Gloo's thread included.

Measured on loopback with 256 MB each way (0.07 of 0.2 s).
"""
CHUNK_SECONDS = 0.02
"""Maximum time that training waits behind one message of an exchange that yields."""
YIELD_SHARE = 0.01
"""Maximum share of the time for messages when training never leaves the link free."""
LONGEST_YIELD_SECONDS = 5.0
"""Maximum pause between two messages: below the other side's timeout."""
_POLL_SECONDS = 0.002


class Partner:
    """Exchange of each in-memory checkpoint with other nodes, in two files per backed-up rank used in turn.

    If no rank begins an in-memory checkpoint before all have finished the exchange of the one before, there
    is always one step of which every rank's memory file is complete on its own node and on its partner.

    Args:
        images: paths of the memory files; this rank stores those of its `guests`.
        rank: this rank.
        ranks_by_node: number of ranks of each node.
        group: Gloo process group of all ranks, used by nothing else, because this runs beside the training.
        is_busy: returns True while training communicates, which an exchange lets pass; None: the exchange
            takes its share of the link at any time.

    Raises:
        WanmaError: a file for backed-up ranks cannot be opened.
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
        """Reason why replication has stopped; empty: it works."""
        self.processor_seconds = 0.0
        """Estimated core seconds of the last exchange."""
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
        """Send this rank's memory file and receive those of backed-up ranks.

        Runs in a thread, on all ranks; never raises.


        Args:
            path: this rank's memory file; None: it has none, but receives the others'.
        """
        began = time.thread_time()
        talks = [send_image(path, self._rank, self._host, self._group, self._chunk_bytes)]
        talks += [receive_image(files[0], guest, guest, self._group) for guest, files in self._guests.items()]
        try:
            problems = self._converse(talks)
        except Exception as error:  # the thread has no caller: the waiting one reads `problem`
            problems = [f"the exchange with other nodes broke off: {error}"]
        if problems:
            self.problem = self.problem or "; ".join(problems)
        else:
            for files in self._guests.values():
                files.reverse()
        self.processor_seconds = _WITH_GLOO * (time.thread_time() - began)

    def _converse(self, talks: Sequence[Talk]) -> list[str]:
        """Run the transfers, yield the link to training, and choose the chunk size of the next exchange."""
        if self._is_busy is None:
            return converse(talks)
        rounds: list[float] = []
        ended = time.perf_counter()

        def let_pass() -> None:
            """Measure the round that has just ended, and wait while training communicates."""
            nonlocal ended
            now = time.perf_counter()
            took = now - ended
            rounds.append(took)
            latest = now + min(took / YIELD_SHARE, LONGEST_YIELD_SECONDS)
            while self._is_busy is not None and self._is_busy() and time.perf_counter() < latest:
                time.sleep(_POLL_SECONDS)
            ended = time.perf_counter()

        problems = converse(talks, let_pass)
        full = sorted(rounds[3:-1])  # without the header, the answer, and a chunk that may be short
        if full and full[len(full) // 2] > 0:
            wanted = self._chunk_bytes * CHUNK_SECONDS / full[len(full) // 2]
            self._chunk_bytes = int(min(max(wanted, LEAST_CHUNK_BYTES), CHUNK_BYTES))
        return problems

    @property
    def taken_bytes(self) -> int:
        """Memory in bytes that the files of backed-up ranks occupy."""
        return sum(file.taken_bytes for files in self._guests.values() for file in files)

    def close(self) -> None:
        for file in (one for files in self._guests.values() for one in files):
            file.close()
        self._guests = {}
