"""Files in memory for snapshots, as a supervisor holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from wanma.checkpoint.in_memory.memory_file import MemoryFileHeader, read_header
from wanma.job.run.worker import MemoryFilePaths


class Held:
    """Two files for each of some ranks; they live as long as this object, or the test process."""

    def __init__(self, ranks: int) -> None:
        self.pairs = [(_file(), _file()) for _ in range(ranks)]

    def __del__(self) -> None:
        for descriptor in (one for pair in self.pairs for one in pair):
            os.close(descriptor)

    def images(self, rank: int, found: Held | None = None, step: int | None = None) -> MemoryFilePaths:
        """Instructions of `rank`: to write here, and to take up `step` of the files in `found`."""
        one, other = map(_path, self.pairs[rank])
        if found is None:
            return MemoryFilePaths((one, other))
        paths = {rank: tuple(map(_path, pair)) for rank, pair in enumerate(found.pairs)}
        return MemoryFilePaths((one, other), paths, step)

    def heads(self, rank: int) -> list[MemoryFileHeader]:
        """Complete in-memory checkpoints, newest first."""
        heads = (read_header(descriptor) for descriptor in self.pairs[rank])
        return sorted((head for head in heads if head and head.is_complete), key=lambda head: -head.step)

    def steps(self) -> set[int]:
        """Steps of which every rank has an in-memory checkpoint."""
        ranks = range(len(self.pairs))
        return set.intersection(*({head.step for head in self.heads(rank)} for rank in ranks))

    def flip(self, rank: int, step: int, offset: int) -> None:
        """Damage one bit of a content."""
        (descriptor,) = (
            one for one in self.pairs[rank] if (head := read_header(one)) is not None and head.step == step
        )
        byte = os.pread(descriptor, 1, offset)[0]
        os.pwrite(descriptor, bytes([byte ^ 4]), offset)


def workers(held: Held, ranks: Iterable[int], **fields: object) -> dict[int, dict[str, object]]:
    """For `run_job`."""
    return {rank: {"memory_files": held.images(rank), **fields} for rank in ranks}


def _file() -> int:
    return os.memfd_create("wanma-test", os.MFD_CLOEXEC)


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
