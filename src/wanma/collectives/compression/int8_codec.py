"""Codec of 8 bits: int8 with a scale for each block."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from wanma.collectives.compression.compression_traits import CODEC_BLOCK_ELEMENTS
from wanma.collectives.compression.quantized import Codec

NATIVE_SOURCE = Path(__file__).parent / "native" / "blockwise.cpp"
"""Source of the codec in C++: one pass through memory, where torch's operators take a dozen."""
_LARGEST = 127
_SCALE_BYTES = 4


class BlockwiseInt8Codec(Codec):
    """Codec of int8: each block of 256 has its own scale, its largest absolute value over 127.

    An outlier therefore costs only its own block precision (Dettmers et al. 2022, section 2.1; steps here are
    even, theirs grow with the value). An element and its share of the scale take 1 + 4/256 bytes.

    Rounding errors are added to the next gradient (Seide et al. 2014, eq. 1 and 2). A block with a value that
    is not finite comes back without one that is.

    Args:
        native_library: compiled `NATIVE_SOURCE`; None: torch's operators, which make the same bytes of finite
            numbers.
    """

    uses_error_feedback = True

    def __init__(self, native_library: Path | None = None) -> None:
        self._native = None if native_library is None else _load(native_library)

    def encode(self, values: Tensor) -> Tensor:
        if self._native is not None and values.device.type == "cpu":
            return self._encode(values, None)
        blocks = values.unflatten(1, (-1, CODEC_BLOCK_ELEMENTS))
        # The scale of a block of zeros is the smallest normal number: its inverse is finite.
        scales = (blocks.abs().amax(2) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (blocks * scales.reciprocal()[:, :, None]).round_().to(torch.int8).flatten(1)
        return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)

    def encode_with_residual(self, values: Tensor) -> Tensor:
        if self._native is not None and values.device.type == "cpu" and values.is_contiguous():
            return self._encode(values, values)
        return super().encode_with_residual(values)

    def decode(self, encoded: Tensor) -> Tensor:
        blocks = encoded.shape[1] // (CODEC_BLOCK_ELEMENTS + _SCALE_BYTES)
        if self._native is not None and encoded.device.type == "cpu":
            encoded = encoded.contiguous()
            decoded = torch.empty(len(encoded), blocks * CODEC_BLOCK_ELEMENTS, dtype=torch.float32)
            threads = torch.get_num_threads()
            self._native.wanma_int8_decode(
                encoded.data_ptr(), len(encoded), blocks, decoded.data_ptr(), threads
            )
            return decoded
        levels = (
            encoded[:, : CODEC_BLOCK_ELEMENTS * blocks]
            .view(torch.int8)
            .unflatten(1, (-1, CODEC_BLOCK_ELEMENTS))
        )
        scales = encoded[:, CODEC_BLOCK_ELEMENTS * blocks :].view(torch.float32)
        values: Tensor = (levels.to(torch.float32) * scales[:, :, None]).flatten(1)
        return values

    def _encode(self, values: Tensor, residual: Tensor | None) -> Tensor:
        assert self._native is not None
        assert values.dtype is torch.float32
        assert values.shape[1] % CODEC_BLOCK_ELEMENTS == 0
        values = values.contiguous()
        rows, blocks = len(values), values.shape[1] // CODEC_BLOCK_ELEMENTS
        encoded = torch.empty(rows, blocks * (CODEC_BLOCK_ELEMENTS + _SCALE_BYTES), dtype=torch.uint8)
        self._native.wanma_int8_encode(
            values.data_ptr(),
            rows,
            blocks,
            encoded.data_ptr(),
            None if residual is None else residual.data_ptr(),
            torch.get_num_threads(),
        )
        return encoded


@cache
def _load(library: Path) -> ctypes.CDLL:
    """Load the compiled codec; its calls release Python's lock."""
    native = ctypes.CDLL(str(library))
    memory, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    native.wanma_int8_encode.argtypes = [memory, size, size, memory, memory, number]
    native.wanma_int8_decode.argtypes = [memory, size, size, memory, number]
    native.wanma_int8_encode.restype = native.wanma_int8_decode.restype = None
    return native
