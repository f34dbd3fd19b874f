"""Codecs of 16 bits: bf16, and fp16 with a scale for each block.

Both are codecs of `quantized`: sums are made in fp32, so that the loss does not grow with the number of
ranks; each element is rounded twice, on its way to the rank that sums it and back. Rounding to nearest has no
bias to speak of, so no error feedback is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS
from wanma.collectives.compression.quantized import Codec

_MAX_EXPONENT = 15
"""Exponent that blocks are scaled to: they stay below 2^15; fp16 overflows at 2^16."""


class BFloat16Codec(Codec):
    """Codec of bf16: 8 bits of exponent, as fp32 has, and 8 of precision."""

    uses_error_feedback = False

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(torch.bfloat16).to(torch.float32)


class BlockScaledFloat16Codec(Codec):
    """Codec of fp16 with scaled blocks: 11 bits of precision, without overflow.

    Each block of 256 is scaled by the power of two that brings its largest element below 2^15, so that
    nothing overflows, and the scale itself rounds nothing. Elements smaller than 2^-29 of their block's
    largest lose precision. Not-a-numbers and infinities stay what they are.
    """

    uses_error_feedback = False

    def encode(self, values: Tensor) -> Tensor:
        blocks = values.unflatten(1, (-1, CODEC_BLOCK_ELEMENTS))
        _, exponents = torch.frexp(blocks.abs().amax(2))  # largest = mantissa in [0.5, 1) * 2^exponent
        exponents = (exponents - _MAX_EXPONENT).clamp(
            -126, 113
        )  # normal numbers of fp32, whatever the block has
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        halves = (blocks / scales[:, :, None]).to(torch.float16).flatten(1)
        return torch.cat([halves.view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, encoded: Tensor) -> Tensor:
        blocks = encoded.shape[1] // (2 * CODEC_BLOCK_ELEMENTS + 4)
        halves = (
            encoded[:, : 2 * CODEC_BLOCK_ELEMENTS * blocks]
            .view(torch.float16)
            .unflatten(1, (-1, CODEC_BLOCK_ELEMENTS))
        )
        scales = encoded[:, 2 * CODEC_BLOCK_ELEMENTS * blocks :].view(torch.float32)
        values: Tensor = (halves.to(torch.float32) * scales[:, :, None]).flatten(1)
        return values
