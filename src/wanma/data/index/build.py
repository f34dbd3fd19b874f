"""Building of an index: files are scanned in parallel, each once; a killed build goes on where it was.

In the cache folder:

    index/KEY.index             rows of each group, and the fingerprint of all
    index/layouts/KE/KEY.layout the layout of one group, named by address, size and version of its files
    plain/                      plain copies of compressed files

A file that has changed has another version, so another name: it alone is scanned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.formats.format import BadDataError, DataFile, FileGroup, Format, Layout, UnreadableFileError
from wanma.data.index.gradual_index import ROWS_PER_FILE, GradualIndex
from wanma.data.index.group_scan import open_if_whole, open_or_scan
from wanma.data.index.layout_file import hash_json, open_layout, serialize
from wanma.data.index.sample_index import DamagedFile, SampleIndex
from wanma.data.stores.atomic_file import write_once
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import usable_cores

Progress = Callable[[int, int], None]
"""Function (bytes done, bytes in all)."""

_LAYOUTS = 2
"""Version of the layouts of all formats; a change lets all files be scanned again."""
_SHOWN_ERRORS = 5
_MIN_THREADS = 4


class BadFilesError(WanmaError):
    """Error: several files cannot be read as their format.

    Args:
        errors: the error of each file.
        files: number of files in all.
    """

    def __init__(self, errors: tuple[BadDataError, ...], files: int) -> None:
        shown = "; ".join(f"{error.file}: {error.cause}" for error in errors[:_SHOWN_ERRORS])
        more = f"; and {len(errors) - _SHOWN_ERRORS} more" if len(errors) > _SHOWN_ERRORS else ""
        super().__init__(
            f"{len(errors)} of {files} files cannot be read: {shown}{more}",
            "write or download them again; all others are scanned and are not scanned again",
        )
        self.errors, self.files = errors, files

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.files)


def open_or_build_index(
    files: Sequence[DataFile],
    data_format: Format,
    cache_folder: Path,
    progress: Progress | None = None,
    *,
    skip_damaged: bool = False,
) -> SampleIndex:
    """Open the index of `files`, building what is missing of it.

    Safe to call from many processes at once: each file is scanned by one of them.

    Args:
        files: the files, in order.
        data_format: format of all of them.
        cache_folder: folder of indexes and of plain copies of compressed files.
        progress: called with (bytes done, bytes in all) while building.
        skip_damaged: let damaged files count as empty, and list them; False: refuse them.

    Raises:
        BadDataError: a file is damaged, missing or of another format.
        BadFilesError: several files are.
        WanmaError: the cache cannot be written to.
    """
    groups, keys, paths = _groups(files, data_format, cache_folder)
    folder = cache_folder / "index"
    index_path = folder / f"{hash_json([keys, skip_damaged])}.index"
    try:
        stored = open_if_whole(index_path)
        if stored is None:
            stored = _build(index_path, groups, data_format, paths, progress, skip_damaged)
    except OSError as error:
        raise WanmaError(
            f"cannot keep an index in {folder}: {error.strerror or error}",
            "free space, or choose another cache folder",
        ) from error
    damaged = tuple(DamagedFile(*entry) for entry in stored.facts["damaged"])
    row_starts = stored.tables["row_starts"]
    return SampleIndex(data_format, groups, row_starts, stored.identity, paths, damaged)


def open_gradual_index(
    files: Sequence[DataFile], data_format: Format, cache_folder: Path, ahead_bytes: int
) -> GradualIndex:
    """Open an index of `files` that scans each of them when its samples are wanted.

    Args:
        files, data_format, cache_folder: as of `open_or_build_index`.
        ahead_bytes: largest size of the files that are scanned before they are asked for.
    """
    groups, _, paths = _groups(files, data_format, cache_folder)
    listing = [[file.size, file.version] for group in groups for file in group.files]
    row_starts = np.arange(len(groups) + 1, dtype=np.int64) * ROWS_PER_FILE
    fingerprint = hash_json([_format_identity(data_format), listing])
    return GradualIndex(data_format, groups, row_starts, fingerprint, paths, ahead_bytes=ahead_bytes)


def _groups(
    files: Sequence[DataFile], data_format: Format, cache_folder: Path
) -> tuple[list[FileGroup], list[str], list[Path]]:
    """Return the groups of files, and of each its key and the path of its layout."""
    groups = [replace(group, scratch=cache_folder / "plain") for group in data_format.group(files)]
    keys = [_group_key(group, data_format) for group in groups]
    return groups, keys, [cache_folder / "index" / "layouts" / key[:2] / f"{key}.layout" for key in keys]


def _build(
    index_path: Path,
    groups: Sequence[FileGroup],
    data_format: Format,
    paths: Sequence[Path],
    progress: Progress | None,
    skip_damaged: bool,
) -> Layout:
    """Scan all groups, and write the index; one process does it, the others wait for it.

    An index without files that cannot be opened now is not kept.
    """
    try:
        with write_once(index_path) as file:
            if file is not None:
                scanned = _scan_groups(groups, data_format, paths, progress)
                errors = tuple(one for one in scanned if isinstance(one, BadDataError))
                if errors and not skip_damaged:
                    raise errors[0] if len(errors) == 1 else BadFilesError(errors, len(groups))
                joined = _join(scanned, groups, data_format)
                if any(isinstance(one, UnreadableFileError) for one in errors):
                    raise _PassingIndexError(joined)
                for part in serialize(joined):
                    file.write(part)
    except _PassingIndexError as passing:
        return passing.index
    return open_layout(index_path)


class _PassingIndexError(Exception):
    """End of a build whose index is used once."""

    def __init__(self, index: Layout) -> None:
        super().__init__()
        self.index = index


def _join(
    scanned: Sequence[Layout | BadDataError], groups: Sequence[FileGroup], data_format: Format
) -> Layout:
    """Return the index of groups: their rows, the damaged files, and the hash of all."""
    rows, identities, damaged = [], [], []
    for one, group in zip(scanned, groups, strict=True):
        if isinstance(one, BadDataError):
            rows.append(0)
            identities.append(hash_json(["damaged", [file.size for file in group.files]]))
            damaged.append([one.file, one.cause if one.row is None else f"row {one.row}: {one.cause}"])
        else:
            rows.append(one.rows)
            identities.append(one.identity)
    fingerprint = hash_json([_format_identity(data_format), identities, rows])
    row_starts = np.cumsum([0, *rows], dtype=np.int64)
    return Layout(sum(rows), {"row_starts": row_starts}, {"damaged": damaged}, identity=fingerprint)


def _scan_groups(
    groups: Sequence[FileGroup],
    data_format: Format,
    paths: Sequence[Path],
    progress: Progress | None,
) -> list[Layout | BadDataError]:
    """Scan all groups in threads: reading, decompressing and searching release the interpreter's lock."""
    total = sum(file.size for group in groups for file in group.files)
    done = 0
    if progress is not None:
        progress(0, total)
    with ThreadPoolExecutor(max(_MIN_THREADS, usable_cores()), thread_name_prefix="wanma-index") as pool:
        futures: dict[Future[Layout | BadDataError], int] = {
            pool.submit(_open_or_error, group, data_format, path): number
            for number, (group, path) in enumerate(zip(groups, paths, strict=True))
        }
        scanned: dict[int, Layout | BadDataError] = {}
        try:
            for future in as_completed(futures):
                number = futures[future]
                one = future.result()
                if isinstance(one, Layout):  # the arrays of 10^9 samples would fill the memory
                    one = Layout(one.rows, identity=one.identity)
                scanned[number] = one
                done += sum(file.size for file in groups[number].files)
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [scanned[number] for number in range(len(groups))]


def _open_or_error(group: FileGroup, data_format: Format, path: Path) -> Layout | BadDataError:
    try:
        return open_or_scan(group, data_format, path)
    except BadDataError as error:
        return error


def _group_key(group: FileGroup, data_format: Format) -> str:
    """Return the hash of everything that determines a layout, content unread."""
    files = [[file.url, file.size, file.version] for file in group.files]
    return hash_json([_LAYOUTS, _format_identity(data_format), files, dict(group.facts)])


def _format_identity(data_format: Format) -> list[Any]:
    return [data_format.name, data_format.layout_version, data_format.options]
