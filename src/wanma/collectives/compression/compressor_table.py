"""Table of compressors and codecs by the names that a job file gives them."""

from __future__ import annotations

from pathlib import Path

from wanma.collectives.compression.bucket_tensors import Compressor
from wanma.collectives.compression.half_precision_codecs import BFloat16Codec, BlockScaledFloat16Codec
from wanma.collectives.compression.int8_codec import BlockwiseInt8Codec
from wanma.collectives.compression.power_sgd import PowerSGD
from wanma.collectives.compression.quantized import Codec, QuantizedCompressor
from wanma.collectives.compression.top_k import TopK
from wanma.collectives.compression.uncompressed import IdentityCompressor
from wanma.job.sections.parallel import Compression


def make_compressor(
    name: Compression, top_k_fraction: float, native_library: Path | None = None
) -> Compressor:
    """Return the compressor of a name.

    Args:
        name: compression as the job file names it.
        top_k_fraction: fraction of each tensor's elements that 'topk' sends, in (0, 1].
        native_library: `int8_codec.NATIVE_SOURCE`, compiled; None: it is not compiled.
    """
    codec = make_codec(name, native_library)
    if codec is not None:
        return QuantizedCompressor(codec)
    others: dict[Compression, Compressor] = {
        "none": IdentityCompressor(),
        "topk": TopK(top_k_fraction),
        "powersgd": PowerSGD(),
    }
    return others[name]


def make_codec(name: Compression, native_library: Path | None = None) -> Codec | None:
    """Return the codec of a compression that encodes values; None for one that does not.

    Args:
        name: compression as the job file names it.
        native_library: as for `make_compressor`.
    """
    codecs: dict[Compression, Codec] = {
        "bf16": BFloat16Codec(),
        "fp16": BlockScaledFloat16Codec(),
        "int8": BlockwiseInt8Codec(native_library),
    }
    return codecs.get(name)
