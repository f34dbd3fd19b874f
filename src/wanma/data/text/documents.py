"""Documents of a text entry: files, folders, globs, any fsspec URL, or 'stdlib'.

A document is one file. The list is the same on every node that sees the same files: each entry's files are
sorted by their path below it, and a file that two entries name counts once. No torch here.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import get_filesystem_class, url_to_fs
from fsspec.utils import get_protocol

from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import STORAGE_RETRY_POLICY, RetryingFile, retry

STANDARD_LIBRARY = "stdlib"
"""Name of the entry that every node with Python has: the standard library's own source."""

_EXCLUDED_SOURCES = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "config-*",
)
_NODE_SPECIFIC_FILES = "_sysconfigdata*"
"""Pattern of files written when a Python is built: different on every node."""
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "md5Hash",
    "checksum",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


@dataclass(frozen=True)
class Document:
    """Text file, with an identity of its content that needs no reading."""

    filesystem: Any
    """Filesystem (fsspec) that holds the file."""
    path: str
    url: str
    size: int
    """Size in bytes as stored."""
    version: str
    """Version of the content: the store's tag, the modification time, or a hash of the content."""
    is_named: bool
    """True if the job names the file itself; binary files found in folders and globs are skipped."""
    job_key: str
    """Key of the job file that names it, for messages."""

    def read_chunks(self, chunk_size: int = 1 << 20) -> Iterator[bytes]:
        """Yield the content in pieces of about `chunk_size` bytes.

        They end with a line where there are lines, and never inside a UTF-8 character; decompressed when the
        name ends in .gz, .bz2 or .xz.

        Raises:
            WanmaError: missing, forbidden or broken; names the key and the file.
        """
        try:
            with self._open() as stream:
                buffer = stream.read(chunk_size)
                while block := stream.read(
                    chunk_size
                ):  # the last piece is never cut: small files are one piece
                    buffer += block
                    if end := _chunk_end(buffer):
                        yield buffer[:end]
                        buffer = buffer[end:]
                if buffer:
                    yield buffer
        except Exception as error:  # a storage library may raise anything
            raise _unreadable(self.url, self.job_key, error) from error

    def _open(self) -> IO[bytes] | RetryingFile:
        def open_file() -> IO[bytes]:
            stream: IO[bytes] = self.filesystem.open(self.path, "rb", compression="infer")
            return stream

        return open_file() if is_local(self.filesystem) else RetryingFile(open_file, STORAGE_RETRY_POLICY)


def _chunk_end(text: bytes) -> int:
    """Return the end of a piece: after the last line, else before a possibly incomplete last character."""
    if newline := text.rfind(b"\n") + 1:
        return newline
    for distance in range(1, min(3, len(text)) + 1):
        if text[-distance] & 0xC0 != 0x80:  # the first byte of the last character gives its length
            size = 1 + (text[-distance] >= 0xC0) + (text[-distance] >= 0xE0) + (text[-distance] >= 0xF0)
            return len(text) - distance if size > distance else len(text)
    return len(text)


def list_documents(entries: Sequence[str], key: str = "data.text") -> list[Document]:
    """List the documents of `entries`, in the order of training.

    Raises:
        JobError: an entry that is missing, matches nothing, or whose storage is unknown; documents
            without a single byte.
        WanmaError: storage that cannot be read.
    """
    documents: dict[str, Document] = {}
    for number, entry in enumerate(entries):
        for document in _expand_entry(entry, f"{key}[{number}]"):
            documents.setdefault(document.url, document)
    if not any(document.size for document in documents.values()):
        raise JobError(
            f"{key}: the corpus is empty: 0 bytes in all files of {', '.join(entries)}",
            "name files or folders with text, or use ['stdlib']",
        )
    return list(documents.values())


def _expand_entry(entry: str, key: str) -> list[Document]:
    if entry == STANDARD_LIBRARY:
        return _standard_library(key)
    if not entry.strip():
        raise JobError(f"{key} is empty text", "name a file, a folder ('.' is this one), a glob or a URL")
    try:
        filesystem, path = url_to_fs(entry)
        if is_local(filesystem):
            return _resolve_entry(filesystem, path, entry, key)
        return retry(lambda: _resolve_entry(filesystem, path, entry, key), STORAGE_RETRY_POLICY)
    except WanmaError:
        raise
    except Exception as error:  # a storage library may raise anything
        raise _unreadable(entry, key, error) from error


def _resolve_entry(filesystem: Any, path: str, entry: str, key: str) -> list[Document]:
    is_pattern = any(character in path for character in "*?[")
    info = _info(filesystem, path, is_pattern)
    if info is not None and info["type"] == "file":
        return [_document(filesystem, path, info, True, key)]
    if info is not None:
        files = _list_folder(filesystem, path)
        if not files:
            raise JobError(
                f"{key}: no file in the folder '{entry}'",
                "add text files; files with a leading dot are ignored",
            )
    elif is_pattern:
        files = _glob(filesystem, path)
        if not files:
            raise JobError(f"{key}: no file matches '{entry}'", "check the pattern; '**' crosses folders")
    else:
        raise JobError(f"{key}: '{entry}' does not exist", "paths are relative to where wanma is started")
    return [_document(filesystem, name, files[name], False, key) for name in sorted(files)]


def _info(filesystem: Any, path: str, is_pattern: bool) -> dict[str, Any] | None:
    """Return the entry at `path`; None: no entry. fsspec's `isfile` mistakes a failure for an absence."""
    try:
        info: dict[str, Any] = filesystem.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception:
        if is_pattern:  # servers may refuse its characters; the search reports other errors
            return None
        raise
    return info


def _glob(filesystem: Any, pattern: str) -> dict[str, Any]:
    """Return the files that match, with their metadata."""
    try:
        matches = filesystem.glob(pattern, detail=True, **_strict_listing_options(filesystem))
    except FileNotFoundError:
        return {}
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


def _list_folder(filesystem: Any, folder: str) -> dict[str, Any]:
    """Return the files below `folder` with their metadata, without hidden ones."""
    if is_local(filesystem):
        return {name: filesystem.info(name) for name in _walk_local(folder, (".*",))}
    start = len(folder.rstrip("/"))
    files = filesystem.find(folder, detail=True, **_strict_listing_options(filesystem))
    return {name: info for name, info in files.items() if "/." not in name[start:]}


def _standard_library(key: str) -> list[Document]:
    root = sysconfig.get_paths()["stdlib"]
    filesystem = fsspec.filesystem("file")
    paths = [
        name for name in _walk_local(root, (*_EXCLUDED_SOURCES, _NODE_SPECIFIC_FILES)) if name.endswith(".py")
    ]
    if not paths:
        raise JobError(
            f"{key}: the source of the standard library is missing in this Python ({root})",
            "name text files instead",
        )
    return [_document(filesystem, name, filesystem.info(name), False, key) for name in sorted(paths)]


def _walk_local(root: str, excluded_names: tuple[str, ...]) -> Iterator[str]:
    """Yield local files below `root`; folders and files with names in `excluded_names` are skipped.

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
        folders[:] = sorted(name for name in folders if not _matches(name, excluded_names))
        yield from (f"{folder}/{name}" for name in names if not _matches(name, excluded_names))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _document(filesystem: Any, path: str, info: dict[str, Any], is_named: bool, job_key: str) -> Document:
    version = next((f"{name}:{info[name]}" for name in _VERSION_FIELDS if info.get(name) is not None), None)
    if version is None or info.get("size") is None:  # plain web servers may report neither
        content = filesystem.cat_file(path)
        info = {**info, "size": len(content)}
        version = "content:" + hashlib.sha256(content).hexdigest()
    url = filesystem.unstrip_protocol(path)
    return Document(filesystem, path, url, int(info["size"]), version, is_named, job_key)


def _unreadable(name: str, key: str, error: Exception) -> WanmaError:
    if isinstance(error, PermissionError):
        return WanmaError(
            f"{key}: no permission to read '{name}'", "change the permissions of the file, or exclude it"
        )
    if isinstance(error, ImportError):
        return JobError(f"{key}: '{name}' needs a package that is not installed: {error}")
    if isinstance(error, ValueError):
        return JobError(f"{key}: '{name}' is not a readable path or URL: {error}", _known_protocols())
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return WanmaError(f"{key}: cannot read '{name}': {cause}")


def _known_protocols() -> str:
    return "URLs start with one of " + ", ".join(
        f"{name}://" for name in ("file", "memory", "http", "s3", "gs", "hf")
    )


def is_local(filesystem: Any) -> bool:
    """Return True for local storage, whose failures persist: only network access is retried."""
    return "file" in _protocols(filesystem)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def uses_async_filesystem(entry: str) -> bool:
    """Return True if reading `entry` starts fsspec's thread for asynchronous storage (s3, gs, http etc.)."""
    for part in entry.split("::"):
        protocol = get_protocol(part)
        try:
            if protocol != "file" and get_filesystem_class(protocol).async_impl:
                return True
        except (ImportError, ValueError):
            return False  # cannot be read at all, which `list_documents` reports better
    return False


def filesystem_to_json(filesystem: Any) -> str:
    """Serialize a filesystem for a process that reads on our behalf; inverse of `filesystem_from_json`."""
    text: str = filesystem.to_json()
    return text


def filesystem_from_json(text: str) -> Any:
    return fsspec.AbstractFileSystem.from_json(text)
