"""Table of compressors by the names that a job file gives them."""

from __future__ import annotations

from pathlib import Path

from wanma.collectives.compression.bucket_tensors import Method
from wanma.collectives.compression.half_precision_codecs import BFloat16, Float16
from wanma.collectives.compression.int8_codec import BlockwiseInt8
from wanma.collectives.compression.power_sgd import PowerSGD
from wanma.collectives.compression.quantized import TwoPhase
from wanma.collectives.compression.top_k import TopK
from wanma.collectives.compression.uncompressed import Whole
from wanma.job.sections.parallel import Compression

KEEP_ERRORS: frozenset[Compression] = frozenset({"int8", "topk", "powersgd"})
"""Compressions with error feedback: values that they leave out are added to the next gradient."""


def method_of(name: Compression, share: float, native: Path | None = None) -> Method:
    """Return the compressor of a name.

    Args:
        name: compression as the job file names it.
        share: fraction of each tensor's elements that 'topk' sends, in (0, 1].
        native: `int8_codec.SOURCE`, compiled; None: it is not compiled.
    """
    methods: dict[Compression, Method] = {
        "none": Whole(),
        "bf16": TwoPhase(BFloat16()),
        "fp16": TwoPhase(Float16()),
        "int8": TwoPhase(BlockwiseInt8(native)),
        "topk": TopK(share),
        "powersgd": PowerSGD(),
    }
    return methods[name]
