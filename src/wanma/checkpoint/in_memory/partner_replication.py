"""Replication of this rank's memory files to its partner node, and memory for those of backed-up ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from wanma.checkpoint.in_memory.file_transfer import (
    CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    TransferSteps,
    receive_memory_file,
    run_transfers,
    send_memory_file,
)
from wanma.checkpoint.in_memory.memory_file import MemoryFileWriter
from wanma.checkpoint.in_memory.partner_ring import backup_rank_of
from wanma.job.errors import WanmaError
from wanma.job.run.worker import MemoryFilePaths

_GLOO_CPU_FACTOR = 3
"""Core seconds of an exchange relative to this thread's own, Gloo's thread included.

Measured on loopback with 256 MB each way (0.07 of 0.2 s).
"""
MAX_CHUNK_SECONDS = 0.02
"""Maximum time that training waits behind one message of an exchange that yields."""
MIN_LINK_SHARE = 0.01
"""Maximum share of the time for messages when training never leaves the link free."""
MAX_YIELD_SECONDS = 5.0
"""Maximum pause between two messages: below the other side's timeout."""
_POLL_SECONDS = 0.002


class PartnerReplicator:
    """Exchange of each in-memory checkpoint with other nodes, in two files per backed-up rank used in turn.

    If no rank begins an in-memory checkpoint before all have finished the exchange of the one before, there
    is always one step of which every rank's memory file is complete on its own node and on its partner.

    Args:
        memory_files: paths of the memory files; this rank stores those at its `backup_paths`.
        rank: this rank.
        local_world_sizes: number of ranks of each node.
        group: Gloo process group of all ranks, used by nothing else, because this runs beside the training.
        is_busy: returns True while training communicates, which an exchange lets pass; None: the exchange
            takes its share of the link at any time.

    Raises:
        WanmaError: a file for backed-up ranks cannot be opened.
    """

    def __init__(
        self,
        memory_files: MemoryFilePaths,
        rank: int,
        local_world_sizes: Sequence[int],
        group: dist.ProcessGroup,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self.failure_reason = ""
        """Reason why replication has stopped; empty: it works."""
        self.cpu_seconds = 0.0
        """Estimated core seconds of the last exchange."""
        self._rank, self._group, self._is_busy = rank, group, is_busy
        self._chunk_bytes = MIN_CHUNK_BYTES if is_busy is not None else CHUNK_BYTES
        self._backup_rank = backup_rank_of(rank, local_world_sizes)
        try:
            self._backed_up_files = {
                owner: [MemoryFileWriter(path) for path in paths]
                for owner, paths in memory_files.backup_paths.items()
            }
        except OSError as error:
            raise WanmaError(
                f"rank {rank} cannot open memory files for the in-memory checkpoints of its partner node: "
                f"{error}"
            ) from error

    def replicate(self, path: str | None) -> None:
        """Send this rank's memory file and receive those of backed-up ranks.

        Runs in a thread, on all ranks; never raises.


        Args:
            path: this rank's memory file; None: it has none, but receives the others'.
        """
        start_time = time.thread_time()
        transfers = [send_memory_file(path, self._rank, self._backup_rank, self._group, self._chunk_bytes)]
        transfers += [
            receive_memory_file(files[0], owner, owner, self._group)
            for owner, files in self._backed_up_files.items()
        ]
        try:
            problems = self._run_transfers(transfers)
        except Exception as error:  # the thread has no caller: the waiting one reads `failure_reason`
            problems = [f"the exchange with the partner node failed: {error}"]
        if problems:
            self.failure_reason = self.failure_reason or "; ".join(problems)
        else:
            for files in self._backed_up_files.values():
                files.reverse()
        self.cpu_seconds = _GLOO_CPU_FACTOR * (time.thread_time() - start_time)

    def _run_transfers(self, transfers: Sequence[TransferSteps]) -> list[str]:
        """Run the transfers, yield the link to training, and choose the chunk size of the next exchange."""
        if self._is_busy is None:
            return run_transfers(transfers)
        rounds: list[float] = []
        round_start = time.perf_counter()

        def let_pass() -> None:
            """Measure the round that has just ended, and wait while training communicates."""
            nonlocal round_start
            now = time.perf_counter()
            round_seconds = now - round_start
            rounds.append(round_seconds)
            deadline = now + min(round_seconds / MIN_LINK_SHARE, MAX_YIELD_SECONDS)
            while self._is_busy is not None and self._is_busy() and time.perf_counter() < deadline:
                time.sleep(_POLL_SECONDS)
            round_start = time.perf_counter()

        problems = run_transfers(transfers, let_pass)
        full_rounds = sorted(rounds[3:-1])  # without the header, the answer, and a chunk that may be short
        if full_rounds and full_rounds[len(full_rounds) // 2] > 0:
            chunk_bytes = self._chunk_bytes * MAX_CHUNK_SECONDS / full_rounds[len(full_rounds) // 2]
            self._chunk_bytes = int(min(max(chunk_bytes, MIN_CHUNK_BYTES), CHUNK_BYTES))
        return problems

    @property
    def allocated_bytes(self) -> int:
        """Memory in bytes that the files of backed-up ranks occupy."""
        return sum(file.allocated_bytes for files in self._backed_up_files.values() for file in files)

    def close(self) -> None:
        for file in (file for files in self._backed_up_files.values() for file in files):
            file.close()
        self._backed_up_files = {}
