"""Parts of one in-memory checkpoint, each on the disk of the node that held it.

    write_flushed_part(folder, files)  on each node, where `folder` takes no checkpoint
    list_flushed_parts(folder)         on each node, at the next start

A part is a folder in a fallback folder (`checkpoint.store.fallback_folder`) with some ranks' memory files.
From the parts of all ranks `flush_to_disk` writes a checkpoint as soon as `folder` has room.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wanma.checkpoint.format.manifest import step_folder_name
from wanma.checkpoint.in_memory.flush import open_verified_memory_file
from wanma.checkpoint.in_memory.memory_file import HEADER_BYTES, MemoryFileHeader, read_header
from wanma.checkpoint.save.file_writer import write_file
from wanma.checkpoint.store.checkpoint_folder import sync_folder
from wanma.checkpoint.store.fallback_folder import create_fallback_folder, fallback_folders, is_own_folder
from wanma.job.errors import WanmaError, ranks_text

_NAME = re.compile(r"part-step-\d{8,}-\d+-\d{5}(\.writing)?")


@dataclass(frozen=True)
class InMemoryCheckpointKey:
    """Identity of an in-memory checkpoint: step, generation and number of ranks."""

    step: int
    generation: int
    world_size: int


@dataclass(frozen=True)
class FlushedPart:
    """Folder of memory files, all of one in-memory checkpoint."""

    path: Path
    checkpoint_key: InMemoryCheckpointKey
    memory_files: Mapping[int, Path]
    """Files by rank; their content is not verified."""


def write_flushed_part(folder: Path, memory_files: Mapping[int, str]) -> Path:
    """Copy memory files to the first fallback folder with room, durably and completely or not at all.

    Args:
        folder: the run's checkpoint folder.
        memory_files: paths by rank; all of one in-memory checkpoint.

    Returns:
        The part's folder.

    Raises:
        WanmaError: a memory file is damaged, or no fallback folder has room.
    """
    readers = {rank: open_verified_memory_file(path, rank) for rank, path in memory_files.items()}
    first = min(readers)
    head = readers[first].header
    name = f"part-{step_folder_name(head.step)}-{head.generation}-{first:05d}"
    failures = []
    for fallback in fallback_folders(folder):
        unfinished = fallback / f"{name}.writing"
        try:
            create_fallback_folder(fallback)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            for rank, reader in readers.items():
                header_page = reader.header.pack().ljust(HEADER_BYTES, b"\0")
                write_file(unfinished / f"image-{rank:05d}", memoryview(header_page), reader.body)
            sync_folder(unfinished)
            final = fallback / name
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            sync_folder(fallback)
            return final
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            failures.append(
                f"{fallback}: {error.strerror or errno.errorcode.get(error.errno or 0, str(error))}"
            )
    raise WanmaError(
        f"the in-memory checkpoints of step {head.step}, {ranks_text(sorted(readers))}, cannot be written to "
        f"any folder: {'; '.join(failures)}",
        f"free space on {folder}",
    )


def list_flushed_parts(folder: Path) -> list[FlushedPart]:
    """List the complete parts in the fallback folders of `folder` on this node."""
    parts = []
    for fallback in fallback_folders(folder):
        for path in sorted(fallback.iterdir()) if is_own_folder(fallback) else []:
            match = _NAME.fullmatch(path.name)
            if match and match[1] is None and (part := _read_part(path)) is not None:
                parts.append(part)
    return parts


def remove_flushed_parts(folder: Path, last_step: int) -> None:
    """Remove the parts of steps up to `last_step`, and unfinished ones."""
    for fallback in fallback_folders(folder):
        if not is_own_folder(fallback):
            continue
        for path in list(fallback.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (match[1] is not None or int(path.name.split("-")[2]) <= last_step):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty
            fallback.rmdir()


def _read_part(path: Path) -> FlushedPart | None:
    heads: dict[int, tuple[MemoryFileHeader, Path]] = {}
    for file in path.glob("image-*"):
        with contextlib.suppress(OSError):
            if (head := read_header(str(file))) is not None and head.is_complete:
                heads[head.rank] = head, file
    keys = {InMemoryCheckpointKey(head.step, head.generation, head.world_size) for head, _ in heads.values()}
    if len(keys) != 1:
        return None
    return FlushedPart(path, keys.pop(), {rank: file for rank, (_, file) in heads.items()})
