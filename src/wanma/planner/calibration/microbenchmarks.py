"""Microbenchmarks of operators on the local device, run by all ranks at the same time.

Shared resources (a memory, cores, links) are then shared as in training. `curve_fitting` interprets the
times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wanma.hardware.measurement.run_times import fastest_run_seconds, mean_run_seconds
from wanma.planner.calibration.host_benchmarks import host_benchmark_cases
from wanma.planner.calibration.round_robin import sum_over_ranks
from wanma.planner.hardware_model.calibration import BenchmarkKind

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

EMULATION_SLOWDOWN = 3.0
"""Time of a small product over that of one in 64 bits beyond which its precision counts as emulated, and
unusable for training."""

# (m, n, k). A step has products with many rows and two sides of a matrix, and for the weights' gradients with
# many terms; small ones show the cost of a launch.
CPU_MATMULS = (
    (64, 64, 64),
    (64, 512, 512),
    (256, 128, 128),
    (256, 512, 512),
    (1024, 128, 128),
    (1024, 512, 512),
    (2048, 1024, 384),
    (1024, 1024, 1024),
    (1024, 4096, 512),
)
GPU_MATMULS = (
    (128, 4096, 4096),
    (512, 4096, 4096),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 2048),
    (8192, 8192, 8192),
)
CPU_STREAMS = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Elements of an operand."""
GPU_STREAMS = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
# (sequences, queries, heads, head width)
CPU_ATTENTION = ((8, 64, 4, 32), (4, 256, 4, 64), (2, 512, 8, 64), (1, 1024, 8, 64))
GPU_ATTENTION = ((8, 1024, 16, 128), (4, 2048, 16, 128), (2, 4096, 16, 128), (1, 8192, 16, 128))
DISPATCH_KERNELS = 64
"""Number of small consecutive operators by which dispatch is measured."""
CPU_BUFFERS = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Buffer sizes of a collective in bytes."""
GPU_BUFFERS = (1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 29)


def collective_buffers(device: torch.device) -> tuple[int, ...]:
    """Return the buffer sizes of collectives on a kind of device, in bytes."""
    return CPU_BUFFERS if device.type == "cpu" else GPU_BUFFERS


def operator_cases(
    group: dist.ProcessGroup,
    device: torch.device,
    precisions: tuple[str, ...],
    threads_per_core: float = 1.0,
    folder: Path | None = None,
) -> list[BenchmarkCase]:
    """Return the cases of operators, host and disk, which need no other rank.

    Args:
        group: process group whose ranks all call this, with devices of one kind.
        device: device of this rank.
        precisions: precisions of compute-bound operators; those that this device only emulates are left out.
        threads_per_core: threads of all ranks per core of a CPU, at least 1.
        folder: folder on the disk to measure; None: neither disk nor host memory is measured.
    """
    native = _native_precisions(group, device, precisions)
    cases = list(_device_cases(device, native, threads_per_core))
    if folder is not None:
        # Wall time, not CPU time: a disk makes the process wait.
        cases += [
            BenchmarkCase(operator, shape, "", timed_run(device, 1.0, make))
            for operator, shape, make in host_benchmark_cases(device, folder)
        ]
    return cases


@dataclass(frozen=True)
class BenchmarkCase:
    """One operator or collective to measure."""

    operator: BenchmarkKind
    shape: tuple[int, ...]
    precision: str
    measure: Callable[[float], float]
    """Function from the approximate seconds of measuring to the seconds of one run, as in
    `round_robin.MeasurableCase`."""


def _device_cases(
    device: torch.device, precisions: tuple[str, ...], threads_per_core: float
) -> Iterator[BenchmarkCase]:
    """Yield the cases of a device: operators in each precision."""
    timed = partial(timed_run, device, threads_per_core)
    products, streams, attentions = (
        (CPU_MATMULS, CPU_STREAMS, CPU_ATTENTION)
        if device.type == "cpu"
        else (GPU_MATMULS, GPU_STREAMS, GPU_ATTENTION)
    )
    largest = max(max(m * n, m * k, n * k) for m, n, k in products)
    for name in precisions:
        # Operands are parts of one buffer, so that numbers are drawn only once.
        noise = torch.randn(3 * largest, device=device).to(DTYPES[name])
        for shape in products:
            yield from _matmul_cases(noise, shape, name, timed)
        for attention in attentions:
            yield from _attention_cases(device, attention, name, timed)
    for elements in streams:
        yield BenchmarkCase("stream", (2 * 4 * elements,), "", timed(partial(_stream, device, elements)))
    yield BenchmarkCase("dispatch", (DISPATCH_KERNELS,), "", timed(partial(_dispatch, device)))


def _matmul_cases(
    noise: Tensor, shape: tuple[int, int, int], name: str, timed: _Timing
) -> Iterator[BenchmarkCase]:
    """Yield a linear layer's three products: forward, gradient of its input, and gradient of its weight.

    The matrices have the memory layout of training.
    """
    m, n, k = shape
    third = len(noise) // 3
    x, weight, gradient = (
        noise[number * third :][: rows * columns].view(rows, columns)
        for number, (rows, columns) in enumerate(((m, k), (n, k), (m, n)))
    )
    yield BenchmarkCase("product", (m, n, k), name, timed(lambda: lambda: F.linear(x, weight)))
    yield BenchmarkCase("product", (m, k, n), name, timed(lambda: lambda: gradient @ weight))
    yield BenchmarkCase("product", (n, k, m), name, timed(lambda: lambda: gradient.t() @ x))


def _attention_cases(
    device: torch.device, shape: tuple[int, int, int, int], name: str, timed: _Timing
) -> Iterator[BenchmarkCase]:
    """Yield the cases of causal attention, forward and backward."""

    def parts() -> list[Tensor]:
        tensors = (
            torch.randn(shape, device=device, dtype=DTYPES[name], requires_grad=True) for _ in range(3)
        )
        return [part.transpose(1, 2) for part in tensors]

    def forward() -> Callable[[], object]:
        query, key, value = parts()
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> Callable[[], object]:
        query, key, value = parts()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradient = torch.randn_like(attended)
        return lambda: torch.autograd.grad(attended, (query, key, value), gradient, retain_graph=True)

    yield BenchmarkCase("attention", shape, name, timed(forward))
    yield BenchmarkCase("attention_backward", shape, name, timed(backward))


def _stream(device: torch.device, elements: int) -> Callable[[], object]:
    """Return a run that reads one operand and writes another into newly allocated memory."""
    x = torch.ones(elements, device=device)
    return lambda: x * 0.5


def _dispatch(device: torch.device) -> Callable[[], object]:
    """Return a run of small operators under autograd, forward and backward, as eager programs do."""
    x = torch.ones(64, device=device, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(DISPATCH_KERNELS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x, x.detach())

    return run


_Timing = Callable[[Callable[[], Callable[[], object]]], Callable[[float], float]]
"""Type of `timed_run` for one device."""


def timed_run(
    device: torch.device, threads_per_core: float, prepare_run: Callable[[], Callable[[], object]]
) -> Callable[[float], float]:
    """Return the function that measures the run that `prepare_run` prepares."""

    def measure_for(seconds: float) -> float:
        run = prepare_run()
        run()  # the first run also builds its kernel
        return (
            _time_on_cpu(run, seconds, threads_per_core)
            if device.type == "cpu"
            else _time_on_accelerator(run, seconds)
        )

    return measure_for


def _time_on_cpu(run: Callable[[], object], seconds: float, threads_per_core: float) -> float:
    """Return the seconds of one of the runs that fill `seconds`, while all ranks are busy for as long.

    With more ranks than cores, a rank's wall clock depends on the start and the turn of the others. The CPU
    seconds that it computed with, times the threads per core, do not.
    """
    clock = time.perf_counter if threads_per_core <= 1 else time.process_time
    return mean_run_seconds(run, seconds, clock=clock) * max(threads_per_core, 1.0)


def _time_on_accelerator(run: Callable[[], object], seconds: float) -> float:
    """Return the seconds of one run on a device that works asynchronously, over about `seconds`."""

    def repeat(times: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    return repeat(max(1, int(seconds / max(repeat(1), 1e-9))))


def _native_precisions(
    group: dist.ProcessGroup, device: torch.device, precisions: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the precisions with products about as fast as in 64 bits: others are emulated."""
    if device.type != "cpu":
        return precisions
    plain = _small_matmul_seconds(torch.float64)
    emulated = [
        float(_small_matmul_seconds(DTYPES[name]) > EMULATION_SLOWDOWN * plain) for name in precisions
    ]
    counts = sum_over_ranks(emulated, group)
    return tuple(name for name, count in zip(precisions, counts, strict=True) if 2 * count < group.size())


def _small_matmul_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of a small product, the best of many because others may be busy."""
    x = torch.ones(256, 256, dtype=dtype)
    torch.mm(x, x)  # the first run builds its kernel
    return fastest_run_seconds(lambda: torch.mm(x, x), 0.0, min_runs=10)
