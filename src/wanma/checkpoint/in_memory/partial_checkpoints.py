"""Parts of one in-memory checkpoint, each on the disk of the node that held it.

    write_part(folder, images)     on each node, where `folder` takes no checkpoint
    parts(folder)                  on each node, at the next start

A part is a folder in a fallback folder (`checkpoint.store.fallback_folder`) with some ranks' memory files.
From the parts of all ranks `rescue` writes a checkpoint as soon as `folder` has room.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wanma.checkpoint.format.manifest import step_name
from wanma.checkpoint.in_memory.flush import whole_image
from wanma.checkpoint.in_memory.memory_file import HEAD_BYTES, Head, read_head
from wanma.checkpoint.save.file_writer import write_file
from wanma.checkpoint.store.checkpoint_folder import sync_folder
from wanma.checkpoint.store.fallback_folder import is_mine, open_refuge, refuges
from wanma.job.errors import WanmaError

_NAME = re.compile(r"part-step-\d{8,}-\d+-\d{5}(\.writing)?")


@dataclass(frozen=True)
class Moment:
    """Identity of an in-memory checkpoint: step, generation and number of ranks."""

    step: int
    generation: int
    world_size: int


@dataclass(frozen=True)
class Part:
    """Folder of memory files, all of one in-memory checkpoint."""

    path: Path
    moment: Moment
    images: Mapping[int, Path]
    """Files by rank; their content is not verified."""


def write_part(folder: Path, images: Mapping[int, str]) -> Path:
    """Copy memory files to the first fallback folder with room, durably and completely or not at all.

    Args:
        folder: the run's checkpoint folder.
        images: paths by rank; all of one in-memory checkpoint.

    Returns:
        The part's folder.

    Raises:
        WanmaError: a memory file is damaged, or no fallback folder has room.
    """
    found = {rank: whole_image(path, rank) for rank, path in images.items()}
    first = min(found)
    head = found[first].head
    name = f"part-{step_name(head.step)}-{head.generation}-{first:05d}"
    refused = []
    for place in refuges(folder):
        writing = place / f"{name}.writing"
        try:
            open_refuge(place)
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            for rank, image in found.items():
                page = image.head.pack().ljust(HEAD_BYTES, b"\0")
                write_file(writing / f"image-{rank:05d}", memoryview(page), image.body)
            sync_folder(writing)
            final = place / name
            shutil.rmtree(final, ignore_errors=True)
            writing.rename(final)
            sync_folder(place)
            return final
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            refused.append(f"{place}: {error.strerror or errno.errorcode.get(error.errno or 0, str(error))}")
    raise WanmaError(
        f"{ranks_text(sorted(found))} of step {head.step} found room nowhere: {'; '.join(refused)}",
        f"free space on {folder}",
    )


def parts(folder: Path) -> list[Part]:
    """List the complete parts in the fallback folders of `folder` on this node."""
    found = []
    for place in refuges(folder):
        for path in sorted(place.iterdir()) if is_mine(place) else []:
            match = _NAME.fullmatch(path.name)
            if match and match[1] is None and (part := _part(path)) is not None:
                found.append(part)
    return found


def remove_parts(folder: Path, last_step: int) -> None:
    """Remove the parts of steps up to `last_step`, and unfinished ones."""
    for place in refuges(folder):
        if not is_mine(place):
            continue
        for path in list(place.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (match[1] is not None or int(path.name.split("-")[2]) <= last_step):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty
            place.rmdir()


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks in words, e.g. 'rank 3', 'ranks 0, 1'."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _part(path: Path) -> Part | None:
    heads: dict[int, tuple[Head, Path]] = {}
    for file in path.glob("image-*"):
        with contextlib.suppress(OSError):
            if (head := read_head(str(file))) is not None and head.complete:
                heads[head.rank] = head, file
    moments = {Moment(head.step, head.generation, head.world_size) for head, _ in heads.values()}
    if len(moments) != 1:
        return None
    return Part(path, moments.pop(), {rank: file for rank, (_, file) in heads.items()})
