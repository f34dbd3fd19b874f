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
    ITEM_BYTES,
    MANIFEST,
    build_header,
    data_file,
    parse_header,
    step_name,
    to_json,
)
from wanma.checkpoint.in_memory.memory_file import FoundImage
from wanma.checkpoint.save.commit import commit
from wanma.checkpoint.save.commit_session import Meeting
from wanma.checkpoint.save.file_writer import write_file
from wanma.checkpoint.store.checkpoint_folder import NOT_SAVED, clean, committed, read_manifest, unfinished
from wanma.checkpoint.store.fallback_folder import open_refuge, refuges
from wanma.job.errors import WanmaError

THREADS = 4
"""Number of files that one node writes at once."""

Table = dict[str, Any]
"""Rank manifest: one rank's boxes of each tensor, and its own state."""


def rescue(
    folder: Path, images: Mapping[int, str], world_size: int, name: str, deadline: float
) -> Path | None:
    """Write this node's part of the checkpoint; the node with rank 0's memory file commits it.

    Args:
        folder: the run's checkpoint folder, shared by all nodes.
        images: paths of the memory files that this node writes, by rank; all of one step.
        world_size: number of ranks that left memory files, on all nodes; each is written by one node.
        name: unique name of this save in the run; the same on all nodes.
        deadline: on the monotonic clock, in seconds.

    Returns:
        The committed checkpoint; None on the nodes that do not commit.

    Raises:
        WanmaError: a memory file is damaged, the disk failed, or other nodes did not write theirs in time.
    """
    found = {rank: whole_image(path, rank) for rank, path in images.items()}
    step = next(iter(found.values())).head.step
    if (newer := _newer(folder, step)) is not None:
        return newer if 0 in found else None
    partial = folder / f"{step_name(step)}.partial-{name}"
    try:
        return _write(partial, step, found, world_size, deadline)
    except OSError as error:
        raise WanmaError(
            f"the checkpoint of step {step} {NOT_SAVED}: {error.strerror or error} ({folder})",
            f"free space on {folder}, or check its permissions",
        ) from error


def rescue_anywhere(
    folder: Path, images: Mapping[int, str], world_size: int, name: str, deadline: float
) -> Path | None:
    """Flush as `rescue`; if `folder` is full and this node has all memory files, to a fallback folder.

    Raises:
        WanmaError: as of `rescue`; of `folder` if no fallback folder is usable.
    """
    try:
        return rescue(folder, images, world_size, name, deadline)
    except WanmaError as error:
        if len(images) < world_size or not isinstance(error.__cause__, OSError):
            raise
        for place in refuges(folder):
            with contextlib.suppress(OSError, WanmaError):
                open_refuge(place)
                clean(place)
                return rescue(place, images, world_size, name, deadline)
        raise


def drop_attempt(folder: Path, name: str, ranks: Iterable[int]) -> None:
    """Remove these ranks' files of an unfinished `rescue` of that name, whose process is gone."""
    for _, partial in unfinished(folder):
        if not partial.name.endswith(f".partial-{name}"):
            continue
        for rank in ranks:
            manifest = [partial / MANIFEST] if rank == 0 else []
            for path in [*partial.rglob(f"*-{rank:05d}.*"), *manifest]:
                path.unlink(missing_ok=True)
        for place in (partial / "held", partial):
            with contextlib.suppress(OSError):  # other nodes' files are still there
                place.rmdir()


def _write(
    partial: Path, step: int, found: Mapping[int, FoundImage], world_size: int, deadline: float
) -> Path | None:
    tables = {rank: image.table() for rank, image in found.items()}
    first = min(found)
    seconds = max(deadline - time.monotonic(), 0.1)
    held = [Meeting(partial / "held", rank, world_size, seconds) for rank in found]
    written = [Meeting(partial, rank, world_size, seconds) for rank in found]
    try:
        for meeting, rank in zip(held, found, strict=True):
            meeting.open()
            meeting.post(tables[rank])
        shares = share_out(held[0].collect())
        with ThreadPoolExecutor(THREADS, thread_name_prefix="rescue") as threads:
            parts = {
                rank: threads.submit(_write_part, partial, tables[rank], image, shares[rank])
                for rank, image in found.items()
            }
            for meeting, part in zip(written, parts.values(), strict=True):
                meeting.open()
                meeting.post(part.result())
        if first != 0:
            return None
        written[0].collect()
        shutil.rmtree(partial / "held")
        state = to_json(tables[0]["state"], "the training state")
        path, _ = commit(partial, written[0], step, None, state)
        return path
    except (OSError, WanmaError) as error:
        if len(found) == world_size:  # nobody else writes
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for rank in found:  # their space may be what other nodes lack
            (partial / data_file(rank)).unlink(missing_ok=True)
        for meeting in (held[0], written[0]):
            meeting.fail(f"the node of rank {first}: {error}")
        raise


def share_out(tables: Iterable[Table]) -> dict[int, set[str]]:
    """Divide the boxes that several ranks hold: return, by rank, the names of the tensors that it writes.

    Boxes of a single holder come first, then large ones before small ones, each to the holder with the fewest
    bytes so far; so every node computes the same.
    """
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    sizes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    bytes_of: dict[int, int] = {}
    for table in tables:
        bytes_of[table["rank"]] = 0
        for name, (dtype, _, offset, part) in table["tensors"].items():
            box = (name, tuple(offset), tuple(part))
            holders.setdefault(box, []).append(table["rank"])
            sizes[box] = ITEM_BYTES[dtype]
            for size in part:
                sizes[box] *= size
    shares: dict[int, set[str]] = {rank: set() for rank in bytes_of}
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -sizes[box], box)):
        rank = min(holders[box], key=lambda rank: (bytes_of[rank], rank))
        bytes_of[rank] += sizes[box]
        shares[rank].add(box[0])
    return shares


def _write_part(partial: Path, table: Table, image: FoundImage, share: set[str]) -> Table:
    """Write this rank's data file; return the rank manifest of the written part."""
    kept = {name: entry for name, entry in table["tensors"].items() if name in share}
    name = data_file(image.head.rank)
    file = None
    if kept:
        parts = [image.content] if len(kept) == len(table["tensors"]) else list(_cut(image.content, kept))
        digest = write_file(partial / name, *parts)
        file = {"name": name, "bytes": sum(map(len, parts)), "sha256": digest}
    return {
        "rank": image.head.rank,
        "rank_state_json": table["rank_state_json"],
        "tensors": kept,
        "file": file,
    }


def _cut(content: memoryview, kept: Mapping[str, Any]) -> Iterator[memoryview]:
    """Yield the parts of a safetensors file that holds only the `kept` tensors of `content`."""
    have = parse_header(content, len(content))
    header, regions = build_header({name: (have[name].dtype, have[name].shape) for name in kept})
    yield memoryview(header)
    for name in regions:  # in the order of the file
        yield content[have[name].start : have[name].stop]


def whole_image(path: str, rank: int) -> FoundImage:
    """Open the memory file at `path` and verify its content.

    Raises:
        WanmaError: it is no memory file, or it is damaged.
    """
    try:
        image = FoundImage(path)
    except (OSError, ValueError) as error:
        raise WanmaError(f"the copy in memory of rank {rank} cannot be read: {error}") from error
    if not image.is_whole():
        raise WanmaError(f"the copy in memory of rank {rank} is damaged: its content differs from its hash")
    return image


def _newer(folder: Path, step: int) -> Path | None:
    """Return the newest readable checkpoint if it is of `step` or later; None otherwise."""
    for at, path in committed(folder):
        if at < step:
            break
        try:
            read_manifest(path)
        except WanmaError:
            continue
        return path
    return None
