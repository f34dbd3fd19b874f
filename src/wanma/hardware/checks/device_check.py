"""Does this device compute and remember rightly? A matrix product and memory patterns with known results.

The product is of integers so small that each of its sums, and every part of one, is exact in all formats
down to bfloat16: whatever kernel, order of summation or number of threads, one result is right. It
follows from arithmetic in Python, not from the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanma.job.errors import UnfitError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PERIOD = 16
DEPTH = 16 * PERIOD
"""Products in each sum: of -1, 0 and 1, so none is beyond ±256, up to which bfloat16 has all integers."""
_LEFT = (1, 0, -1, 1, 1, -1, 0, 1, -1, -1, 1, 0, 1, -1, 1, 1)
_RIGHT = (-1, 1, 1, 0, 1, 1, -1, 0, 1, 1, 1, -1, 0, 1, -1, 1)
_PATTERNS = (0x5555555555555555, -0x5555555555555556, 0, -1)
"""Each bit once 0 and once 1, beside unlike and beside like neighbours."""


@dataclass(frozen=True)
class Extent:
    """How much is checked."""

    rows: int
    """And columns, of the product; a multiple of `PERIOD`."""
    rounds: int
    """At least; more where they take less than `seconds`."""
    seconds: float
    memory_bytes: int


ON_CPU = Extent(rows=256, rounds=3, seconds=0.01, memory_bytes=4 << 20)
ON_GPU = Extent(rows=4096, rounds=5, seconds=0.03, memory_bytes=256 << 20)


@dataclass(frozen=True)
class DeviceHealth:
    """A device that passed."""

    device: str
    flops_per_second: float
    """Of the fp32 product, in its quickest round."""
    memory_bytes: int
    """That held every pattern."""
    seconds: float
    """All of it."""


def check_device(device: torch.device, extent: Extent | None = None) -> DeviceHealth:
    """Multiply, and write and read memory, for some hundredths of a second.

    Raises:
        UnfitError: a result is wrong; says which, and what would have been right.
    """
    import torch

    extent = extent or (ON_GPU if device.type == "cuda" else ON_CPU)
    began = time.perf_counter()
    dtypes = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
    seconds = [_check_product(device, dtype, extent) for dtype in dtypes]
    size = extent.memory_bytes
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    _check_memory(device, size)
    return DeviceHealth(
        str(device), 2 * DEPTH * extent.rows**2 / seconds[-1], size, time.perf_counter() - began
    )


def factors(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(rows, DEPTH)` and `(DEPTH, rows)`."""
    import torch

    i, k = torch.arange(rows, device=device)[:, None], torch.arange(DEPTH, device=device)[None, :]
    left = torch.tensor(_LEFT, device=device, dtype=dtype)[(3 * i + 5 * k) % PERIOD]
    right = torch.tensor(_RIGHT, device=device, dtype=dtype)[(7 * k + 11 * i) % PERIOD].t().contiguous()
    return left, right


def expected_product(rows: int) -> Tensor:
    """`(rows, rows)`, of the integers: by arithmetic on the CPU that needs no product of matrices."""
    import torch

    period = [
        [
            DEPTH
            // PERIOD
            * sum(_LEFT[(3 * i + 5 * k) % PERIOD] * _RIGHT[(7 * k + 11 * j) % PERIOD] for k in range(PERIOD))
            for j in range(PERIOD)
        ]
        for i in range(PERIOD)
    ]
    return torch.tensor(period).repeat(rows // PERIOD, rows // PERIOD)


def product(left: Tensor, right: Tensor) -> Tensor:
    """What is checked."""
    return left @ right


def _check_product(device: torch.device, dtype: torch.dtype, extent: Extent) -> float:
    """Returns the seconds of the quickest round."""
    import torch

    left, right = factors(extent.rows, device, dtype)
    expected = expected_product(extent.rows).to(device, dtype)
    quickest, began, number = float("inf"), time.perf_counter(), 0
    while number < extent.rounds or time.perf_counter() - began < extent.seconds:
        number += 1
        round_began = time.perf_counter()
        found = product(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        quickest = min(quickest, time.perf_counter() - round_began)
        if not torch.equal(found, expected):
            what = f"a product of two {dtype} matrices that is known came out wrong in round {number}"
            raise _unfit(device, what, found, expected)
    return quickest


def _check_memory(device: torch.device, size: int) -> None:
    import torch

    block = torch.empty(size // 8, dtype=torch.int64, device=device)
    for pattern in _PATTERNS:
        block.fill_(pattern)
        if not bool((block == pattern).all()):
            what = f"memory does not hold the pattern {pattern & (1 << 64) - 1:#018x}"
            raise _unfit(device, what, block, torch.full_like(block, pattern))
    addresses = torch.arange(len(block), device=device)  # two places that are one are told apart by it
    block.copy_(addresses)
    if not torch.equal(block, addresses):
        raise _unfit(device, "memory does not hold what was written to it", block, addresses)


def _unfit(device: torch.device, what: str, found: Tensor, expected: Tensor) -> UnfitError:
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return UnfitError(f"{device}: {what}; looked at again it is right", _HINT)
    at: list[int] = wrong[0].tolist()
    got, right = _number(found, at), _number(expected, at)
    return UnfitError(
        f"{device}: {what}: {len(wrong):,} of {found.numel():,} numbers, first at {at}: {got}, not {right}",
        _HINT,
    )


def _number(tensor: Tensor, at: list[int]) -> Any:
    return tensor[tuple(at)].item()


_HINT = (
    "this machine should not take part: its processor, memory or driver errs; run the same command on "
    "another, or set cluster.health_check = 'never' to go on nevertheless"
)
