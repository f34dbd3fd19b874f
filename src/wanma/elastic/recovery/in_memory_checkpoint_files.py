"""Files in memory that hold the in-memory checkpoints of a node's ranks; they outlive the ranks.

With several nodes they also hold those of guests: ranks of another node, which send them here
(`checkpoint.in_memory.partner_ring`). Their content is defined by `checkpoint.in_memory.memory_file`: here
only their headers are read.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence

from wanma.checkpoint.in_memory.memory_file import MemoryFileHeader, read_header
from wanma.checkpoint.in_memory.partner_ring import backed_up_ranks
from wanma.elastic.protocol.messages import InMemoryCheckpointId, InMemoryCheckpointShard
from wanma.job.errors import WanmaError


class InMemoryCheckpointFiles:
    """Pairs of files, held by this node's supervisor; one of each pair is always complete.

    There is one pair for each rank, one for each rank of another node that is kept here, and the pairs to
    restore from.

    Args:
        ranks: number of this node's ranks at first.

    Raises:
        WanmaError: the system allows fewer open files.
    """

    def __init__(self, ranks: int) -> None:
        self._pairs: list[tuple[int, ...]] = []
        try:
            while len(self._pairs) < ranks:
                self._pairs.append(_new_pair())
        except OSError as error:
            self.close()
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise WanmaError(
                f"{ranks:,} ranks on one node need more open files than this system allows ({limit:,})",
                "start fewer ranks, or raise the limit with `ulimit -n`",
            ) from None
        self._backup_pair_by_rank: dict[int, int] = {}
        """Index of the pair of each rank of another node."""

    def allocate(
        self, ranks: int, backed_up_ranks: Sequence[int], restore: InMemoryCheckpointId | None
    ) -> None:
        """Provide a pair for each rank of this node and each guest, and drop the pairs that are not needed.

        Args:
            ranks: number of this node's ranks.
            backed_up_ranks: ranks of another node whose in-memory checkpoints this one keeps.
            restore: in-memory checkpoint that the new ranks restore, which stays wherever it is.
        """
        pair_count = ranks + len(backed_up_ranks)
        while len(self._pairs) < pair_count:
            self._pairs.append(_new_pair())
        for pair in self._pairs[pair_count:]:
            if not any(_holds_checkpoint(descriptor, restore) for descriptor in pair):
                self._pairs.remove(pair)
                _close(pair)
        self._backup_pair_by_rank = {rank: ranks + index for index, rank in enumerate(backed_up_ranks)}

    def list_complete_shards(self) -> tuple[InMemoryCheckpointShard, ...]:
        """Return the complete in-memory checkpoints, of this node's ranks and of guests."""
        heads = map(_read_complete_header, self._descriptors())
        return tuple(
            InMemoryCheckpointShard(head.rank, _checkpoint_id(head), head.world_size)
            for head in heads
            if head is not None
        )

    def get_write_paths(self, local_rank: int, restore: InMemoryCheckpointId | None) -> tuple[str, ...]:
        """Return the paths in the order in which a rank writes them; the one to restore from is last."""
        return _write_order(self._pairs[local_rank], restore)

    def get_backup_paths(
        self, rank: int, local_world_sizes: Sequence[int], restore: InMemoryCheckpointId | None
    ) -> dict[str, tuple[str, ...]]:
        """Return the guests of `rank` → their paths, in the order of `get_write_paths`."""
        ranks = backed_up_ranks(rank, local_world_sizes)
        return {
            str(backed_up_rank): _write_order(self._pairs[self._backup_pair_by_rank[backed_up_rank]], restore)
            for backed_up_rank in ranks
        }

    def get_restore_paths(self, restore: InMemoryCheckpointId | None) -> dict[str, tuple[str, ...]]:
        """Return rank → paths of its files of that in-memory checkpoint."""
        paths: dict[str, tuple[str, ...]] = {}
        for descriptor in self._descriptors():
            head = _read_complete_header(descriptor)
            if head is not None and _checkpoint_id(head) == restore:
                paths[str(head.rank)] = (*paths.get(str(head.rank), ()), _path(descriptor))
        return paths

    def measure_checkpoint_bytes(self) -> int:
        """Return the bytes of one in-memory checkpoint of this node; 0: some rank has none yet."""
        pairs = [
            [head.content_bytes for head in map(_read_complete_header, pair) if head is not None]
            for pair in self._pairs
        ]
        return sum(map(max, pairs)) if all(pairs) else 0

    def close(self) -> None:
        for pair in self._pairs:
            _close(pair)

    def _descriptors(self) -> Iterator[int]:
        return (descriptor for pair in self._pairs for descriptor in pair)


def _new_pair() -> tuple[int, ...]:
    return tuple(os.memfd_create("wanma-image", os.MFD_CLOEXEC) for _ in range(2))


def _close(pair: tuple[int, ...]) -> None:
    for descriptor in pair:
        os.close(descriptor)


def _write_order(pair: tuple[int, ...], restore: InMemoryCheckpointId | None) -> tuple[str, ...]:
    return tuple(map(_path, sorted(pair, key=lambda descriptor: _holds_checkpoint(descriptor, restore))))


def _read_complete_header(descriptor: int) -> MemoryFileHeader | None:
    head = read_header(descriptor)
    return head if head is not None and head.is_complete else None


def _checkpoint_id(head: MemoryFileHeader) -> InMemoryCheckpointId:
    return InMemoryCheckpointId(head.generation, head.step)


def _holds_checkpoint(descriptor: int, checkpoint_id: InMemoryCheckpointId | None) -> bool:
    head = _read_complete_header(descriptor)
    return head is not None and _checkpoint_id(head) == checkpoint_id


def _path(descriptor: int) -> str:
    """Return the path by which other processes of this user open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
