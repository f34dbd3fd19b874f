"""Parts of one copy in memory, each on the disk of the machine that held it.

    write_part(folder, images)     on each machine, where `folder` takes no checkpoint
    parts(folder)                  on each machine, at the next start

A part is a folder in a refuge (`checkpoint.refuge`) with the images of some ranks as they were in memory.
The parts of all ranks are what `rescue` makes a checkpoint of, as soon as `folder` has room.
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
    """Step, generation and number of ranks of the copy that a part belongs to."""

    step: int
    generation: int
    world_size: int


@dataclass(frozen=True)
class Part:
    """One folder of images, all of one moment."""

    path: Path
    moment: Moment
    images: Mapping[int, Path]
    """Files by rank; their content is not verified."""


def write_part(folder: Path, images: Mapping[int, str]) -> Path:
    """Copy images to the first refuge of `folder` that has room, durably and whole or not at all.

    Args:
        images: paths by rank; all of one moment.

    Returns:
        the part's folder.

    Raises:
        WanmaError: an image is damaged, or no place has room.
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
    """The whole parts in the refuges of `folder` on this machine."""
    found = []
    for place in refuges(folder):
        for path in sorted(place.iterdir()) if is_mine(place) else []:
            match = _NAME.fullmatch(path.name)
            if match and match[1] is None and (part := _part(path)) is not None:
                found.append(part)
    return found


def remove_parts(folder: Path, last_step: int) -> None:
    """Remove the parts of steps up to `last_step`, and what was left half written."""
    for place in refuges(folder):
        if not is_mine(place):
            continue
        for path in list(place.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (match[1] is not None or int(path.name.split("-")[2]) <= last_step):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # something else is there
            place.rmdir()


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words, e.g. 'rank 3', 'ranks 0, 1'."""
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
