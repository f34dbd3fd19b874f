"""Writer of one file of a checkpoint: durable, and hashed concurrently. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wanma.job.retry import RetryPolicy, retry

_RETRY_POLICY = RetryPolicy(max_attempts=3, deadline_seconds=60.0)
"""Limits of the retries: other ranks wait for this file, so they are shorter than an upload's."""
_WRITE_BYTES = 16 << 20


def write_file(path: Path, *parts: memoryview, after_block: Callable[[], None] = lambda: None) -> str:
    """Write `parts` in turn, and fsync; return the SHA-256, computed concurrently in another thread.

    Both release the interpreter lock: with a spare core, a save takes the longer of the two.

    Args:
        path: path of the file.
        parts: its content.
        after_block: function that both threads call after each block that they have read.

    Raises:
        OSError: names the file.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash") as executor:
        digest = executor.submit(_sha256, parts, after_block)
        retry(lambda: _write(path, parts, after_block), _RETRY_POLICY)
        return digest.result()


def _write(path: Path, parts: Sequence[memoryview], after_block: Callable[[], None]) -> None:
    """Write the file from the beginning: after a failed fsync the content on disk is unknown."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for block in _blocks(parts):
                written = 0
                while written < len(block):
                    written += os.write(descriptor, block[written:])
                after_block()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sha256(parts: Sequence[memoryview], after_block: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    for block in _blocks(parts):
        digest.update(block)
        after_block()
    return digest.hexdigest()


def _blocks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _WRITE_BYTES):
            yield part[start : start + _WRITE_BYTES]
