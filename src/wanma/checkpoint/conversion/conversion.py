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
    DTYPE_BYTES,
    MANIFEST_FILE,
    Box,
    FileEntry,
    Manifest,
    SavedShard,
    TensorEntry,
    build_header,
    data_file_name,
    dump_manifest,
)
from wanma.checkpoint.format.tensor_blocks import BLOCK_ELEMENTS, iterate_blocks
from wanma.checkpoint.load.reader import CheckpointReader
from wanma.checkpoint.load.verification import find_defects
from wanma.checkpoint.store.checkpoint_folder import create_output_folder, read_manifest
from wanma.job.errors import EXIT_USAGE, WanmaError


def require_valid(path: Path) -> None:
    """Reject a damaged checkpoint: one written from it would get hashes that match its damaged content.

    Raises:
        WanmaError: the checkpoint at `path` is not valid; the message says why.
    """
    if problems := find_defects(path):
        raise WanmaError(
            f"checkpoint {path} is damaged: {'; '.join(problems)}",
            "choose another one from `wanma checkpoint list`",
        )


def convert_checkpoint(
    path: Path,
    folder: Path,
    dtypes: Mapping[str, str],
    files: int = 1,
    block_elements: int = BLOCK_ELEMENTS,
) -> Manifest:
    """Write tensors of the checkpoint at `path` as a checkpoint at `folder`, with its state.

    Args:
        path: the checkpoint to read.
        folder: the checkpoint to write.
        dtypes: name -> dtype as the format spells it, of the tensors to write.
        files: number of files over which full tensors are distributed, by size.
        block_elements: elements converted at a time.

    Returns:
        The manifest of the written checkpoint.

    Raises:
        WanmaError: the checkpoint is not valid, a value does not fit its new dtype, `folder` exists, or the
            disk failed. `folder` is then not created.
    """
    if files < 1:
        raise WanmaError(f"the number of files is {files}, but at least 1 is needed", exit_code=EXIT_USAGE)
    require_valid(path)
    reader, source = CheckpointReader(path), read_manifest(path)
    with create_output_folder(folder) as partial:
        written: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        for number, names in enumerate(_distribute_tensors(reader, dtypes, files)):
            file = data_file_name(number)
            written[file] = _write_data_file(
                partial / file, reader, {name: dtypes[name] for name in names}, block_elements
            )
            for name in names:
                shape = reader.tensors[name].shape
                tensors[name] = TensorEntry(
                    dtypes[name], shape, (SavedShard(Box((0,) * len(shape), shape), file),)
                )
        manifest = replace(source, files=written, tensors=dict(sorted(tensors.items())))
        with (partial / MANIFEST_FILE).open("xb") as manifest_file:
            manifest_file.write(dump_manifest(manifest))
            manifest_file.flush()
            os.fsync(manifest_file.fileno())
    return manifest


def _distribute_tensors(reader: CheckpointReader, dtypes: Mapping[str, str], files: int) -> list[list[str]]:
    """Distribute tensor names over files: the largest first, each to the file with the fewest bytes."""
    sizes = {name: DTYPE_BYTES[dtype] * _elements(reader, name) for name, dtype in dtypes.items()}
    groups: list[list[str]] = [[] for _ in range(files)]
    loads = [(0, number) for number in range(files)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], number))
        groups[number].append(name)
    return [group for group in groups if group]


def _elements(reader: CheckpointReader, name: str) -> int:
    shape = reader.tensors[name].shape
    return Box(shape, shape).numel


def _write_data_file(
    path: Path, reader: CheckpointReader, dtypes: Mapping[str, str], block_elements: int
) -> FileEntry:
    header, regions = build_header({name: (dtypes[name], reader.tensors[name].shape) for name in dtypes})
    digest, size = hashlib.sha256(header), len(header)
    with path.open("xb") as file:
        file.write(header)
        for name in sorted(regions, key=lambda name: regions[name].start):
            for box in iterate_blocks(regions[name].shape, block_elements):
                content = _read_box_content(reader, name, box, dtypes[name])
                file.write(content)
                digest.update(content)
                size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _read_box_content(reader: CheckpointReader, name: str, box: Box, dtype: str) -> memoryview:
    part = cast_tensor(name, reader.read(name, box).reshape(-1), dtype)
    return part.view(torch.uint8).numpy().data


def cast_tensor(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Cast a part of tensor `name` to `dtype`, as the format spells it.

    Raises:
        WanmaError: a finite value would become infinite.
    """
    converted = tensor.to(DTYPES[dtype])
    changes = converted is not tensor and tensor.is_floating_point()
    if changes and not torch.equal(tensor.isfinite(), converted.isfinite()):
        raise WanmaError(f"tensor {name} has values outside the range of {dtype}", "choose a wider dtype")
    return converted
