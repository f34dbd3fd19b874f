"""Samples of stored files by their number: from entries of a job to records, whatever store and format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from wanma.data.cache.node_cache import opener_for
from wanma.data.formats.detection import detect_format, format_named
from wanma.data.formats.format import BadDataError, DataFile, Format, Record, Rows
from wanma.data.index.build import Progress, open_gradual_index, open_or_build_index
from wanma.data.index.sample_index import SampleIndex, read_around_damage
from wanma.data.stores.filesystems import is_local, is_shared_memory
from wanma.data.stores.listing import StoredFile, list_files
from wanma.data.stores.remote_file import READ_RETRY_POLICY, OpenableFile
from wanma.job.errors import JobError, WanmaError
from wanma.job.run.user_cache import user_cache_folder

DEFAULT_CACHE_BYTES = 64 << 30
"""Default limit of the copies of remote data on a node."""
_AHEAD_PARTS = 4
"""Share of the node cache, as its denominator, that files take which are read before they are needed."""
_DESCRIPTIONS = ("readme", "readme.*", "license", "license.*", ".*")
"""Names of files in folders, in lower case, that hold no samples."""


def cache_folder(chosen: str | Path | None) -> Path:
    """Return the folder of what is kept between runs: the chosen one, or wanma's in the user's cache."""
    if chosen is not None:
        return Path(chosen).expanduser()
    return user_cache_folder()


def open_records(
    entries: str | Sequence[str],
    data_format: Format | str | None = None,
    *,
    cache: str | Path | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Records:
    """Open stored files as a map-style dataset of records.

    Args:
        entries: files, folders, globs and URLs (`s3://`, `gs://`, `https://`, ...), in order.
        data_format: format of all files, or its name; None: found by their content.
        cache: folder of the index and of copies of remote files; None: wanma's folder in the user's cache.
        cache_bytes: largest size of those copies; 0: none are kept.
        skip_damaged: let files that cannot be read count as empty; `Records.damaged` lists them.
        progress: called with (bytes done, bytes in all) while an index is built.

    Raises:
        JobError: an entry is missing or has no file.
        BadDataError, WanmaError: files cannot be read or have another format.
    """
    names = [entries] if isinstance(entries, str) else list(entries)
    files = without_descriptions(list_files(names, "entries"))
    chosen = format_named(data_format) if isinstance(data_format, str) else data_format
    index = open_index(
        files,
        cache_folder(cache),
        cache_bytes,
        data_format=chosen,
        skip_damaged=skip_damaged,
        progress=progress,
    )
    return Records(index)


class Records:
    """Map-style dataset of records: mappings of field to bytes, text, number or array.

    It may be read from several threads at once. A pickled copy opens the files again.

    Args:
        index: index of the files.
    """

    def __init__(self, index: SampleIndex) -> None:
        self.index = index

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, number: int) -> Record:
        """Return the record with this number in [0, length).

        Raises:
            BadDataError: it is damaged; names the file and the row.
            IndexError: there is no such number.
        """
        return self.read([number])[0]

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """Return records by their numbers, in their order; one read for all, so faster than one by one."""
        return self.index.read(np.asarray(numbers, dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """Hash of format, options and content, equal on all nodes."""
        return self.index.fingerprint

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        """Files that cannot be read and count as empty, each with the cause."""
        return tuple((one.file, one.cause) for one in self.index.damaged)


def open_index(
    files: Sequence[StoredFile],
    folder: Path,
    cache_bytes: int,
    *,
    data_format: Format | None = None,
    skip_damaged: bool = False,
    progress: Progress | None = None,
    retry_seconds: float = READ_RETRY_POLICY.deadline_seconds,
    by_file: bool = False,
) -> SampleIndex:
    """Open or build the index of listed files; arguments and errors as of `open_records`.

    Args:
        by_file: True: the samples are read file by file, so that remote files are scanned when their samples
            are wanted (`GradualIndex`); all at once where damaged ones are skipped, which the rest must know.
            Either way the listing is the fingerprint.
        retry_seconds: time for which a failed read of a store is tried again.
    """
    if not files:
        raise JobError("no file holds samples", "name files, or folders with files")
    opener = opener_for(folder / "blocks", cache_bytes, retry_seconds) if has_remote(files) else None
    data_files: list[DataFile] = [OpenableFile(file, opener) for file in files]
    chosen = data_format or detect_format(data_files)
    gradual = None
    if by_file and not any(is_local(file.filesystem) for file in files):
        gradual = open_gradual_index(data_files, chosen, folder, cache_bytes // _AHEAD_PARTS)
        if not skip_damaged:
            return gradual
    index = open_or_build_index(data_files, chosen, folder, progress, skip_damaged=skip_damaged)
    if gradual is not None:
        index = replace(index, fingerprint=gradual.fingerprint)
    if not index.rows:
        first = "".join(f"; the first: {one.file}: {one.cause}" for one in index.damaged[:1])
        bad = f": {len(index.damaged)} of {len(files)} files cannot be read{first}" if index.damaged else ""
        raise WanmaError(f"'{files[0].url}' and the files with it hold no sample ({chosen.name}){bad}")
    return index


def has_remote(files: Sequence[StoredFile]) -> bool:
    """Return True if a file is not in local storage."""
    filesystems = {id(file.filesystem): file.filesystem for file in files}
    return not all(is_local(filesystem) for filesystem in filesystems.values())


def is_in_process_memory(index: SampleIndex) -> bool:
    """Return True if a file is in this process's memory (`memory://`), which no other process can read."""
    files = (file for group in index.groups for file in group.files)
    return any(isinstance(file, OpenableFile) and is_shared_memory(file.stored.filesystem) for file in files)


def without_descriptions(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Return files without those in folders that describe data and hold no samples, such as README.md."""

    def describes(file: StoredFile) -> bool:
        name = file.url.rpartition("/")[2].lower()
        return not file.is_named and any(fnmatchcase(name, pattern) for pattern in _DESCRIPTIONS)

    return [file for file in files if not describes(file)]


def read_each(index: SampleIndex, rows: Rows) -> list[Record | BadDataError]:
    """Return samples by their numbers, and for a damaged one its error."""
    return [found for _, found in read_around_damage(index.read, rows)]
