"""Probes of the doctor: Gloo over the loopback, and write speed of a disk."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

GLOO_TIMEOUT_SECONDS = 20


def probe_gloo_loopback() -> str:
    """Reduce one tensor between two Gloo ranks over 127.0.0.1; return the error, empty on success.

    The ranks are two threads of this process, because process groups as objects need no global state.
    """
    import torch
    import torch.distributed

    from wanma.torch_internals.distributed import make_gloo_group

    dist: Any = torch.distributed  # its stores are untyped
    store = dist.HashStore()
    timeout = timedelta(seconds=GLOO_TIMEOUT_SECONDS)
    sums: dict[int, float] = {}
    problems: dict[int, str] = {}

    def reduce(rank: int) -> None:
        try:
            group = make_gloo_group(store, rank, 2, "127.0.0.1", timeout)
            tensor = torch.tensor([rank + 1.0])
            group.allreduce([tensor]).wait()
            sums[rank] = tensor.item()
        except RuntimeError as error:
            problems[rank] = str(error).splitlines()[0]

    threads = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * GLOO_TIMEOUT_SECONDS)
    if problems:
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items()))
    if any(thread.is_alive() for thread in threads):
        return f"no answer within {2 * GLOO_TIMEOUT_SECONDS} s"
    return "" if sums == {0: 3.0, 1: 3.0} else f"wrong sums: {sums}"


def measure_disk_write_seconds(folder: Path, size: int) -> float:
    """Return the seconds to write `size` bytes to a new file in `folder` and force them to the disk.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    block = os.urandom(size)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".wanma-doctor-") as file:
        start = time.perf_counter()
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start
