"""Token files: a corpus encoded once, memory-mapped by every rank, complete or absent.

One folder per (documents, tokenizer, format), named by their identity:

    tokens.bin      every document's tokens and its end-of-document token, uint16 or uint32, little endian
    offsets.bin     int64: document i is tokens[offsets[i] : offsets[i + 1]]
    digests.bin     uint64: a hash of each document's content, which decides its side of the split
    header.json     format, sizes and SHA-256 of the three, and the hash of all: equal where the data is equal
    verified.json   files (size, times, inode) whose hashes were verified; a changed file is hashed again

A folder appears by one rename after everything in it has reached the disk. The lock of a builder dies with
its process, so a half-built folder belongs to no one and the next builder removes it. No torch here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.text.content_detection import unsupported_content_error
from wanma.data.text.documents import Document
from wanma.data.text.tokenization import Progress, TokenFileWriter, tokenize_documents
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import JobError, WanmaError
from wanma.job.run.run_directory import write_json

_FORMAT = "wanma-tokens"
_VERSION = 1
_FILES = ("tokens.bin", "offsets.bin", "digests.bin")

log = logging.getLogger("wanma.data")


class TokenFileCorruptError(Exception):
    """Error: a token folder contradicts its header; the message is the reason."""


@dataclass(frozen=True)
class TokenFile:
    """Open token file. The arrays are memory-mapped and read-only."""

    folder: Path
    header: dict[str, Any]
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]

    @property
    def fingerprint(self) -> str:
        """Hash of the content: equal on every node that has the same tokens."""
        return str(self.header["data_hash"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document, including its end."""
        return np.diff(self.offsets)


def open_or_build_token_file(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    cache_folder: Path,
    progress: Progress | None = None,
    process_count: int | None = None,
) -> TokenFile:
    """Open the token file of `documents`, building it first when it is missing or damaged.

    Safe to call from many processes at once: one builds, the others wait and open its result.

    Args:
        documents: the corpus, in order.
        tokenizer: the tokenizer.
        cache_folder: folder of token files.
        progress: called with (bytes done, bytes in all) while building.
        process_count: encoding processes; default: by the size of the corpus and the usable cores.

    Raises:
        WanmaError: a document cannot be read, the disk is full, or the cache cannot be written to.
    """
    folder = cache_folder / "tokens" / _cache_key(documents, tokenizer)
    with _explain_disk_errors(folder.parent):
        with suppress(FileNotFoundError, TokenFileCorruptError):
            return open_token_file(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):  # look again: the last holder may have built or repaired the file
            try:
                return open_token_file(folder)
            except FileNotFoundError:
                pass
            except TokenFileCorruptError as error:
                log.warning("token file %s is damaged (%s) and is built again", folder, error)
                shutil.rmtree(folder)
            _build(folder, documents, tokenizer, progress, process_count)
            return open_token_file(folder)


def open_token_file(folder: Path) -> TokenFile:
    """Map a token folder after verifying it.

    Raises:
        FileNotFoundError: no such folder.
        TokenFileCorruptError: sizes or hashes differ from the header's.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        if (header["format"], header["version"]) != (_FORMAT, _VERSION):
            raise TokenFileCorruptError(f"its format is {header['format']} {header['version']}")
        _verify(folder, header)
        tokens = np.memmap(folder / "tokens.bin", dtype=header["dtype"], mode="r")
        offsets = np.memmap(folder / "offsets.bin", dtype="<i8", mode="r")
        digests = np.memmap(folder / "digests.bin", dtype="<u8", mode="r")
    except (ValueError, KeyError, TypeError) as error:
        raise TokenFileCorruptError(f"its header cannot be read: {error!r}") from error
    except FileNotFoundError as error:
        raise TokenFileCorruptError(f"{Path(error.filename).name} is missing") from error
    return TokenFile(folder, header, tokens, offsets, digests)


def _verify(folder: Path, header: dict[str, Any]) -> None:
    """Compare sizes and hashes; hash only files that have changed since they were last verified."""
    file_stats = {name: _stat(folder / name) for name in _FILES}
    for name in _FILES:
        if not (folder / name).is_file():
            raise TokenFileCorruptError(f"{name} is not a file")
        if file_stats[name][0] != header["files"][name]["size"]:
            raise TokenFileCorruptError(
                f"{name} has {file_stats[name][0]} bytes, not {header['files'][name]['size']}"
            )
    stamp_file = folder / "verified.json"
    with suppress(FileNotFoundError, ValueError):  # without a readable stamp, hash
        if json.loads(stamp_file.read_text(encoding="utf-8")) == file_stats:
            return
    for name in _FILES:
        with (folder / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != header["files"][name]["sha256"]:
                raise TokenFileCorruptError(f"the content of {name} does not match its hash")
    with suppress(OSError):  # a shared cache may be read-only, or full: then each opening hashes
        write_json(stamp_file, file_stats)


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _cache_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """Return the folder's name: a hash of everything that determines the tokens, documents unread."""
    document_keys = [
        [document.url, document.size, document.version, document.is_named] for document in documents
    ]
    text = json.dumps([_FORMAT, _VERSION, tokenizer.fingerprint, document_keys])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _build(
    folder: Path,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    progress: Progress | None,
    process_count: int | None,
) -> None:
    build_folder = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(build_folder, ignore_errors=True)  # of a builder that died: we hold the lock
    build_folder.mkdir()
    try:
        with TokenFileWriter(build_folder / "tokens.bin", tokenizer.dtype) as writer:
            result = tokenize_documents(documents, tokenizer, writer, build_folder, progress, process_count)
        if not result.lengths:
            raise JobError(
                f"{documents[0].job_key}: the corpus is empty: none of {len(documents)} files contains text "
                f"({result.binary_files} are binary)",
                "name files or folders with text, or use ['stdlib']",
            )
        if 2 * result.json_record_files > len(
            result.lengths
        ):  # a few data files among much else are accepted
            raise unsupported_content_error(
                documents[0].job_key, f"most of {len(documents)} files", "records", ""
            )
        offsets = np.concatenate([[0], np.cumsum(result.lengths, dtype=np.int64)])
        hashes = {
            "tokens.bin": writer.sha256,
            "offsets.bin": _write_array(build_folder / "offsets.bin", offsets.astype("<i8")),
            "digests.bin": _write_array(build_folder / "digests.bin", np.array(result.digests, dtype="<u8")),
        }
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "dtype": tokenizer.dtype.str,
            "tokens": int(offsets[-1]),
            "documents": len(result.lengths),
            "vocabulary": tokenizer.vocabulary_size,
            "end_of_document": tokenizer.end_of_document_id,
            "tokenizer": tokenizer.fingerprint,
            "skipped": {"binary": result.binary_files, "empty": result.empty_files},
            "not_utf8": result.non_utf8_documents,
            "files": {
                name: {"size": (build_folder / name).stat().st_size, "sha256": hashes[name]}
                for name in _FILES
            },
            "data_hash": hashlib.sha256(
                "".join([tokenizer.fingerprint, *hashes.values()]).encode()
            ).hexdigest(),
        }
        write_json(build_folder / "header.json", header)
        _sync(build_folder / "header.json")
        _sync(build_folder)
        write_json(build_folder / "verified.json", {name: _stat(build_folder / name) for name in _FILES})
        build_folder.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(build_folder, ignore_errors=True)  # the first error is the one to report
        raise


def _write_array(path: Path, array: NDArray[Any]) -> str:
    content = array.tobytes()
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(content).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock as the only builder of `folder`. The kernel drops the lock of a process that dies."""
    with folder.with_name(f"{folder.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            log.info("waiting for process %s, which builds the token file %s", file.read() or "?", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _explain_disk_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors, such as a full disk or a read-only cache, to a WanmaError with the cause."""
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(_nearest_existing_folder(folder)).free
        raise WanmaError(
            f"cannot keep token files in {folder}: {error.strerror or error} ({free_bytes / 2**20:,.0f} MiB "
            "free)",
            "free space, or choose another folder with data.cache; incomplete files were removed",
        ) from error


def _nearest_existing_folder(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
