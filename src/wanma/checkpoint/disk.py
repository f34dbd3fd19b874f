"""Writing one file of a checkpoint: durable, and hashed meanwhile. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WRITE_BYTES = 64 << 20


def write_file(path: Path, *parts: memoryview) -> str:
    """Write `parts` in turn, and fsync; returns the SHA-256, computed in another thread meanwhile.

    Both leave the interpreter lock: with a core to spare, a save takes the longer of the two.

    Raises:
        OSError: names the file.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash") as beside:
        digest = beside.submit(_sha256, parts)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                written = 0
                while written < len(part):
                    written += os.write(descriptor, part[written : written + _WRITE_BYTES])
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
        return digest.result()


def _sha256(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
