"""What this CPU can reach in a matrix product, measured once and kept, so that runs can state MFU.

No datasheet says what a rented slice of a processor delivers, so `measure_cpu_peak` measures it and
writes it below the user's cache folder; `stored_cpu_peak` reads it back without torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from wanma.hardware.discovery.resource_limits import cpu_model, usable_cores
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import write_json

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
PROBE_SECONDS = 0.15
"""Per precision."""
SIZE = 1024
"""Rows and columns of the probed matrices: large enough to leave the caches' favour."""
SLOW_SIZE = 256
"""For precisions that this CPU only emulates, where one product of `SIZE` would take seconds."""


def measure_cpu_peak(threads: int | None = None, path: Path | None = None) -> dict[str, float]:
    """Measure the rate of matrix products on `threads` threads and keep the best ever seen.

    Imports torch; under a second once that is done.

    Args:
        threads: of one process; default: all usable cores.
        path: the file to keep the result in; default: `peak_file()`.

    Returns:
        FLOP/s by precision. The fastest of many products, now or in an earlier measurement: it is a
        peak, and other work on the machine can only lower what is seen of it.

    Raises:
        WanmaError: the result cannot be written.
    """
    import torch

    path = path or peak_file()
    threads = threads or usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = {precision: _probe(precision) for precision in PRECISIONS}
    finally:
        torch.set_num_threads(before)
    stored = _read(path)
    earlier = stored.get(_key(threads), {})
    peak = {precision: max(rate, earlier.get(precision, 0.0)) for precision, rate in seen.items()}
    stored[_key(threads)] = peak
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, stored)
    except OSError as error:
        raise WanmaError(
            f"cannot keep the measured CPU peak in {path}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a folder that can be written to",
        ) from error
    return peak


def stored_cpu_peak(threads: int, path: Path | None = None) -> dict[str, float]:
    """FLOP/s by precision, as measured earlier on this CPU with `threads` threads; empty if never."""
    return _read(path or peak_file()).get(_key(threads), {})


def peak_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where measured peaks are kept: `wanma/cpu-peak.json` in the user's cache folder."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "wanma" / "cpu-peak.json"


def _probe(precision: str) -> float:
    import torch

    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[precision]

    def seconds(size: int) -> float:
        start = time.perf_counter()
        torch.mm(operands[size], operands[size], out=results[size])
        return time.perf_counter() - start

    operands = {size: torch.randn(size, size).to(dtype) for size in (SLOW_SIZE, SIZE)}
    results = {size: torch.empty(size, size, dtype=dtype) for size in (SLOW_SIZE, SIZE)}
    with torch.inference_mode():
        seconds(SLOW_SIZE)  # the first product of a precision also builds its kernel
        emulated = seconds(SLOW_SIZE) * (SIZE / SLOW_SIZE) ** 3 > PROBE_SECONDS
        size = SLOW_SIZE if emulated else SIZE
        deadline = time.perf_counter() + PROBE_SECONDS
        best = seconds(size)
        while time.perf_counter() < deadline:
            best = min(best, seconds(size))
    return 2 * size**3 / best


def _key(threads: int) -> str:
    return f"{cpu_model()}, {threads} threads"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """The stored peaks; a file that is absent or damaged holds none, and the next measurement replaces it."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
