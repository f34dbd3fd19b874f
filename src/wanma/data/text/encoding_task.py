"""Task of encoding: some documents of a corpus, written as one part of its token file. No torch here.

A task takes plain text files, all rows of a group of files, or some of them. It runs in any process of the
node and gives the same part everywhere.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.cache.node_cache import opener_for
from wanma.data.chat.encoding import NO_TARGET, TOKEN_DTYPE, encode_conversation
from wanma.data.documents.content_detection import (
    detect_content,
    records_without_text_error,
    unsupported_content_error,
)
from wanma.data.documents.document_groups import DocumentGroup, openable_group, reading_format
from wanma.data.documents.record_fields import DEFAULT_TEXT_FIELD, field_value
from wanma.data.documents.rows import document_of, read_array, read_rows, row_batches
from wanma.data.documents.text_files import read_chunks
from wanma.data.formats.arrays import ArrayReader
from wanma.data.formats.format import BadDataError, FileGroup, Format, Layout, RowReader, row_place
from wanma.data.index.group_scan import open_or_scan
from wanma.data.stores.filesystems import is_local, is_shared_memory
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.remote_file import READ_RETRY_POLICY, FileOpener, OpenableFile
from wanma.data.text.document_encoding import (
    check_tokens,
    document_digest,
    encode_document,
    encode_lists,
    without_end,
)
from wanma.data.text.part_writer import PartWriter
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import JobError

TASK_BYTES = 1 << 20
"""Size of the plain text files of one task."""
_ROW_TASK_BYTES = 16 << 20
_SHOWN_BAD_ROWS = 3
_UNCUT_GROUP_BYTES = 64 << 20
"""Size of a group of files up to which one task reads it."""

BadRow = list[Any]
"""Address of a file, number of the row from 0 (None: the whole file), cause."""


@dataclass(frozen=True)
class ReadingSettings:
    """Keys of a job that decide what its documents are, and the cache of remote files."""

    text_field: str = DEFAULT_TEXT_FIELD
    """Field of records that holds the document: text, token ids, or the messages of a conversation."""
    bad_data: str | None = None
    """"refuse", "skip" or None: see `DataSection.bad_data`."""
    bad_data_limit: int = 100
    cache_bytes: int = 64 << 30
    """Limit of the node cache of remote files; 0: there is none."""
    retry_seconds: float = READ_RETRY_POLICY.deadline_seconds
    """Time for which a failed read of a store is tried again."""
    cache_folder: str = ""
    """Folder of the node cache: in that of the unfinished token file."""
    is_chat: bool = False
    """True if the documents are conversations."""
    format_name: str = ""
    """Format of all files; empty: found by their content."""

    @property
    def identity(self) -> list[Any]:
        """Keys that decide about the tokens, without those that have their default."""
        default = ReadingSettings()
        names = ("text_field", "bad_data", "is_chat", "format_name")
        return [[n, getattr(self, n)] for n in names if getattr(self, n) != getattr(default, n)]

    def token_dtype(self, tokenizer: Tokenizer) -> np.dtype[Any]:
        """Return the type of a stored token."""
        return TOKEN_DTYPE if self.is_chat else tokenizer.dtype

    def opener(self, files: Sequence[StoredFile]) -> FileOpener | None:
        """Return the node cache or store through which remote files are read; None: there is no such file."""
        filesystems = {id(file.filesystem): file.filesystem for file in files}
        is_remote = any(not is_local(one) and not is_shared_memory(one) for one in filesystems.values())
        return (
            opener_for(Path(self.cache_folder), self.cache_bytes, self.retry_seconds) if is_remote else None
        )


@dataclass(frozen=True)
class EncodingTask:
    """Documents that one process encodes: files of plain text, or rows [start, end) of a group."""

    group: DocumentGroup
    size: int
    """Stored bytes, about."""
    start: int = 0
    end: int | None = None
    """End of the rows; None: all rows."""

    @property
    def name(self) -> str:
        """Name that tells the task from the others of its corpus."""
        return f"{self.group.kind} {self.group.url} {len(self.group.files)} {self.start} {self.end}"


@dataclass
class EncodingResult:
    """Counts of one task or several."""

    documents: int = 0
    binary_files: int = 0
    empty_documents: int = 0
    non_utf8_documents: int = 0
    json_record_files: int = 0
    """Number of files with tokens that are JSON records and were read as plain text."""
    bad_rows: list[BadRow] = field(default_factory=list)
    targets: int = 0
    """Number of tokens of conversations that are targets."""

    def extend(self, other: EncodingResult) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def describe_bad_rows(rows: Sequence[BadRow]) -> str:
    """Return the first bad rows in words."""
    return "; ".join(f"{row_place(file, row)}: {cause}" for file, row, cause in rows[:_SHOWN_BAD_ROWS])


def check_bad_limit(count: int, rows: Sequence[BadRow], settings: ReadingSettings) -> None:
    """Refuse more bad rows than the job allows."""
    if count <= settings.bad_data_limit:
        return
    raise JobError(
        f"data.bad_data_limit: more than {settings.bad_data_limit} rows or files are bad: "
        f"{describe_bad_rows(rows)}",
        "correct them, or raise data.bad_data_limit",
    )


def check_corpus(documents: Sequence[StoredFile], result: EncodingResult, reasons: str) -> None:
    """Refuse a corpus without documents, or of records that were read as plain text for lack of the field.

    Args:
        reasons: formats of files that lack the field of the job, in words; empty: none.
    """
    key = documents[0].job_key
    if reasons and not result.documents:
        raise records_without_text_error(key, reasons)
    if not result.documents:
        bad = result.bad_rows
        bad_text = f", {len(bad)} rows or files are bad: {describe_bad_rows(bad)}" if bad else ""
        raise JobError(
            f"{key}: the corpus is empty: none of {len(documents)} files contains text "
            f"({result.binary_files} are binary{bad_text})",
            "correct them, or name another field with data.columns"
            if bad
            else "name files or folders with text, or use ['stdlib']",
        )
    if 2 * result.json_record_files > result.documents:  # a few data files among much else are accepted
        raise records_without_text_error(key, reasons or f"most of {len(documents)} files: JSON records")


def plan_tasks(
    groups: Sequence[DocumentGroup], folder: Path, settings: ReadingSettings
) -> Iterator[EncodingTask]:
    """Yield the tasks of a corpus in the order of its documents; large groups are scanned when their turn is.

    Args:
        folder: folder of layouts and plain copies; it goes away with the unfinished token file.
    """
    texts: list[StoredFile] = []
    size = 0
    for group in groups:
        is_text = group.kind == "text"
        if texts and (not is_text or size + group.size > TASK_BYTES):
            yield _text_task(texts, size)
            texts, size = [], 0
        if is_text:
            texts += group.files
            size += group.size
        else:
            yield from _row_tasks(group, folder, settings)
    if texts:
        yield _text_task(texts, size)


def run_task(
    task: EncodingTask, tokenizer: Tokenizer, part: Path, settings: ReadingSettings
) -> EncodingResult:
    """Encode the documents of a task, and write its part.

    Raises:
        BadDataError: bad data, which the job refuses.
        WanmaError: a file cannot be read.
        OSError: the part cannot be written.
    """
    opener = settings.opener(task.group.files)
    end = None if settings.is_chat else tokenizer.end_of_document_id
    with PartWriter(part, settings.token_dtype(tokenizer), end) as writer:
        encoder = _Encoder(tokenizer, writer, settings, opener)
        if task.group.kind == "text":
            for document in task.group.files:
                encoder.encode_file(document)
        else:
            scratch = part.with_name(f"{part.name}.plain")
            try:
                encoder.encode_rows(task, scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return encoder.result


def open_layout_of(group: FileGroup, data_format: Format, folder: Path) -> Layout:
    """Return the layout of a group, found by one process for all tasks that read it."""
    identity = hashlib.sha256(f"{group.url}\0{group.files[0].version}".encode("utf-8", "surrogatepass"))
    return open_or_scan(group, data_format, folder / "layouts" / f"{identity.hexdigest()[:32]}.layout")


def _text_task(files: Sequence[StoredFile], size: int) -> EncodingTask:
    return EncodingTask(DocumentGroup("text", tuple(files)), size)


def _row_tasks(group: DocumentGroup, folder: Path, settings: ReadingSettings) -> Iterator[EncodingTask]:
    """Cut a large group into tasks of some rows, at the bounds of its row groups if it is a table."""
    whole = EncodingTask(group, group.size)
    if group.kind == "array" or group.is_compressed or group.size <= _UNCUT_GROUP_BYTES:
        yield whole
        return
    opened = replace(openable_group(group, settings.opener(group.files)), scratch=folder / "plain")
    try:
        layout = open_layout_of(opened, reading_format(group), folder)
    except BadDataError:  # the task that reads it says so
        yield whole
        return
    for start, end in layout.cut(max(layout.rows * _ROW_TASK_BYTES // group.size, 1)):
        yield EncodingTask(group, group.size * (end - start) // layout.rows, start, end)


class _Encoder:
    """Encoder of documents into one part, which counts them."""

    def __init__(
        self, tokenizer: Tokenizer, writer: PartWriter, settings: ReadingSettings, opener: FileOpener | None
    ) -> None:
        self.result = EncodingResult()
        self._tokenizer, self._writer, self._settings, self._opener = tokenizer, writer, settings, opener

    def encode_file(self, document: StoredFile) -> None:
        """Encode a file of plain text as one document; a binary one is counted, or refused if named."""
        digest = hashlib.blake2b(digest_size=8)
        is_valid_utf8, is_detected, is_records, is_started = True, False, False, False
        checks_utf8 = self._tokenizer.needs_utf8 or self._settings.bad_data == "refuse"
        try:
            for piece in read_chunks(document, opener=self._opener):
                if not is_detected:
                    is_detected = True
                    content, name = detect_content(piece)
                    if content == "binary" and document.is_named:
                        raise unsupported_content_error(document.job_key, document.url, name)
                    if content == "binary":
                        self.result.binary_files += 1
                        return
                    is_records = content == "records" and self._settings.format_name != "text"
                digest.update(piece)
                if checks_utf8 and is_valid_utf8 and not _is_utf8(piece):
                    is_valid_utf8 = False
                    if self._settings.bad_data == "refuse":
                        raise BadDataError(OpenableFile(document).url, "invalid UTF-8")
                self._writer.write(self._tokenizer.encode(piece, continues=is_started))
                is_started = True
        except BadDataError as error:
            self._writer.discard_document()
            self._note_bad(document, error)
            return
        if self._end_document(int.from_bytes(digest.digest(), "little")):
            self.result.non_utf8_documents += not is_valid_utf8
            self.result.json_record_files += is_records

    def encode_rows(self, task: EncodingTask, scratch: Path) -> None:
        """Encode rows of a group of files.

        Args:
            scratch: folder for a plain copy of a compressed file.
        """
        group, document = task.group, task.group.files[0]
        data_format, is_part = reading_format(group), task.end is not None
        parent = scratch.parent
        opened = replace(
            openable_group(group, self._opener), scratch=parent / "plain" if is_part else scratch
        )
        try:
            layout = open_layout_of(opened, data_format, parent) if is_part else data_format.scan(opened)
            reader = data_format.open(opened, layout)
        except BadDataError as error:
            self._note_bad(document, error)
            return
        if isinstance(reader, ArrayReader) and group.kind == "array":
            self._encode_array(reader, group.column or "array", document)
            return
        name = {"megatron": "tokens", "numpy": group.column or "array"}.get(
            group.format_name, self._settings.text_field
        )
        end = reader.rows if task.end is None else task.end
        for rows in row_batches(task.start, end, group.size / max(reader.rows, 1)):
            if not self._encode_lists(reader, name, rows):
                self._encode_each(reader, name, rows, document)

    def _encode_lists(self, reader: RowReader, name: str, rows: range) -> bool:
        """Encode rows of token ids at once; return False where each row is to be looked at."""
        lists = None if self._settings.is_chat else reader.read_lists(name, rows.start, rows.stop)
        found = None if lists is None else encode_lists(lists, self._tokenizer)
        if found is None:
            return False
        self._writer.write_documents(*found)
        count = len(found[1])
        self.result.documents += count
        self.result.empty_documents += len(rows) - count
        return True

    def _encode_each(self, reader: RowReader, name: str, rows: range, document: StoredFile) -> None:
        for row, record in read_rows(reader, rows):
            try:
                if isinstance(record, BadDataError):
                    raise record
                self._encode_record(record, name)
            except BadDataError as error:
                self._note_bad(document, BadDataError(error.file, error.cause, row, error.hint))
            except ValueError as error:
                self._note_bad(document, BadDataError(OpenableFile(document).url, str(error), row))
            # An error, and no end of the part: another job with a higher limit would take it as whole.
            check_bad_limit(len(self.result.bad_rows), self.result.bad_rows, self._settings)

    def _encode_record(self, record: dict[str, Any], name: str) -> None:
        if self._settings.is_chat:
            conversation = encode_conversation(field_value(record, name), self._tokenizer)
            self._writer.write(conversation)
            digest = hashlib.blake2b(conversation.tobytes(), digest_size=8).digest()
            self._end_document(int.from_bytes(digest, "little"))
            self.result.targets += int((conversation < NO_TARGET).sum())
            return
        content = document_of(record, name)
        try:
            for tokens in encode_document(content, self._tokenizer):
                self._writer.write(tokens)
        except ValueError:
            self._writer.discard_document()
            raise
        self._end_document(document_digest(content, self._tokenizer))

    def _encode_array(self, reader: ArrayReader, name: str, document: StoredFile) -> None:
        digest = hashlib.blake2b(digest_size=8)
        position = 0
        try:
            for tokens in read_array(reader, name):
                first, position = position, position + len(tokens)
                if position == reader.rows:
                    tokens = without_end(tokens, self._tokenizer)
                if len(tokens):
                    check_tokens(tokens, self._tokenizer, first)
                    digest.update(tokens.astype("<u4").tobytes())
                    self._writer.write(tokens)
        except BadDataError as error:
            self._writer.discard_document()
            self._note_bad(document, error)
            return
        except ValueError as error:
            self._writer.discard_document()
            self._note_bad(document, BadDataError(OpenableFile(document).url, str(error)))
            return
        self._end_document(int.from_bytes(digest.digest(), "little"))

    def _end_document(self, digest: int) -> bool:
        is_document = self._writer.end_document(digest)
        self.result.documents += is_document
        self.result.empty_documents += not is_document
        return is_document

    def _note_bad(self, document: StoredFile, error: BadDataError) -> None:
        """Count bad data, or refuse it if the job does not skip it."""
        if self._settings.bad_data == "skip":
            self.result.bad_rows.append([error.file, error.row, error.cause])
            return
        hints = [
            error.hint or "correct it",
            "data.bad_data = 'skip' leaves bad rows and files out, counted and listed",
        ]
        raise JobError(f"{document.job_key}: {error.message}", "; or ".join(hints)) from error


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
