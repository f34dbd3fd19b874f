"""Encoding of a corpus: in this process when it is small, else in several that each take documents in turn.

The processes are fresh interpreters (`tokenization_process.py`), neither forked nor re-importing the user's
script, so that this works from any process and from any script. They are gone when `tokenize_documents`
returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.text.content_detection import detect_content, unsupported_content_error
from wanma.data.text.documents import Document, filesystem_to_json
from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer
from wanma.job.errors import WanmaError

Progress = Callable[[int, int], None]
"""Callback for (bytes done, bytes in all)."""

_TASK_BYTES = 1 << 20
_BYTE_TEXT_PER_PROCESS = 512 << 20
_BPE_TEXT_PER_PROCESS = 4 << 20
"""Bytes of text per additional process: copying bytes is fast, merging them into words is not."""


@dataclass
class TokenizationResult:
    """Result of encoding, in the documents' order; documents without tokens are only counted."""

    lengths: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    binary_files: int = 0
    empty_files: int = 0
    non_utf8_documents: int = 0
    json_record_files: int = 0
    """Number of files with tokens that are JSON records."""

    def extend(self, other: TokenizationResult) -> None:
        self.lengths += other.lengths
        self.digests += other.digests
        self.binary_files += other.binary_files
        self.empty_files += other.empty_files
        self.non_utf8_documents += other.non_utf8_documents
        self.json_record_files += other.json_record_files


class TokenFileWriter:
    """Writer of a token file that computes its hash, and syncs it to disk when closed without an error."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.sha256 = ""
        self._hash = hashlib.sha256()
        self._dtype = dtype
        self._file = path.open("wb")

    def write(self, tokens: NDArray[Any]) -> None:
        self.write_bytes(tokens.astype(self._dtype, copy=False).tobytes())

    def write_bytes(self, content: bytes) -> None:
        self._hash.update(content)
        self._file.write(content)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.sha256 = self._hash.hexdigest()


def tokenize_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    writer: TokenFileWriter,
    scratch: Path,
    progress: Progress | None = None,
    process_count: int | None = None,
) -> TokenizationResult:
    """Write every document's tokens, in order, to `writer`.

    Args:
        documents: the corpus, in order.
        tokenizer: the tokenizer.
        writer: the token file.
        scratch: existing folder for the processes' parts; they are removed one by one.
        progress: called with (bytes done, bytes in all).
        process_count: number of processes; default: by the size of the corpus, up to the cores.
    """
    total_bytes = sum(document.size for document in documents)
    tasks = _group_tasks(documents)
    if process_count is None:
        is_bytes = isinstance(tokenizer, BytesTokenizer)
        process_count = min(
            _usable_cores(), total_bytes // (_BYTE_TEXT_PER_PROCESS if is_bytes else _BPE_TEXT_PER_PROCESS)
        )
    are_readable_by_processes = all("memory" not in document.filesystem.protocol for document in documents)
    total_result = TokenizationResult()
    processed_bytes = 0
    if progress:
        progress(0, total_bytes)
    if (
        process_count > 1 and len(tasks) > 1 and are_readable_by_processes
    ):  # no other process can read files in our memory
        results = _tokenize_in_processes(tasks, tokenizer, writer, scratch, min(process_count, len(tasks)))
    else:
        results = (tokenize_in_process(task, tokenizer, writer) for task in tasks)
    for task, result in zip(tasks, results, strict=True):
        total_result.extend(result)
        processed_bytes += sum(document.size for document in task)
        if progress:
            progress(processed_bytes, total_bytes)
    return total_result


def tokenize_in_process(
    documents: Sequence[Document], tokenizer: Tokenizer, writer: TokenFileWriter
) -> TokenizationResult:
    """Encode documents one after the other in this process."""
    result = TokenizationResult()
    for document in documents:
        digest = hashlib.blake2b(digest_size=8)
        length, is_valid_utf8, is_detected = 0, True, False
        for piece in document.read_chunks():
            if not is_detected:
                is_detected = True
                content, name = detect_content(piece)
                if content != "text" and document.is_named:
                    raise unsupported_content_error(document.job_key, document.url, content, name)
                if content == "binary":
                    result.binary_files += 1
                    break
                result.json_record_files += content == "records"
            digest.update(piece)
            if tokenizer.needs_utf8 and is_valid_utf8:
                is_valid_utf8 = _is_utf8(piece)
            tokens = tokenizer.encode(piece)
            writer.write(tokens)
            length += len(tokens)
        else:
            if length:
                writer.write(np.array([tokenizer.end_of_document_id]))
                result.lengths.append(length + 1)
                result.digests.append(int.from_bytes(digest.digest(), "little"))
                result.non_utf8_documents += not is_valid_utf8
            else:
                result.empty_files += 1
    return result


def _usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _group_tasks(documents: Sequence[Document]) -> list[list[Document]]:
    """Group documents into tasks of about a megabyte, the unit of work and of progress."""
    tasks: list[list[Document]] = [[]]
    size = 0
    for document in documents:
        if tasks[-1] and size + document.size > _TASK_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(document)
        size += document.size
    return tasks


def _tokenize_in_processes(
    tasks: list[list[Document]],
    tokenizer: Tokenizer,
    writer: TokenFileWriter,
    scratch: Path,
    process_count: int,
) -> Iterator[TokenizationResult]:
    """Encode tasks in processes, each held by one thread; results are joined in the order of the tasks."""
    tokenizer.save(scratch)
    idle_processes: queue.SimpleQueue[_TokenizationProcess] = queue.SimpleQueue()
    processes: list[_TokenizationProcess] = []

    def encode(number: int) -> TokenizationResult:
        process = idle_processes.get()
        try:
            return process.encode(tasks[number], scratch / f"part-{number}")
        finally:
            idle_processes.put(process)

    pool = ThreadPoolExecutor(process_count, thread_name_prefix="wanma-tokens")
    try:
        for _ in range(process_count):
            processes.append(_TokenizationProcess(scratch, tokenizer.fingerprint))
            idle_processes.put(processes[-1])
        for number, result in enumerate(pool.map(encode, range(len(tasks)))):
            part = scratch / f"part-{number}"
            with part.open("rb") as stream:
                while block := stream.read(1 << 22):
                    writer.write_bytes(block)
            part.unlink()
            yield result
    finally:  # also when a document fails or the user interrupts: the kill frees the waiting threads
        for process in processes:
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.close()
    (scratch / "tokenizer.json").unlink()


class _TokenizationProcess:
    """Encoding process: a request per line on its standard input, an answer per line on its output."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        command = [sys.executable, "-m", "wanma.data.text.tokenization_process", str(folder), fingerprint]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def encode(self, documents: list[Document], output_path: Path) -> TokenizationResult:
        filesystems: list[str] = []
        rows = []
        for document in documents:
            text = filesystem_to_json(document.filesystem)
            if text not in filesystems:
                filesystems.append(text)
            row = [filesystems.index(text), document.path, document.url, document.is_named, document.job_key]
            rows.append(row)
        answer = self._request({"part": str(output_path), "filesystems": filesystems, "documents": rows})
        return TokenizationResult(**answer["built"])

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._popen.wait()
            raise WanmaError(
                f"a tokenization process exited early with code {code}",
                "check the memory of this node (the usual cause), and the message of the process above, if "
                "any",
            )
        answer: dict[str, Any] = json.loads(line)
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "error" in answer:
            raise WanmaError(*answer["error"])
        return answer

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.communicate()


def tokenization_result_to_json(built: TokenizationResult) -> dict[str, Any]:
    return asdict(built)
