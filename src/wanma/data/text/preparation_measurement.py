"""Measurement of a job's text before its preparation: bytes, what is prepared, and the tokenizer's rate.

The rate is that of encoding the first bytes of the largest file. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from wanma.data.documents.content_detection import detect_content
from wanma.data.documents.rows import Document, document_of
from wanma.data.formats.compression import detect_compression
from wanma.data.index.records import cache_folder, has_remote
from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.filesystems import is_local
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.remote_file import OpenableFile, RemoteFile
from wanma.data.stores.store_probe import measured_store_rates
from wanma.data.text.document_encoding import encode_document
from wanma.data.text.tokenization import text_per_process
from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer
from wanma.job.errors import WanmaError
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.retry import RetryPolicy
from wanma.job.sections.data import DataSection

MIN_MEASURED_BYTES = 4 << 20
"""Missing bytes below which nothing is measured: they are tokenized within seconds."""
_SAMPLE_BYTES = 256 << 10
_SAMPLE_RETRY_POLICY = RetryPolicy(
    max_attempts=3, deadline_seconds=10.0, initial_backoff_seconds=0.2, max_backoff_seconds=2.0
)
"""Retries of reading them: only the preparation itself waits for a store that is down."""
_PIECE_BYTES = 64 << 10
_TOKEN_SUFFIXES = (".npy", ".npz", ".bin", ".idx")
"""Suffixes of files that mostly hold token ids, which are copied."""
_SECONDS = 0.3
"""Seconds of a core after which the measurement ends."""


def measure_preparation(
    section: DataSection, text_bytes: int, missing: Sequence[tuple[StoredFile, str]], tokenizer: Tokenizer
) -> TextPreparation:
    """Return the preparation that a job's text needs on this machine.

    Args:
        missing: files whose token file is missing, each with the field of its text.
    """
    cache = cache_folder(section.cache)
    documents = [document for document, _ in missing]
    size = sum(document.size for document in documents)
    rate, origin = None, "nothing to measure"
    if size >= MIN_MEASURED_BYTES:
        _, text_field = max(missing, key=lambda one: one[0].size)
        rate, origin = _rate(documents, text_field, tokenizer)
    is_remote = has_remote(documents)
    is_probed = section.probe_store and size >= MIN_MEASURED_BYTES
    return TextPreparation(
        text_bytes=text_bytes,
        missing_bytes=size,
        bytes_per_second=rate,
        rate_origin=origin,
        per_process_bytes=text_per_process(tokenizer),
        is_remote=is_remote,
        store=measured_store_rates(documents, cache, is_probed=is_probed) if is_remote else None,
    )


def _rate(documents: Sequence[StoredFile], text_field: str, tokenizer: Tokenizer) -> tuple[float | None, str]:
    """Return the bytes that one process encodes in a second, None if unknown, and the origin in words."""
    largest = max(documents, key=lambda document: document.size)
    try:
        head = bytes(_open_sample(largest).read(0, _SAMPLE_BYTES))
    except (WanmaError, OSError) as error:  # the preparation reports it, with its cause
        return None, f"assumed: the first bytes of the largest file cannot be read ({type(error).__name__})"
    content, name = detect_content(head[: head.rfind(b"\n") + 1] or head)
    is_copied = PurePosixPath(largest.path).suffix in _TOKEN_SUFFIXES or isinstance(tokenizer, BytesTokenizer)
    if not is_copied and detect_compression(head):
        return None, f"assumed: {OpenableFile(largest).url} is compressed"
    if not is_copied and content == "binary":
        return None, f"assumed: {OpenableFile(largest).url} is no text ({name})"
    if is_copied:
        tokenizer = BytesTokenizer()  # whatever the bytes are, they are copied and hashed
    pieces = _record_texts(head, text_field) if content == "records" else _pieces(head)
    return encoding_rate(pieces, tokenizer), "measured on this machine on the first bytes of the largest file"


def _open_sample(file: StoredFile) -> ByteSource:
    if is_local(file.filesystem):
        return OpenableFile(file).open()
    return RemoteFile(file, _SAMPLE_RETRY_POLICY)


def encoding_rate(
    pieces: Iterator[tuple[int, Document]],
    tokenizer: Tokenizer,
    clock: Callable[[], float] = time.thread_time,
) -> float | None:
    """Return the stored bytes that one process encodes and hashes in a second; None: there is no piece.

    The first piece is encoded twice: its first encoding fills the tokenizer's tables. Time is that of a core,
    so that other programs do not count.

    Args:
        clock: clock in seconds of this thread's core.
    """
    done, start = 0, 0.0
    for number, (size, text) in enumerate(pieces):
        if not number:
            _encode(text, tokenizer)
            start = clock()
        _encode(text, tokenizer)
        done += size
        if clock() - start > _SECONDS:
            break
    elapsed = clock() - start
    return done / elapsed if done and elapsed > 0 else None


def _encode(text: Document, tokenizer: Tokenizer) -> None:
    with suppress(ValueError):  # ids outside the vocabulary, which the preparation reports
        for tokens in encode_document(text, tokenizer):
            hashlib.sha256(tokens.tobytes())


def _pieces(head: bytes) -> Iterator[tuple[int, bytes]]:
    for start in range(0, len(head), _PIECE_BYTES):
        piece = head[start : start + _PIECE_BYTES]
        yield len(piece), piece


def _record_texts(head: bytes, text_field: str) -> Iterator[tuple[int, Document]]:
    """Yield the stored bytes and the document of JSON lines; other records count as their bytes."""
    for line in head.split(b"\n")[:-1] or [head]:
        try:
            yield len(line) + 1, document_of(json.loads(line), text_field)
        except (ValueError, KeyError, TypeError, AttributeError):
            yield len(line) + 1, line
