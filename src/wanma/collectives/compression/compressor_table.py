"""Table of compressors by the names that a job file gives them."""

from __future__ import annotations

from pathlib import Path

from wanma.collectives.compression.bucket_tensors import Compressor
from wanma.collectives.compression.half_precision_codecs import BFloat16Codec, BlockScaledFloat16Codec
from wanma.collectives.compression.int8_codec import BlockwiseInt8Codec
from wanma.collectives.compression.power_sgd import PowerSGD
from wanma.collectives.compression.quantized import QuantizedCompressor
from wanma.collectives.compression.top_k import TopK
from wanma.collectives.compression.uncompressed import IdentityCompressor
from wanma.job.sections.parallel import Compression

ERROR_FEEDBACK_METHODS: frozenset[Compression] = frozenset({"int8", "topk", "powersgd"})
"""Compressions with error feedback: values that they leave out are added to the next gradient."""


def make_compressor(
    name: Compression, top_k_fraction: float, native_library: Path | None = None
) -> Compressor:
    """Return the compressor of a name.

    Args:
        name: compression as the job file names it.
        top_k_fraction: fraction of each tensor's elements that 'topk' sends, in (0, 1].
        native_library: `int8_codec.NATIVE_SOURCE`, compiled; None: it is not compiled.
    """
    methods: dict[Compression, Compressor] = {
        "none": IdentityCompressor(),
        "bf16": QuantizedCompressor(BFloat16Codec()),
        "fp16": QuantizedCompressor(BlockScaledFloat16Codec()),
        "int8": QuantizedCompressor(BlockwiseInt8Codec(native_library)),
        "topk": TopK(top_k_fraction),
        "powersgd": PowerSGD(),
    }
    return methods[name]
