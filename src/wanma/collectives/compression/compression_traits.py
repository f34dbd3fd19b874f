"""Traits of the compression methods, a row for each, and the sizes of their messages.

A new method takes its name in `job/sections/parallel.py`, a row here, its compressor in
`compressor_table.py` and its cost in `planner/cost/compression_cost.py`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from wanma.job.sections.parallel import Compression

CODEC_BLOCK_ELEMENTS = 256
"""Multiple of elements at which tensors start in a buffer, so that no block with a scale spans two."""
MAX_SLICE_ELEMENTS = 1 << 21
"""Most elements that are compressed at once.

That takes a few times 8 MB beside the gradients, for each of the sums in flight; with fewer elements the
network's latency would matter more than its bandwidth.
"""
MAX_IN_FLIGHT = 2
"""Number of sums in progress: one that computes, and one in communication."""


@dataclass(frozen=True)
class CompressionTraits:
    """Properties of a compression method that other rooms rely on."""

    phrase: str
    """Method in words, after "gradients"; `{percent}` and `{rank}` are those of the plan."""
    job_key: Literal["compression_share", "compression_rank"] | None = None
    """Key of section `[parallel]` that the method alone reads."""
    has_error_feedback: bool = False
    """Error feedback: values that the method leaves out are added to the next gradient."""
    is_low_rank: bool = False
    """Product of thin matrices: it takes tensors undivided, and leaves those uncompressed that would hardly
    shrink."""
    has_native_codec: bool = False
    """Codec with a library in C++, for gradients on the CPU."""
    sums_equal_across_devices: bool = True
    """Sums have the same bits on ranks whose devices round differently."""


COMPRESSION_TRAITS: Mapping[Compression, CompressionTraits] = MappingProxyType(
    {
        "none": CompressionTraits("uncompressed"),
        "bf16": CompressionTraits("in bf16"),
        "fp16": CompressionTraits("in fp16"),
        "int8": CompressionTraits("in int8", has_error_feedback=True, has_native_codec=True),
        "topk": CompressionTraits(
            "by top-k ({percent:g}%)", job_key="compression_share", has_error_feedback=True
        ),
        "powersgd": CompressionTraits(
            "by PowerSGD (rank {rank})",
            job_key="compression_rank",
            has_error_feedback=True,
            is_low_rank=True,
            sums_equal_across_devices=False,  # each rank multiplies the product out itself
        ),
    }
)
"""Traits of each compression method."""

ERROR_FEEDBACK_METHODS: frozenset[Compression] = frozenset(
    method for method, traits in COMPRESSION_TRAITS.items() if traits.has_error_feedback
)
"""Compression methods with error feedback."""
