"""Files that entries of a job name: files, folders, globs and any fsspec URL. No torch here.

The list is the same on every node that sees the same files: each entry's files are sorted by their path, and
a file that two entries name counts once.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from wanma.data.stores.filesystems import (
    file_url,
    is_local,
    open_filesystem,
    shown_cause,
    unreadable_error,
)
from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import STORAGE_RETRY_POLICY, retry
from wanma.job.run.run_directory import RunDirectory, is_run

_VERSION_FIELDS = (
    "generation",
    "ETag",
    "etag",
    "md5Hash",
    "checksum",
    "blob_id",
    "mtime",
    "modificationTime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "created",
)
"""Fields of a file's metadata that change with its content, the most reliable first."""


@dataclass(frozen=True)
class StoredFile:
    """File in a store, with an identity of its content that needs no reading."""

    filesystem: Any = field(repr=False)
    """Filesystem (fsspec) that holds the file."""
    path: str
    """Path in the filesystem."""
    url: str
    """Address of the file, equal on every node: a URL, and of a local file its path."""
    size: int
    """Size in bytes as stored."""
    version: str
    """Version of the content: the store's tag, the modification time, or a hash of the content."""
    is_named: bool
    """True if the job names the file itself; False for files found in folders and by globs."""
    job_key: str
    """Key of the job file that names it, for messages."""
    content_hash: str = ""
    """Hash of the content that the store gives, as 'md5:HEX' or 'sha256:HEX'; empty: none."""
    entry: str = ""
    """Entry of the job that names the file or contains it; empty: unknown."""


MAX_RETRY_SECONDS = STORAGE_RETRY_POLICY.deadline_seconds
"""Longest time for which a failed listing is tried again: an address may be wrong."""


def list_files(
    entries: Sequence[str], key: str, retry_seconds: float = MAX_RETRY_SECONDS
) -> list[StoredFile]:
    """List the files of `entries`, in their order, each once.

    Args:
        entries: files, folders, globs and URLs.
        key: key of the job file that holds them, for messages.
        retry_seconds: time for which a failed listing is tried again, up to `MAX_RETRY_SECONDS`.

    Raises:
        JobError: an entry that is missing, matches nothing, or whose storage is unknown.
        WanmaError: storage that cannot be read.
    """
    return unique_files(
        file
        for number, entry in enumerate(entries)
        for file in expand_entry(entry, f"{key}[{number}]", retry_seconds)
    )


def unique_files(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Return `files` without repetitions; a file keeps its first place."""
    unique: dict[str, StoredFile] = {}
    for file in files:
        unique.setdefault(file.url, file)
    return list(unique.values())


def expand_entry(entry: str, key: str, retry_seconds: float = MAX_RETRY_SECONDS) -> list[StoredFile]:
    """List the files of one entry; arguments and errors as for `list_files`."""
    if not entry.strip():
        raise JobError(f"{key} is empty text", "name a file, a folder ('.' is this one), a glob or a URL")
    try:
        filesystem, path = open_filesystem(entry)
        if is_local(filesystem):
            return _resolve_entry(filesystem, path, entry, key)
        policy = replace(STORAGE_RETRY_POLICY, deadline_seconds=min(retry_seconds, MAX_RETRY_SECONDS))
        return retry(lambda: _resolve_entry(filesystem, path, entry, key), policy)
    except WanmaError:
        raise
    except Exception as error:  # a storage library may raise anything
        raise unreadable_error(entry, key, error) from shown_cause(error)


def _resolve_entry(filesystem: Any, path: str, entry: str, key: str) -> list[StoredFile]:
    is_pattern = any(character in path for character in "*?[")
    # In a store a star is a pattern, whatever is named so: the question would be two requests.
    is_asked = is_local(filesystem) or "*" not in path
    info = _info(filesystem, path, is_pattern) if is_asked else None
    if is_local(filesystem) and (Path(path).is_symlink() if info is None else info["type"] == "other"):
        info = _local_information(filesystem, path, key)
    if info is not None and info["type"] == "file":
        return [stored_file(filesystem, path, info, key, entry=entry, is_named=True)]
    if info is not None:
        files = _list_folder(filesystem, path, key)
        if not files:
            raise JobError(
                f"{key}: no file in the folder '{entry}'",
                "add files; those with a leading dot, and folders of runs, are ignored",
            )
    elif is_pattern:
        files = _glob(filesystem, path, key)
        if not files:
            raise JobError(f"{key}: no file matches '{entry}'", "check the pattern; '**' crosses folders")
    else:
        raise JobError(f"{key}: '{entry}' does not exist", "paths are relative to where wanma is started")
    return [stored_file(filesystem, name, files[name], key, entry=entry) for name in sorted(files)]


def _info(filesystem: Any, path: str, is_pattern: bool) -> dict[str, Any] | None:
    """Return the entry at `path`; None: no entry. fsspec's `isfile` mistakes a failure for an absence."""
    try:
        return file_information(filesystem, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception:
        if is_pattern:  # servers may refuse its characters; the search reports other errors
            return None
        raise


def file_information(filesystem: Any, path: str) -> dict[str, Any]:
    """Return the metadata of a file or folder.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: the store failed; fsspec's HTTP reports every failure as an absence.
    """
    try:
        info: dict[str, Any] = filesystem.info(path)
    except FileNotFoundError as error:
        cause = error.__cause__
        status = getattr(cause, "status", None)
        if cause is None or status in (404, 410):
            raise
        if status in (401, 403):
            raise PermissionError(f"HTTP status {status}") from error
        raise OSError(f"HTTP status {status}" if status else str(cause) or type(cause).__name__) from error
    return info


def _glob(filesystem: Any, pattern: str, key: str) -> dict[str, Any]:
    """Return the files that match, with their metadata."""
    try:
        matches = filesystem.glob(pattern, detail=True, **_strict_listing_options(filesystem))
    except FileNotFoundError:
        return {}
    for name, info in matches.items():
        if info["type"] == "other" and is_local(filesystem):  # fsspec lists links so, too
            matches[name] = _local_information(filesystem, name, key)
    return {name: info for name, info in matches.items() if info["type"] == "file"}


def _strict_listing_options(filesystem: Any) -> dict[str, Any]:
    """Return arguments for a search: fsspec's own silently omits folders that it failed to list."""
    if is_local(filesystem):
        return {}
    if isinstance(filesystem, AsyncFileSystem):
        is_own = type(filesystem)._find is AsyncFileSystem._find
    else:
        is_own = type(filesystem).find is AbstractFileSystem.find
    return {"on_error": "raise"} if is_own else {}


def _list_folder(filesystem: Any, folder: str, key: str) -> dict[str, Any]:
    """Return the files below `folder` with their metadata, without hidden ones and those of runs."""
    if is_local(filesystem):
        names = walk_local_folder(folder, (".*",))
        return {name: _local_information(filesystem, name, key) for name in names}
    start = len(folder.rstrip("/"))
    files = filesystem.find(folder, detail=True, **_strict_listing_options(filesystem))
    return {name: info for name, info in files.items() if "/." not in name[start:]}


def _local_information(filesystem: Any, path: str, key: str) -> dict[str, Any]:
    """Return the metadata of a local file or folder, to which links are followed.

    Raises:
        JobError: a link to a missing file; or no file that has an end, such as a named pipe.
        OSError: the file was removed while the folder was listed.
    """
    try:
        info: dict[str, Any] = filesystem.info(path)
    except FileNotFoundError as error:
        if not Path(path).is_symlink():
            raise OSError(f"'{path}' was removed meanwhile") from error
        text = f"{key}: '{path}' is a link to a missing file"
        raise JobError(text, "remove the link, or restore its file") from error
    if info["type"] == "other":
        kind = "a named pipe" if Path(path).is_fifo() else "a device or socket"
        raise JobError(
            f"{key}: '{path}' is {kind}, not a file: its content could be read only once, or never ends",
            "copy the content into a file, or remove it from the folder",
        )
    return info


def walk_local_folder(root: str, excluded_names: tuple[str, ...]) -> Iterator[str]:
    """Yield local files below `root`; names in `excluded_names` and run directories below it are skipped.

    Unlike fsspec's own walk it raises where a folder may not be entered, follows links to folders, each once,
    and does not list what it skips.
    """

    def refuse(error: OSError) -> None:
        raise error

    visited_folders = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        if (real_folder := os.path.realpath(folder)) in visited_folders:
            folders.clear()
            continue
        visited_folders.add(real_folder)
        folders[:] = sorted(
            name
            for name in folders
            if not _matches(name, excluded_names) and not _is_run_directory(Path(folder, name))
        )
        yield from (f"{folder}/{name}" for name in names if not _matches(name, excluded_names))


def _is_run_directory(path: Path) -> bool:
    """Return True for the output of a run; a folder that only contains a job file is none."""
    run = RunDirectory(path)
    return is_run(path) and (run.checkpoints.is_dir() or run.engine_files.is_dir())


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def stored_file(
    filesystem: Any, path: str, info: dict[str, Any], job_key: str, *, entry: str = "", is_named: bool = False
) -> StoredFile:
    """Return the file at `path` from its metadata `info`; without a size or version its content is read.

    Args:
        entry: entry of the job that names or contains it.
        is_named, job_key: see `StoredFile`.
    """
    if info.get("size") is None and not is_local(filesystem):  # a folder of a web server lists names only
        info = {**info, **file_information(filesystem, path)}
    version = file_version(info)
    if version is None or info.get("size") is None:  # plain web servers may report neither
        content = filesystem.cat_file(path)
        info = {**info, "size": len(content)}
        version = "content:" + hashlib.sha256(content).hexdigest()
    url = file_url(filesystem, path, entry)
    return StoredFile(
        filesystem, path, url, int(info["size"]), version, is_named, job_key, _content_hash(info), entry
    )


def file_version(info: dict[str, Any]) -> str | None:
    """Return the version of a file's content, as 'FIELD:VALUE' of its metadata; None: none is known."""
    return next(
        (f"{name}:{info[name]}" for name in _VERSION_FIELDS if info.get(name) not in (None, "")), None
    )


def is_same_version(version: str, other: str) -> bool:
    """Return True for equal versions; a time may be a number in one and text in the other.

    fsspec's files in memory have both forms, in listings and in the metadata of one file.
    """
    if version == other:
        return True
    (field, _, value), (other_field, _, other_value) = version.partition(":"), other.partition(":")
    try:
        return field == other_field and abs(_seconds(value) - _seconds(other_value)) < 1e-5
    except ValueError:
        return False


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _content_hash(info: dict[str, Any]) -> str:
    """Return the hash of the content in metadata of Google Cloud Storage, Hugging Face or HTTP."""
    if digest := info.get("md5Hash") or info.get("Content-MD5"):
        with suppress(ValueError):  # a server may send anything
            return "md5:" + base64.b64decode(digest, validate=True).hex()
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return f"sha256:{sha256}" if sha256 else ""
