"""Peak rates of this CPU in matrix products and copies, measured once and stored, for MFU and forecasts.

No datasheet gives the rates of a rented slice of a processor, so `measure_cpu_peak` measures them and
writes them below the user's cache folder; `read_cpu_peak` and `read_memory_rate` read them without torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

from wanma.hardware.measurement.cpu_load import busy_cpu_seconds
from wanma.hardware.measurement.run_times import CPU_COPY_BYTES, copy_run, fastest_run_seconds
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import cpu_model, usable_cores
from wanma.job.run.run_directory import write_json
from wanma.job.run.user_cache import user_cache_folder

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
PROBE_SECONDS = 0.15
"""Duration of the measurement per precision, and of that of copies, in seconds."""
MATRIX_SIZE = 1024
"""Rows and columns of the probed matrices: large enough to exceed the caches."""
BUSY_CPUS = 0.1
"""CPUs that other programs use from which on a node is busy."""
ALL_CORES_SHARE = 0.9
"""Rate of a core among others that compute, as a share of its rate alone: their common clock is lower."""
SLOW_MATRIX_SIZE = 256
"""Rows and columns for precisions that this CPU only emulates: one of `MATRIX_SIZE` takes seconds."""
_MEMORY_KEY = "memory"
"""Key of the copy rate beside those of the precisions."""


def measure_cpu_peak(threads: int | None = None, path: Path | None = None) -> dict[str, float]:
    """Measure the rates of matrix products and copies on `threads` threads and store the best ever measured.

    Imports torch; the measurement itself takes under a second.

    Args:
        threads: threads of one process; default: all usable cores.
        path: the file that stores the result; default: `cpu_peak_file()`.

    Returns:
        FLOP/s by precision: the fastest of many products, now or in an earlier measurement. They are
        peaks, and other work on the node can only lower a measurement; where there is any, the rate is that
        of one core's CPU time, times the cores.

    Raises:
        WanmaError: the result cannot be written.
    """
    import torch

    path = path or cpu_peak_file()
    threads = threads or usable_cores()
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measured_peak = {precision: _measure_precision(precision) for precision in PRECISIONS}
        copy_seconds = fastest_run_seconds(copy_run(torch.device("cpu"), CPU_COPY_BYTES), PROBE_SECONDS)
    finally:
        torch.set_num_threads(previous_threads)
    peaks = _read(path)
    stored_peak = peaks.get(_key(threads), {})
    peak = {
        precision: max(rate, stored_peak.get(precision, 0.0)) for precision, rate in measured_peak.items()
    }
    memory_rate = max(2 * CPU_COPY_BYTES / copy_seconds, stored_peak.get(_MEMORY_KEY, 0.0))
    peaks[_key(threads)] = {**peak, _MEMORY_KEY: memory_rate}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, peaks)
    except OSError as error:
        raise WanmaError(
            f"cannot write the measured CPU peak to {path}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a writable folder",
        ) from error
    return peak


def read_cpu_peak(threads: int, path: Path | None = None) -> dict[str, float]:
    """Return the FLOP/s by precision measured earlier on this CPU with `threads` threads; empty: never."""
    stored = _read(path or cpu_peak_file()).get(_key(threads), {})
    return {precision: rate for precision, rate in stored.items() if precision != _MEMORY_KEY}


def read_memory_rate(threads: int, path: Path | None = None) -> float | None:
    """Return the bytes/s that `threads` threads read and wrote in copies measured earlier; None: never."""
    return _read(path or cpu_peak_file()).get(_key(threads), {}).get(_MEMORY_KEY)


def cpu_peak_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of measured peaks: `wanma/cpu-peak.json` in the user's cache folder."""
    return user_cache_folder(environment) / "cpu-peak.json"


def _measure_precision(precision: str) -> float:
    import torch

    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[precision]

    def multiply(size: int) -> None:
        torch.mm(operands[size], operands[size], out=results[size])

    operands = {size: torch.randn(size, size).to(dtype) for size in (SLOW_MATRIX_SIZE, MATRIX_SIZE)}
    results = {size: torch.empty(size, size, dtype=dtype) for size in (SLOW_MATRIX_SIZE, MATRIX_SIZE)}
    with torch.inference_mode():
        multiply(SLOW_MATRIX_SIZE)  # the first product of a precision also builds its kernel
        small_seconds = fastest_run_seconds(partial(multiply, SLOW_MATRIX_SIZE), 0.0)
        emulated = small_seconds * (MATRIX_SIZE / SLOW_MATRIX_SIZE) ** 3 > PROBE_SECONDS
        size = SLOW_MATRIX_SIZE if emulated else MATRIX_SIZE
        start, foreign = time.perf_counter(), _foreign_cpu_seconds()
        run = partial(multiply, size)
        best = fastest_run_seconds(run, PROBE_SECONDS)
        busy_cpus = (_foreign_cpu_seconds() - foreign) / (time.perf_counter() - start)
        # On a busy node the threads of every product wait for one that has lost its core. The CPU time of a
        # single thread counts no waits: the peak is that of one core, times the cores.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        alone = fastest_run_seconds(run, 0.0, min_runs=3, clock=time.thread_time)
        torch.set_num_threads(threads)
    cores = max(threads * _cores_per_cpu() * ALL_CORES_SHARE, 1.0) if busy_cpus > BUSY_CPUS else 1.0
    return 2 * size**3 / min(best, alone / cores)


def _foreign_cpu_seconds() -> float:
    """Return the CPU seconds of other programs since boot, other guests of this machine included."""
    return (busy_cpu_seconds() or 0.0) - time.process_time()


def _cores_per_cpu() -> float:
    """Return the cores per CPU that the kernel shows: 0.5 where two threads share each core."""
    return (psutil.cpu_count(logical=False) or 1) / (psutil.cpu_count() or 1)


def _key(threads: int) -> str:
    return f"{cpu_model()}, {threads} threads"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Read the stored peaks; an absent or damaged file has none, and the next measurement replaces it."""
    try:
        peaks = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return peaks if isinstance(peaks, dict) else {}
