"""Benchmarks of a device beside those of a calibration: copies, and products in tf32 and fp8.

Calibrations do without them; `wanma bench machine` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from wanma.hardware.measurement.run_times import CPU_COPY_BYTES, copy_run
from wanma.planner.calibration.host_benchmarks import COPIED_BYTES
from wanma.planner.calibration.microbenchmarks import GPU_MATMULS, timed_run
from wanma.torch_internals.operators import scaled_mm

GPU_COPY_BYTES = 1 << 30
"""Bytes of a copied buffer: more than the caches of a GPU hold."""
TF32_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
"""Compute capabilities from which on NVIDIA GPUs multiply in these precisions."""

DeviceCase = tuple[str, str, tuple[int, ...], Callable[[float], float]]
"""Name, precision, shape as in `BenchmarkPoint`, and the function that measures the case."""


def copy_cases(device: torch.device, threads_per_core: float = 1.0) -> Iterator[DeviceCase]:
    """Yield copies within the device's memory, (bytes read and written), and from the host to it, (bytes)."""
    size = CPU_COPY_BYTES if device.type == "cpu" else GPU_COPY_BYTES
    yield "copy", "", (2 * size,), timed_run(device, threads_per_core, partial(copy_run, device, size))
    if device.type == "cuda":
        yield "from_host", "", (COPIED_BYTES,), timed_run(device, 1.0, lambda: _from_host(device))


def matmul_cases(device: torch.device) -> Iterator[DeviceCase]:
    """Yield products in tf32 and fp8, (m, n, k), on GPUs that have them."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    for shape in GPU_MATMULS:
        if capability >= TF32_CAPABILITY:
            measure = timed_run(device, 1.0, partial(_operands, device, shape))
            yield "product", "tf32", shape, partial(_in_tf32, measure)
        if capability >= FP8_CAPABILITY:
            yield "product", "fp8", shape, timed_run(device, 1.0, partial(fp8_run, device, shape))


def fp8_run(device: torch.device, shape: tuple[int, int, int]) -> Callable[[], object]:
    """Return a run of a product of e4m3 matrices with one scale each, and a result in bf16."""
    m, n, k = shape
    x, weight = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    scale = torch.ones((), device=device)
    return lambda: scaled_mm(x, weight.t(), scale, scale, None, None, torch.bfloat16)


def _operands(device: torch.device, shape: tuple[int, int, int]) -> Callable[[], object]:
    m, n, k = shape
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    return lambda: torch.nn.functional.linear(x, weight)


def _in_tf32(measure: Callable[[float], float], seconds: float) -> float:
    """Measure with products of fp32 tensors in tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return measure(seconds)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _from_host(device: torch.device) -> Callable[[], object]:
    """Return a run that copies from page-locked host memory to the device."""
    content = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    buffer = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return lambda: buffer.copy_(content, non_blocking=True)
