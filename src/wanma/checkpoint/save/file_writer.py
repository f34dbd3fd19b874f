"""Writer of one file of a checkpoint: durable, and hashed concurrently. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wanma.job.retry import RetryPolicy, retry

_RETRY_POLICY = RetryPolicy(max_attempts=3, deadline_seconds=60.0)
"""Limits of the retries: other ranks wait for this file, so they are shorter than an upload's."""
_WRITE_BYTES = 64 << 20


def write_file(path: Path, *parts: memoryview) -> str:
    """Write `parts` in turn, and fsync; return the SHA-256, computed concurrently in another thread.

    Both release the interpreter lock: with a spare core, a save takes the longer of the two.

    Raises:
        OSError: names the file.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash") as executor:
        digest = executor.submit(_sha256, parts)
        retry(lambda: _write(path, parts), _RETRY_POLICY)
        return digest.result()


def _write(path: Path, parts: Sequence[memoryview]) -> None:
    """Write the file from the beginning: after a failed fsync the content on disk is unknown."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                written = 0
                while written < len(part):
                    written += os.write(descriptor, part[written : written + _WRITE_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sha256(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
