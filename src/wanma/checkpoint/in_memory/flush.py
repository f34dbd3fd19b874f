"""Flush of an in-memory checkpoint to disk, for ranks that have to end before they can save.

    rescue(folder, images, world_size, "1-rescue", deadline)      # in one torch-free process per node

A memory file has the content of its rank's file in a checkpoint, so this copies, and divides among the nodes
what several of them hold. The processes meet in the folder being written, as ranks do at a save.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import (
    DTYPE_BYTES,
    MANIFEST_FILE,
    build_header,
    data_file_name,
    dump_json,
    parse_header,
    step_folder_name,
)
from wanma.checkpoint.in_memory.memory_file import MemoryFileReader
from wanma.checkpoint.save.commit import commit_checkpoint
from wanma.checkpoint.save.commit_session import CommitSession
from wanma.checkpoint.save.file_writer import write_file
from wanma.checkpoint.store.checkpoint_folder import (
    NOT_SAVED,
    list_committed,
    list_partial,
    read_manifest,
    remove_partial,
)
from wanma.checkpoint.store.fallback_folder import create_fallback_folder, fallback_folders
from wanma.job.errors import WanmaError

WRITER_THREADS = 4
"""Number of files that one node writes at once."""

RankManifest = dict[str, Any]
"""Rank manifest: one rank's boxes of each tensor, and its own state."""


def flush_to_disk(
    folder: Path, memory_files: Mapping[int, str], world_size: int, name: str, deadline: float
) -> Path | None:
    """Write this node's part of the checkpoint; the node with rank 0's memory file commits it.

    Args:
        folder: the run's checkpoint folder, shared by all nodes.
        memory_files: paths of the memory files that this node writes, by rank; all of one step.
        world_size: number of ranks that left memory files, on all nodes; each is written by one node.
        name: unique name of this save in the run; the same on all nodes.
        deadline: on the monotonic clock, in seconds.

    Returns:
        The committed checkpoint; None on the nodes that do not commit.

    Raises:
        WanmaError: a memory file is damaged, the disk failed, or other nodes did not write theirs in time.
    """
    readers = {rank: open_verified_memory_file(path, rank) for rank, path in memory_files.items()}
    step = next(iter(readers.values())).header.step
    if (newer_checkpoint := _find_newer(folder, step)) is not None:
        return newer_checkpoint if 0 in readers else None
    partial = folder / f"{step_folder_name(step)}.partial-{name}"
    try:
        return _write(partial, step, readers, world_size, deadline)
    except OSError as error:
        raise WanmaError(
            f"the checkpoint of step {step} {NOT_SAVED}: {error.strerror or error} ({folder})",
            f"free space on {folder}, or check its permissions",
        ) from error


def flush_with_fallback(
    folder: Path, memory_files: Mapping[int, str], world_size: int, name: str, deadline: float
) -> Path | None:
    """Flush as `rescue`; if `folder` is full and this node has all memory files, to a fallback folder.

    Raises:
        WanmaError: as of `rescue`; of `folder` if no fallback folder is usable.
    """
    try:
        return flush_to_disk(folder, memory_files, world_size, name, deadline)
    except WanmaError as error:
        if len(memory_files) < world_size or not isinstance(error.__cause__, OSError):
            raise
        for fallback in fallback_folders(folder):
            with contextlib.suppress(OSError, WanmaError):
                create_fallback_folder(fallback)
                remove_partial(fallback)
                return flush_to_disk(fallback, memory_files, world_size, name, deadline)
        raise


def remove_failed_flush(folder: Path, name: str, ranks: Iterable[int]) -> None:
    """Remove these ranks' files of an unfinished `rescue` of that name, whose process is gone."""
    for _, partial in list_partial(folder):
        if not partial.name.endswith(f".partial-{name}"):
            continue
        for rank in ranks:
            manifest = [partial / MANIFEST_FILE] if rank == 0 else []
            for path in [*partial.rglob(f"*-{rank:05d}.*"), *manifest]:
                path.unlink(missing_ok=True)
        for location in (partial / "held", partial):
            with contextlib.suppress(OSError):  # other nodes' files are still there
                location.rmdir()


def _write(
    partial: Path, step: int, memory_files: Mapping[int, MemoryFileReader], world_size: int, deadline: float
) -> Path | None:
    tables = {rank: reader.rank_manifest() for rank, reader in memory_files.items()}
    first = min(memory_files)
    seconds = max(deadline - time.monotonic(), 0.1)
    manifest_sessions = [CommitSession(partial / "held", rank, world_size, seconds) for rank in memory_files]
    write_sessions = [CommitSession(partial, rank, world_size, seconds) for rank in memory_files]
    try:
        for session, rank in zip(manifest_sessions, memory_files, strict=True):
            session.create_folder()
            session.publish(tables[rank])
        shares = assign_tensors(manifest_sessions[0].gather())
        with ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="rescue") as threads:
            parts = {
                rank: threads.submit(_write_part, partial, tables[rank], reader, shares[rank])
                for rank, reader in memory_files.items()
            }
            for session, part in zip(write_sessions, parts.values(), strict=True):
                session.create_folder()
                session.publish(part.result())
        if first != 0:
            return None
        write_sessions[0].gather()
        shutil.rmtree(partial / "held")
        state = dump_json(tables[0]["state"], "the training state")
        path, _ = commit_checkpoint(partial, write_sessions[0], step, None, state)
        return path
    except (OSError, WanmaError) as error:
        if len(memory_files) == world_size:  # no other node writes
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for rank in memory_files:  # their space may be what other nodes lack
            (partial / data_file_name(rank)).unlink(missing_ok=True)
        for session in (manifest_sessions[0], write_sessions[0]):
            session.abort(f"the node of rank {first}: {error}")
        raise


def assign_tensors(rank_manifests: Iterable[RankManifest]) -> dict[int, set[str]]:
    """Divide the boxes that several ranks hold: return, by rank, the names of the tensors that it writes.

    Boxes of a single holder come first, then large ones before small ones, each to the holder with the fewest
    bytes so far; so every node computes the same.
    """
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    sizes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    bytes_of: dict[int, int] = {}
    for table in rank_manifests:
        bytes_of[table["rank"]] = 0
        for name, (dtype, _, offset, part) in table["tensors"].items():
            box = (name, tuple(offset), tuple(part))
            holders.setdefault(box, []).append(table["rank"])
            sizes[box] = DTYPE_BYTES[dtype]
            for size in part:
                sizes[box] *= size
    shares: dict[int, set[str]] = {rank: set() for rank in bytes_of}
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -sizes[box], box)):
        rank = min(holders[box], key=lambda rank: (bytes_of[rank], rank))
        bytes_of[rank] += sizes[box]
        shares[rank].add(box[0])
    return shares


def _write_part(
    partial: Path, rank_manifest: RankManifest, memory_file: MemoryFileReader, tensor_names: set[str]
) -> RankManifest:
    """Write this rank's data file; return the rank manifest of the written part."""
    selected = {name: entry for name, entry in rank_manifest["tensors"].items() if name in tensor_names}
    name = data_file_name(memory_file.header.rank)
    file = None
    if selected:
        parts = (
            [memory_file.content]
            if len(selected) == len(rank_manifest["tensors"])
            else list(_select_tensors(memory_file.content, selected))
        )
        digest = write_file(partial / name, *parts)
        file = {"name": name, "bytes": sum(map(len, parts)), "sha256": digest}
    return {
        "rank": memory_file.header.rank,
        "rank_state_json": rank_manifest["rank_state_json"],
        "tensors": selected,
        "file": file,
    }


def _select_tensors(content: memoryview, selected: Mapping[str, Any]) -> Iterator[memoryview]:
    """Yield the parts of a safetensors file that holds only the `selected` tensors of `content`."""
    saved_regions = parse_header(content, len(content))
    header, regions = build_header(
        {name: (saved_regions[name].dtype, saved_regions[name].shape) for name in selected}
    )
    yield memoryview(header)
    for name in regions:  # in the order of the file
        yield content[saved_regions[name].start : saved_regions[name].stop]


def open_verified_memory_file(path: str, rank: int) -> MemoryFileReader:
    """Open the memory file at `path` and verify its content.

    Raises:
        WanmaError: it is no memory file, or it is damaged.
    """
    try:
        reader = MemoryFileReader(path)
    except (OSError, ValueError) as error:
        raise WanmaError(f"the in-memory checkpoint of rank {rank} cannot be read: {error}") from error
    if not reader.is_valid():
        raise WanmaError(
            f"the in-memory checkpoint of rank {rank} is damaged: its content differs from its hash"
        )
    return reader


def _find_newer(folder: Path, step: int) -> Path | None:
    """Return the newest readable checkpoint if it is of `step` or later; None otherwise."""
    for saved_step, path in list_committed(folder):
        if saved_step < step:
            break
        try:
            read_manifest(path)
        except WanmaError:
            continue
        return path
    return None
