"""Token files: a corpus encoded once, memory-mapped by every rank, complete or absent.

One folder per (documents, tokenizer, format), named by their identity:

    tokens.bin      every document's tokens and its end-of-document token, uint16 or uint32, little endian;
                    missing where a local file holds them in this form, which is then mapped as it is
    offsets.bin     int64: document i is tokens[offsets[i] : offsets[i + 1]]
    digests.bin     uint64: a hash of each document's content, which decides its side of the split
    header.json     format, sizes and SHA-256 of the three, and the hash of all: equal where the data is equal
    verified.json   files (size, times, inode) whose hashes were verified; a changed file is hashed again

A folder appears by one rename after everything in it has reached the disk. The lock of a builder dies with
its process; the next builder goes on with what it has left. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.documents.corpus_acceptance import (
    accept_documents,
    document_key,
    entries_identity,
    report_unused,
    unused_notes,
)
from wanma.data.documents.document_groups import DocumentGroup
from wanma.data.index.build import Progress
from wanma.data.index.layout_file import hash_json
from wanma.data.stores.atomic_file import sync_to_disk
from wanma.data.stores.byte_source import FileWatch
from wanma.data.stores.file_locks import exclusive_lock
from wanma.data.stores.listing import StoredFile
from wanma.data.text.encoding_task import (
    EncodingResult,
    ReadingSettings,
    check_bad_limit,
    check_corpus,
)
from wanma.data.text.part_writer import TOKEN_FILES, JournalMismatchError, TokenFileWriter
from wanma.data.text.stored_tokens import StoredTokens, find_stored_tokens
from wanma.data.text.tokenization import tokenize_documents
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_json

_FORMAT = "wanma-tokens"
_VERSION = 1
_LISTED_BAD_ROWS = 1000
_ABANDONED_SECONDS = 7 * 24 * 3600.0
"""Age of an unfinished token file from which on nobody is expected to go on with it."""

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
    watch: FileWatch = field(default_factory=FileWatch)
    """Watch over the user's file, if its tokens are mapped and not copied."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content: equal on every node that has the same tokens."""
        return str(self.header["data_hash"])

    @property
    def bad_rows(self) -> list[list[Any]]:
        """Bad rows and files that were left out: address, row (None: the whole file), cause; up to 1,000."""
        return list(self.header.get("bad_rows", {}).get("listed", []))

    @property
    def bad_row_count(self) -> int:
        """Number of all bad rows and files that were left out."""
        return int(self.header.get("bad_rows", {}).get("count", 0))

    @property
    def is_chat(self) -> bool:
        """True if the documents are conversations, whose tokens carry the mark `NO_TARGET`."""
        return bool(self.header.get("is_chat", False))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document, including its end."""
        return np.diff(self.offsets)


def open_or_build_token_file(
    documents: Sequence[StoredFile],
    tokenizer: Tokenizer,
    cache_folder: Path,
    progress: Progress | None = None,
    process_count: int | None = None,
    settings: ReadingSettings | None = None,
) -> TokenFile:
    """Open the token file of `documents`, building it first when it is missing or damaged.

    Safe to call from many processes at once: one builds, the others wait and open its result.

    Args:
        settings: keys of the job that decide what the documents are; default: the job's defaults.

    Raises:
        WanmaError: a document cannot be read, the disk is full, or the cache cannot be written to.
    """
    settings = settings or ReadingSettings()
    folder = token_folder(documents, tokenizer, cache_folder, settings)
    corpus = _Corpus(documents, tokenizer, settings, progress, process_count)
    with _explain_disk_errors(folder.parent):
        file = _open_or_build(folder, corpus)
    check_bad_limit(file.bad_row_count, file.bad_rows, settings)
    return file


def token_folder(
    documents: Sequence[StoredFile], tokenizer: Tokenizer, cache_folder: Path, settings: ReadingSettings
) -> Path:
    """Return the folder of a token file, which exists once it is complete; arguments as of its opening."""
    return cache_folder / "tokens" / _cache_key(documents, tokenizer, settings)


@dataclass(frozen=True)
class _Corpus:
    """Arguments of `open_or_build_token_file`."""

    documents: Sequence[StoredFile]
    tokenizer: Tokenizer
    settings: ReadingSettings
    progress: Progress | None
    process_count: int | None


def _open_or_build(folder: Path, corpus: _Corpus) -> TokenFile:
    with suppress(FileNotFoundError, TokenFileCorruptError):
        return open_token_file(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _builder_lock(folder):
        # Look again: the last holder may have built or repaired the file.
        try:
            return open_token_file(folder)
        except FileNotFoundError:
            pass
        except TokenFileCorruptError as error:
            log.warning("token file %s is damaged (%s) and is built again", folder, error)
            shutil.rmtree(folder)
        _build(folder, corpus)
        return open_token_file(folder)


@contextmanager
def _builder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the only builder of a token file."""
    path = _lock_path(folder)
    with exclusive_lock(path, 0) as descriptor:
        if descriptor is not None:
            yield
            return
    log.info("waiting for another process, which builds the token file %s", folder)
    with exclusive_lock(path, math.inf):
        yield


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_abandoned_builds(folder: Path) -> None:
    """Remove unfinished token files of `folder` that killed builders left and nobody went on with for a week.

    Those of builders that live are locked. A failure is left to the next one that tries.
    """
    for build in folder.glob("*.building"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (build, *build.iterdir()))
            if time.time() - newest < _ABANDONED_SECONDS:
                continue
            with exclusive_lock(_lock_path(build.with_suffix("")), 0) as descriptor:
                if descriptor is not None:
                    shutil.rmtree(build)
                    log.info("%s was left unfinished, and is removed", build)


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
        stored = StoredTokens(**header["stored_tokens"]) if "stored_tokens" in header else None
        watch = FileWatch([Path(stored.path)] if stored is not None else [])
        _verify(folder, header, stored)
        tokens: NDArray[Any]
        if stored is not None:
            tokens = stored.map(header["dtype"])
        else:
            tokens = np.memmap(folder / "tokens.bin", dtype=header["dtype"], mode="r")
        offsets = np.memmap(folder / "offsets.bin", dtype="<i8", mode="r")
        digests = np.memmap(folder / "digests.bin", dtype="<u8", mode="r")
    except (ValueError, KeyError, TypeError) as error:
        raise TokenFileCorruptError(f"its header cannot be read: {error!r}") from error
    except FileNotFoundError as error:
        raise TokenFileCorruptError(f"{Path(error.filename).name} is missing") from error
    return TokenFile(folder, header, tokens, offsets, digests, watch)


def _verify(folder: Path, header: dict[str, Any], stored: StoredTokens | None) -> None:
    """Compare sizes and hashes; hash only files that have changed since they were last verified."""
    paths = {name: folder / name for name in TOKEN_FILES}
    if stored is not None:
        paths["tokens.bin"] = Path(stored.path)
    file_stats = {name: _stat(path) for name, path in paths.items()}
    for name, path in paths.items():
        if not path.is_file():
            raise TokenFileCorruptError(f"{name} is not a file")
        size, listed_size = file_stats[name][0], header["files"][name]["size"]
        if path.parent == folder and size != listed_size:  # a mapped range is hashed, or its file has changed
            raise TokenFileCorruptError(f"{name} has {size} bytes, not {listed_size}")
    stamp_file = folder / "verified.json"
    with suppress(FileNotFoundError, ValueError):  # without a readable stamp, hash
        if json.loads(stamp_file.read_text(encoding="utf-8")) == file_stats:
            return
    for name, path in paths.items():
        if stored is not None and name == "tokens.bin":
            digest = stored.sha256()
        else:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != header["files"][name]["sha256"]:
            raise TokenFileCorruptError(f"the content of {path.name} does not match its hash")
    with suppress(OSError):  # a shared cache may be read-only, or full: then each opening hashes
        write_json(stamp_file, file_stats)


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _cache_key(documents: Sequence[StoredFile], tokenizer: Tokenizer, settings: ReadingSettings) -> str:
    """Return the folder's name: a hash of everything that determines the tokens, documents unread.

    Keys of the job that have their default are not part of it, so that older token files stay in use.
    """
    document_keys = [document_key(document) for document in documents]
    others = [*settings.identity, *entries_identity(documents)]
    if settings.is_chat and tokenizer.chat is not None:
        others.append(tokenizer.chat.fingerprint)
    return hash_json([_FORMAT, _VERSION, tokenizer.fingerprint, document_keys, *others])


def _build(folder: Path, corpus: _Corpus) -> None:
    """Build a token file; after an interruption or a failure of a store the work that is done stays.

    Bad data and a full disk leave nothing: another try would begin with other data, or needs the space.
    """
    build_folder = folder.with_name(f"{folder.name}.building")
    build_folder.mkdir(exist_ok=True)
    _remove([*build_folder.glob("part-*"), *build_folder.glob("tokenizer-*")])  # not joined yet
    _remove_abandoned_builds(folder.parent)
    corpus = replace(corpus, settings=replace(corpus.settings, cache_folder=str(build_folder / "blocks")))
    documents, tokenizer, settings = corpus.documents, corpus.tokenizer, corpus.settings
    try:
        groups, unused = accept_documents(
            documents,
            settings.text_field,
            settings.opener(documents),
            is_chat=settings.is_chat,
            format_name=settings.format_name,
        )
        notes = unused_notes(unused, settings.text_field)
        report_unused(documents, notes)
        stored = None if settings.is_chat else find_stored_tokens(groups, tokenizer)
        built = _encode(build_folder, groups, corpus, stored)
        if stored is not None and built.hashes["tokens.bin"] != stored.sha256():  # a document was left out
            stored = None
            built = _encode(build_folder, groups, corpus, stored)
        reasons = "; ".join(one.describe(settings.text_field) for one in unused)
        check_corpus(documents, built.result, reasons)
        header = _header(build_folder, groups, tokenizer, built, stored)
        if settings.is_chat:
            header |= {"dtype": settings.token_dtype(tokenizer).str, "is_chat": True}
            header["targets"] = built.result.targets
        header["notes"] = notes
        write_json(build_folder / "header.json", header)
        kept = (*TOKEN_FILES, "header.json", "verified.json")
        _remove(path for path in build_folder.iterdir() if path.name not in kept)
        sync_to_disk(build_folder / "header.json")
        sync_to_disk(build_folder)
        paths = {name: build_folder / name for name in TOKEN_FILES}
        if stored is not None:
            paths["tokens.bin"] = Path(stored.path)
        write_json(build_folder / "verified.json", {name: _stat(path) for name, path in paths.items()})
        build_folder.rename(folder)
        sync_to_disk(folder.parent)
    except BaseException as error:
        is_final = isinstance(error, OSError) or getattr(error, "exit_code", 0) == EXIT_USAGE
        if is_final or not _has_parts(build_folder):
            shutil.rmtree(build_folder, ignore_errors=True)  # the first error is the one to report
        raise


@dataclass(frozen=True)
class _Built:
    """Files of a token file, without its header."""

    result: EncodingResult
    hashes: dict[str, str]
    tokens: int


def _encode(
    folder: Path, groups: Sequence[DocumentGroup], corpus: _Corpus, stored: StoredTokens | None
) -> _Built:
    """Write the three files; parts that a killed builder has left are kept."""
    tokenizer, settings = corpus.tokenizer, corpus.settings
    identity = {"tokenizer": tokenizer.fingerprint, "settings": settings.identity}
    for is_last in (False, True):
        try:
            dtype = settings.token_dtype(tokenizer)
            with TokenFileWriter(folder, dtype, identity, stored is None) as writer:
                result = tokenize_documents(
                    groups, tokenizer, writer, settings, corpus.progress, corpus.process_count
                )
            return _Built(result, writer.hashes, writer.tokens)
        except JournalMismatchError:  # another version of wanma has cut the corpus into other tasks
            if is_last:
                raise
            (folder / "journal.jsonl").unlink()
    raise AssertionError("unreachable")


def _remove(paths: Iterable[Path]) -> None:
    """Remove files and folders."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _has_parts(build_folder: Path) -> bool:
    """Return True if a builder that goes on finds parts in the folder."""
    journal = build_folder / "journal.jsonl"
    return journal.exists() and journal.read_bytes().count(b"\n") > 1


def _header(
    folder: Path,
    groups: Sequence[DocumentGroup],
    tokenizer: Tokenizer,
    built: _Built,
    stored: StoredTokens | None,
) -> dict[str, Any]:
    """Return the content of header.json."""
    result, hashes = built.result, built.hashes
    sizes = {name: (folder / name).stat().st_size for name in TOKEN_FILES if (folder / name).exists()}
    if stored is not None:
        sizes["tokens.bin"] = stored.size
    header: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "dtype": tokenizer.dtype.str,
        "tokens": built.tokens,
        "documents": result.documents,
        "vocabulary": tokenizer.vocabulary_size,
        "end_of_document": tokenizer.end_of_document_id,
        "tokenizer": tokenizer.fingerprint,
        "skipped": {"binary": result.binary_files, "empty": result.empty_documents},
        "not_utf8": result.non_utf8_documents,
        "formats": dict(Counter(group.format_name or "text" for group in groups)),
        "bad_rows": {"count": len(result.bad_rows), "listed": result.bad_rows[:_LISTED_BAD_ROWS]},
        "files": {name: {"size": sizes[name], "sha256": hashes[name]} for name in TOKEN_FILES},
        "data_hash": hashlib.sha256("".join([tokenizer.fingerprint, *hashes.values()]).encode()).hexdigest(),
    }
    return header if stored is None else {**header, "stored_tokens": asdict(stored)}


@contextmanager
def _explain_disk_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors, such as a full disk or a read-only cache, to a WanmaError with the cause."""
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        raise WanmaError(
            f"cannot keep token files in {folder}: {error.strerror or error} ({free_bytes / 2**20:,.0f} MiB "
            "free)",
            "free space, or choose another folder with data.cache; incomplete files were removed",
        ) from error
