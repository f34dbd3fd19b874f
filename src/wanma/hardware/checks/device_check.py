"""Compute and memory check of a device: a matrix product and memory patterns with known results.

The product is of integers so small that each of its sums, and every part of one, is exact in all formats
down to bfloat16: every kernel, order of summation and number of threads gives the same result. The
expected result follows from arithmetic in Python, not from the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanma.job.errors import HealthCheckError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PATTERN_PERIOD = 16
INNER_SIZE = 16 * PATTERN_PERIOD
"""Inner size of the product: sums of -1, 0 and 1 stay within ±256, where bfloat16 is exact for integers."""
_LEFT = (1, 0, -1, 1, 1, -1, 0, 1, -1, -1, 1, 0, 1, -1, 1, 1)
_RIGHT = (-1, 1, 1, 0, 1, 1, -1, 0, 1, 1, 1, -1, 0, 1, -1, 1)
_PATTERNS = (0x5555555555555555, -0x5555555555555556, 0, -1)
"""Memory patterns: each bit once 0 and once 1, beside unlike and beside like neighbours."""


@dataclass(frozen=True)
class CheckSize:
    """Size and duration of a check."""

    rows: int
    """Rows and columns of the product; a multiple of `PATTERN_PERIOD`."""
    min_rounds: int
    """Minimum number of products; more are computed until `seconds` have passed."""
    min_seconds: float
    memory_bytes: int


CPU_CHECK_SIZE = CheckSize(rows=256, min_rounds=3, min_seconds=0.01, memory_bytes=4 << 20)
GPU_CHECK_SIZE = CheckSize(rows=4096, min_rounds=5, min_seconds=0.03, memory_bytes=256 << 20)


@dataclass(frozen=True)
class DeviceHealth:
    """Result of a device that passed the check."""

    device: str
    flops_per_second: float
    """Rate of the fp32 product in its fastest round."""
    memory_bytes: int
    """Bytes of memory in which every pattern was verified."""
    seconds: float
    """Duration of the whole check, in seconds."""


def check_device(device: torch.device, check_size: CheckSize | None = None) -> DeviceHealth:
    """Check a device's matrix product and memory, for some hundredths of a second.

    Raises:
        HealthCheckError: a result is wrong; the message gives it and the expected one.
    """
    import torch

    check_size = check_size or (GPU_CHECK_SIZE if device.type == "cuda" else CPU_CHECK_SIZE)
    start = time.perf_counter()
    dtypes = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
    seconds = [_check_product(device, dtype, check_size) for dtype in dtypes]
    size = check_size.memory_bytes
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    _check_memory(device, size)
    return DeviceHealth(
        str(device), 2 * INNER_SIZE * check_size.rows**2 / seconds[-1], size, time.perf_counter() - start
    )


def build_factors(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Build the two integer factors of the product, of shapes `(rows, DEPTH)` and `(DEPTH, rows)`."""
    import torch

    i, k = torch.arange(rows, device=device)[:, None], torch.arange(INNER_SIZE, device=device)[None, :]
    left = torch.tensor(_LEFT, device=device, dtype=dtype)[(3 * i + 5 * k) % PATTERN_PERIOD]
    right = (
        torch.tensor(_RIGHT, device=device, dtype=dtype)[(7 * k + 11 * i) % PATTERN_PERIOD].t().contiguous()
    )
    return left, right


def expected_product(rows: int) -> Tensor:
    """Return the expected integer product, `(rows, rows)`, computed on the CPU without a matrix product."""
    import torch

    period = [
        [
            INNER_SIZE
            // PATTERN_PERIOD
            * sum(
                _LEFT[(3 * i + 5 * k) % PATTERN_PERIOD] * _RIGHT[(7 * k + 11 * j) % PATTERN_PERIOD]
                for k in range(PATTERN_PERIOD)
            )
            for j in range(PATTERN_PERIOD)
        ]
        for i in range(PATTERN_PERIOD)
    ]
    return torch.tensor(period).repeat(rows // PATTERN_PERIOD, rows // PATTERN_PERIOD)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices on the device: the operation that is checked."""
    return left @ right


def _check_product(device: torch.device, dtype: torch.dtype, check_size: CheckSize) -> float:
    """Check products of `dtype`; return the seconds of the fastest round."""
    import torch

    left, right = build_factors(check_size.rows, device, dtype)
    expected = expected_product(check_size.rows).to(device, dtype)
    fastest_seconds, start, number = float("inf"), time.perf_counter(), 0
    while number < check_size.min_rounds or time.perf_counter() - start < check_size.min_seconds:
        number += 1
        round_start = time.perf_counter()
        product = multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_seconds = min(fastest_seconds, time.perf_counter() - round_start)
        if not torch.equal(product, expected):
            problem = f"a matrix product with a known result was wrong ({dtype}, round {number})"
            raise _health_check_error(device, problem, product, expected)
    return fastest_seconds


def _check_memory(device: torch.device, size: int) -> None:
    import torch

    block = torch.empty(size // 8, dtype=torch.int64, device=device)
    for pattern in _PATTERNS:
        block.fill_(pattern)
        if not bool((block == pattern).all()):
            problem = f"memory did not return the pattern {pattern & (1 << 64) - 1:#018x}"
            raise _health_check_error(device, problem, block, torch.full_like(block, pattern))
    addresses = torch.arange(len(block), device=device)  # shows a wrong address line
    block.copy_(addresses)
    if not torch.equal(block, addresses):
        raise _health_check_error(device, "memory did not return the values written to it", block, addresses)


def _health_check_error(
    device: torch.device, problem: str, actual: Tensor, expected: Tensor
) -> HealthCheckError:
    mismatches = (actual != expected).nonzero()
    if not len(mismatches):
        return HealthCheckError(
            f"{device}: {problem}; a second read returned the expected values", _EXCLUDE_NODE_HINT
        )
    index: list[int] = mismatches[0].tolist()
    actual_value, expected_value = _element(actual, index), _element(expected, index)
    return HealthCheckError(
        f"{device}: {problem}: {len(mismatches):,} of {actual.numel():,} values, first at {index}: "
        f"{actual_value} instead of "
        f"{expected_value}",
        _EXCLUDE_NODE_HINT,
    )


def _element(tensor: Tensor, index: list[int]) -> Any:
    return tensor[tuple(index)].item()


_EXCLUDE_NODE_HINT = (
    "exclude this node and run the same command on another one: its processor, memory or driver returns "
    "wrong results; or set cluster.health_check = 'never' to use it anyway"
)
