"""Which documents a text entry means: files, folders, globs, any fsspec URL, or 'stdlib'.

A document is one file. The list is the same on every machine that sees the same files: each entry's files are
sorted by their path below it, and a file that two entries name counts once. No torch here.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from wanma.job.errors import JobError, WanmaError

STDLIB = "stdlib"
"""The entry that every machine with Python can train on: the standard library's own source."""

_NOT_SOURCE = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config-*")
_NOT_PORTABLE = "_sysconfigdata*"
"""Written when a Python is built: different on every machine."""
_VERSIONS = (
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
    """One file of text and what identifies its content without reading it."""

    filesystem: Any
    """The fsspec filesystem that holds it."""
    path: str
    url: str
    size: int
    """Bytes as stored."""
    version: str
    """Changes when the content does: the store's tag, the modification time, or a hash of the content."""
    explicit: bool
    """Named by itself in the job; files found in folders and globs are left out when they are binary."""
    key: str
    """The job file's key that asked for it, for messages."""

    def pieces(self, size: int = 1 << 20) -> Iterator[bytes]:
        """The content in pieces of about `size` bytes that end with a line where there are lines, and never
        inside a UTF-8 character; decompressed when the name ends in .gz, .bz2 or .xz.

        Raises:
            WanmaError: missing, forbidden or broken; names the key and the file.
        """
        try:
            with self.filesystem.open(self.path, "rb", compression="infer") as stream:
                rest = b""
                while block := stream.read(size):
                    rest += block
                    cut = _cut(rest)
                    if cut:
                        yield rest[:cut]
                        rest = rest[cut:]
                if rest:
                    yield rest
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise _unreadable(self.url, self.key, error) from error


def _cut(text: bytes) -> int:
    """Where a piece may end: after the last line, else before a last character that may be incomplete."""
    if newline := text.rfind(b"\n") + 1:
        return newline
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:  # the first byte of the last character
            return len(text) - back
    return len(text)


def list_documents(entries: Sequence[str], key: str = "data.text") -> list[Document]:
    """The documents that `entries` mean, in the order of training.

    Raises:
        JobError: an entry that is missing, matches nothing, or whose storage is unknown.
        WanmaError: storage that cannot be read, or documents without a single byte.
    """
    documents: dict[str, Document] = {}
    for number, entry in enumerate(entries):
        for document in _expand(entry, f"{key}[{number}]"):
            documents.setdefault(document.url, document)
    if not any(document.size for document in documents.values()):
        raise WanmaError(
            f"{key}: the corpus is empty: {len(documents)} files, 0 bytes ({', '.join(entries)})",
            "name files or folders with text, or use ['stdlib']",
        )
    return list(documents.values())


def _expand(entry: str, key: str) -> list[Document]:
    if entry == STDLIB:
        return _standard_library(key)
    try:
        filesystem, path = url_to_fs(entry)
        if filesystem.isfile(path):
            return [_document(filesystem, path, filesystem.info(path), True, key)]
        if filesystem.isdir(path):
            found = _below(filesystem, path)
            if not found:
                raise JobError(
                    f"{key}: no file in the folder '{entry}'", "files with a leading dot do not count"
                )
        elif any(character in path for character in "*?["):
            found = filesystem.glob(path, detail=True)
            found = {name: info for name, info in found.items() if info["type"] == "file"}
            if not found:
                raise JobError(f"{key}: no file matches '{entry}'", "check the pattern; '**' crosses folders")
        else:
            raise JobError(f"{key}: '{entry}' does not exist", "paths are relative to where wanma is started")
    except (OSError, ImportError, ValueError) as error:
        raise _unreadable(entry, key, error) from error
    return [_document(filesystem, name, found[name], False, key) for name in sorted(found)]


def _below(filesystem: Any, folder: str) -> dict[str, Any]:
    """Files below `folder`, without hidden ones. A local folder that cannot be entered is an error."""
    strict = {"on_error": "raise"} if "file" in _protocols(filesystem) else {}
    found = filesystem.find(folder, detail=True, **strict)
    start = len(folder.rstrip("/"))
    return {name: info for name, info in found.items() if "/." not in name[start:]}


def _standard_library(key: str) -> list[Document]:
    root = sysconfig.get_paths()["stdlib"]
    filesystem = fsspec.filesystem("file")
    found = []
    for folder, folders, names in os.walk(
        root
    ):  # not `find`: installed packages may be a hundred times as many
        folders[:] = [name for name in folders if not any(fnmatch(name, not_) for not_ in _NOT_SOURCE)]
        found += [
            f"{folder}/{name}" for name in names if name.endswith(".py") and not fnmatch(name, _NOT_PORTABLE)
        ]
    if not found:
        raise JobError(
            f"{key}: this Python comes without the source of its standard library ({root})",
            "name text files instead",
        )
    return [_document(filesystem, name, filesystem.info(name), False, key) for name in sorted(found)]


def _document(filesystem: Any, path: str, info: dict[str, Any], explicit: bool, key: str) -> Document:
    version = next((f"{name}:{info[name]}" for name in _VERSIONS if info.get(name) is not None), None)
    if version is None or info.get("size") is None:  # plain web servers may tell neither
        content = filesystem.cat_file(path)
        info = {**info, "size": len(content)}
        version = "content:" + hashlib.sha256(content).hexdigest()
    url = filesystem.unstrip_protocol(path)
    return Document(filesystem, path, url, int(info["size"]), version, explicit, key)


def _unreadable(name: str, key: str, error: Exception) -> WanmaError:
    if isinstance(error, PermissionError):
        return WanmaError(
            f"{key}: no permission to read '{name}'", "change the file's permissions or leave it out"
        )
    if isinstance(error, ImportError):
        return JobError(f"{key}: '{name}' needs a package that is not installed: {error}")
    if isinstance(error, ValueError):
        return JobError(f"{key}: '{name}' is no path or URL that can be read: {error}", _known_protocols())
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return WanmaError(f"{key}: cannot read '{name}': {cause}")


def _known_protocols() -> str:
    return "URLs start with one of " + ", ".join(
        f"{name}://" for name in ("file", "memory", "http", "s3", "gs", "hf")
    )


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def filesystem_to_json(filesystem: Any) -> str:
    """For a process that reads on our behalf; the inverse is `filesystem_from_json`."""
    text: str = filesystem.to_json()
    return text


def filesystem_from_json(text: str) -> Any:
    return fsspec.AbstractFileSystem.from_json(text)
