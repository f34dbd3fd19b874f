"""Conversion of a checkpoint to other files or dtypes, block by block; the source is never changed."""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from wanma.checkpoint.format.local_shards import DTYPES
from wanma.checkpoint.format.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Box,
    FileEntry,
    Manifest,
    Shard,
    TensorEntry,
    build_header,
    data_file,
    dump_manifest,
)
from wanma.checkpoint.format.tensor_blocks import BLOCK_ELEMENTS, blocks
from wanma.checkpoint.load.reader import Saved
from wanma.checkpoint.load.verification import verify
from wanma.checkpoint.store.checkpoint_folder import new_folder, read_manifest
from wanma.job.errors import EXIT_USAGE, WanmaError


def require_whole(path: Path) -> None:
    """Reject a damaged checkpoint: one written from it would get hashes that match its damaged content.

    Raises:
        WanmaError: the checkpoint at `path` is not valid; the message says why.
    """
    if problems := verify(path):
        raise WanmaError(
            f"checkpoint {path} is not whole: {'; '.join(problems)}", "`wanma checkpoint list` shows others"
        )


def convert(
    path: Path,
    folder: Path,
    kinds: Mapping[str, str],
    files: int = 1,
    block_elements: int = BLOCK_ELEMENTS,
) -> Manifest:
    """Write tensors of the checkpoint at `path` as a checkpoint at `folder`, with its state.

    Args:
        path: the checkpoint to read.
        folder: the checkpoint to write.
        kinds: name -> dtype as the format spells it, of the tensors to write.
        files: number of files over which full tensors are distributed, by size.
        block_elements: elements converted at a time.

    Returns:
        The manifest of the written checkpoint.

    Raises:
        WanmaError: the checkpoint is not valid, a value does not fit its new dtype, `folder` exists, or the
            disk failed. `folder` is then not created.
    """
    if files < 1:
        raise WanmaError(f"{files} files: at least one is needed", exit_code=EXIT_USAGE)
    require_whole(path)
    saved, source = Saved(path), read_manifest(path)
    with new_folder(folder) as partial:
        written: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        for number, names in enumerate(_spread(saved, kinds, files)):
            file = data_file(number)
            written[file] = _write(
                partial / file, saved, {name: kinds[name] for name in names}, block_elements
            )
            for name in names:
                shape = saved.tensors[name].shape
                tensors[name] = TensorEntry(kinds[name], shape, (Shard(Box((0,) * len(shape), shape), file),))
        manifest = replace(source, files=written, tensors=dict(sorted(tensors.items())))
        with (partial / MANIFEST).open("xb") as opened:
            opened.write(dump_manifest(manifest))
            opened.flush()
            os.fsync(opened.fileno())
    return manifest


def _spread(saved: Saved, kinds: Mapping[str, str], files: int) -> list[list[str]]:
    """Distribute tensor names over files: the largest first, each to the file with the fewest bytes."""
    sizes = {name: ITEM_BYTES[dtype] * _elements(saved, name) for name, dtype in kinds.items()}
    groups: list[list[str]] = [[] for _ in range(files)]
    loads = [(0, number) for number in range(files)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], number))
        groups[number].append(name)
    return [group for group in groups if group]


def _elements(saved: Saved, name: str) -> int:
    shape = saved.tensors[name].shape
    return Box(shape, shape).elements


def _write(path: Path, saved: Saved, kinds: Mapping[str, str], block_elements: int) -> FileEntry:
    header, regions = build_header({name: (kinds[name], saved.tensors[name].shape) for name in kinds})
    digest, size = hashlib.sha256(header), len(header)
    with path.open("xb") as file:
        file.write(header)
        for name in sorted(regions, key=lambda name: regions[name].start):
            for box in blocks(regions[name].shape, block_elements):
                content = _content(saved, name, box, kinds[name])
                file.write(content)
                digest.update(content)
                size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _content(saved: Saved, name: str, box: Box, dtype: str) -> memoryview:
    part = with_dtype(name, saved.read(name, box).reshape(-1), dtype)
    return part.view(torch.uint8).numpy().data


def with_dtype(name: str, part: Tensor, dtype: str) -> Tensor:
    """Cast a part of tensor `name` to `dtype`, as the format spells it.

    Raises:
        WanmaError: a finite value would become infinite.
    """
    converted = part.to(DTYPES[dtype])
    changes = converted is not part and part.is_floating_point()
    if changes and not torch.equal(part.isfinite(), converted.isfinite()):
        raise WanmaError(f"tensor {name} has values that {dtype} cannot hold", "choose a wider dtype")
    return converted
