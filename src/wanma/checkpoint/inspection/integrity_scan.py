"""Integrity scan: search of a checkpoint for every defect, on disk or at a URL. Torch-free.

`verify` stops as soon as a checkpoint is known to be invalid; a scan goes on, and also finds defects that no
hash reveals: tensors that the shards do not cover, files whose content contradicts the manifest.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from wanma.checkpoint.format.manifest import (
    HEADER_LIMIT,
    MANIFEST,
    Box,
    FileEntry,
    Manifest,
    overlap,
    parse_header,
    parse_manifest,
    step_name,
)
from wanma.job.errors import WanmaError

_READ_BYTES = 8 << 20


class Files(Protocol):
    """Access to the files in a checkpoint's folder; `remote_storage.Storage` implements it too."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None: no such file."""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None: no such file, or not a regular file."""

    def open(self, path: str) -> Any:
        """Open a file for reading, as a context manager."""


class FolderFiles:
    """Access to the files of a folder on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, path: str) -> bytes | None:
        try:
            return (self._path / path).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int | None:
        try:
            status = (self._path / path).stat()
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, path: str) -> IO[bytes]:
        return (self._path / path).open("rb")


@dataclass(frozen=True)
class Problem:
    """Defect of one file."""

    file: str
    cause: str


@dataclass(frozen=True)
class Scan:
    """Result of the scan of one checkpoint."""

    name: str
    manifest: Manifest | None
    """Manifest; None: it cannot be read."""
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems


def scan(name: str, files: Files) -> Scan:
    """Scan the checkpoint called `name`: every hash, every header, every tensor.

    Returns:
        All defects, by file; an unreadable file is a defect, not an exception.
    """
    try:
        content = files.read(MANIFEST)
        if content is None:
            raise WanmaError("is missing: the checkpoint was never completed")
        manifest = parse_manifest(content)
    except (OSError, WanmaError) as error:
        return Scan(name, None, (Problem(MANIFEST, _cause(error).removeprefix(f"{MANIFEST} ")),))
    problems = [Problem(MANIFEST, cause) for cause in _contradictions(name, manifest)]
    held: defaultdict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for tensor, entry in manifest.tensors.items():
        for shard in entry.shards:
            held[shard.file][tensor] = entry.dtype, shard.box.shape
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        found = threads.map(
            lambda file: list(_problems(files, file, manifest.files[file], held[file])),
            sorted(manifest.files),
        )
        problems += [problem for several in found for problem in several]
    return Scan(name, manifest, tuple(problems))


def quick_problem(size_of: Callable[[str], int | None], manifest: Manifest) -> str | None:
    """Return the first file that is missing or has another size; None: all sizes match."""
    for name, entry in manifest.files.items():
        if (cause := _wrong_size(size_of(name), entry)) is not None:
            return f"{name} {cause}"
    return None


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return the reason why boxes do not cover a tensor of `shape` exactly once; None if they do."""
    elements, full = sum(box.elements for box in boxes), math.prod(shape)
    if full == 0:
        return None
    parts = [box for box in boxes if box.elements]
    # Along the dimension with the most cuts, each box has few others to compare.
    dims = range(len(shape))
    along = max(dims, key=lambda dim: len({box.offset[dim] for box in parts}), default=None)
    ordered = parts if along is None else sorted(parts, key=lambda box: box.offset[along])
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if along is not None and other.offset[along] >= box.offset[along] + box.shape[along]:
                break
            if overlap(box, other) is not None:
                return f"shards at {box.offset} and {other.offset} overlap"
    return None if elements == full else f"its shards hold {elements:,} of {full:,} elements"


def _contradictions(name: str, manifest: Manifest) -> Iterator[str]:
    if name.startswith("step-") and not name.startswith(step_name(manifest.step)):
        yield f"is of step {manifest.step:,}, not of the one that its folder is named after"
    for tensor, entry in manifest.tensors.items():
        if (cause := uncovered(entry.shape, [shard.box for shard in entry.shards])) is not None:
            yield f"tensor {tensor}: {cause}"
        for file, count in Counter(shard.file for shard in entry.shards).items():
            if count > 1:
                yield f"tensor {tensor}: {count} shards of that one name in {file}"


def _problems(
    files: Files, name: str, entry: FileEntry, held: dict[str, tuple[str, tuple[int, ...]]]
) -> Iterator[Problem]:
    """Yield the defects of one data file, which is read once."""
    try:
        if (cause := _wrong_size(files.size(name), entry)) is not None:
            yield Problem(name, cause)
            return
        digest = hashlib.sha256()
        with files.open(name) as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) == 8 and length <= min(HEADER_LIMIT, entry.bytes - 8):
                head += file.read(length)
            digest.update(head)
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except Exception as error:  # a storage library may raise anything
        yield Problem(name, f"cannot be read: {_cause(error)}")
        return
    if digest.hexdigest() != entry.sha256:
        yield Problem(name, "is damaged: its content differs from its SHA-256")
    try:
        regions = parse_header(head, entry.bytes)
    except ValueError as error:
        yield Problem(name, str(error))
        return
    for tensor, kind in held.items():
        region = regions.get(tensor)
        if region is None:
            yield Problem(name, f"tensor {tensor} is not in it")
        elif (region.dtype, region.shape) != kind:
            yield Problem(
                name, f"tensor {tensor} is {region.dtype} {region.shape}, not {kind[0]} {kind[1]} as listed"
            )
    for tensor in sorted(set(regions).difference(held)):
        yield Problem(name, f"tensor {tensor} is in it, but not listed")


def _wrong_size(size: int | None, entry: FileEntry) -> str | None:
    if size is None:
        return "is missing"
    return None if size == entry.bytes else f"has {size:,} bytes instead of {entry.bytes:,}"


def _cause(error: Exception) -> str:
    if isinstance(error, WanmaError):
        return error.message
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
