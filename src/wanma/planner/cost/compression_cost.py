"""Cost of the gradient compression methods, a row for each: bytes sent, bytes moved in memory, kernels.

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression

POWERSGD_MATRIX_SIDE = 1024.0
"""Assumed side, in elements, of the matrices that PowerSGD factorises; larger ones compress better."""

_BLOCK_SCALE_BYTES = 4 / CODEC_BLOCK_ELEMENTS
"""Bytes per element of the fp32 scale that each block of elements has."""
_VALUE_AND_INDEX_BYTES = 8.0
"""Bytes per element that top-k sends: its value and its index."""

MessageExchange = Literal["all_to_all_and_all_gather", "all_gather", "all_reduce"]
"""Collectives of a compressed all-reduce; the first sums between the two."""


@dataclass(frozen=True)
class CompressionCost:
    """Cost of one compression method."""

    exchange: MessageExchange
    message_element_bytes: Callable[[Plan], float]
    """Bytes of a message for each element of the gradient."""
    traffic_bytes: float
    """Bytes per element that the method reads and writes, if each operation passes once through memory."""
    kernels: int
    """Approximate number of kernels for each bucket."""
    cpu_traffic_bytes: float | None = None
    """`traffic_bytes` where the method's codec is compiled for the CPU; None: it has no such codec."""
    is_searched: bool = False
    """`auto` tries the method where a job allows compression. The others change training more, or save less
    time."""


COMPRESSION_COSTS: Mapping[Compression, CompressionCost] = MappingProxyType(
    {
        "bf16": CompressionCost(
            "all_to_all_and_all_gather", lambda _: 2.0, traffic_bytes=42.0, kernels=8, is_searched=True
        ),
        "fp16": CompressionCost(
            "all_to_all_and_all_gather", lambda _: 2 + _BLOCK_SCALE_BYTES, traffic_bytes=86.0, kernels=20
        ),
        "int8": CompressionCost(
            "all_to_all_and_all_gather",
            lambda _: 1 + _BLOCK_SCALE_BYTES,
            traffic_bytes=122.0,
            kernels=24,
            # Each way one pass over the encoded values, the result and the error; beside it copies of
            # gradients and error feedback into a buffer, and of the sums out of it.
            cpu_traffic_bytes=66.0,
            is_searched=True,
        ),
        "topk": CompressionCost(
            "all_gather",
            lambda plan: _VALUE_AND_INDEX_BYTES * plan.compression_share,
            traffic_bytes=60.0,
            kernels=12,
        ),
        "powersgd": CompressionCost(
            "all_reduce",
            lambda plan: 4.0 * plan.compression_rank * 2 / POWERSGD_MATRIX_SIDE,  # two thin factors in fp32
            traffic_bytes=32.0,
            kernels=12,
        ),
    }
)
"""Cost of each compression method but "none"."""

SEARCHED_COMPRESSIONS: tuple[Compression, ...] = tuple(
    method for method, cost in COMPRESSION_COSTS.items() if cost.is_searched
)
"""Compression methods that `auto` tries, in this order."""
