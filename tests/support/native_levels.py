"""Results of a compiled library as bytes, for comparison between its levels."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from wanma.collectives.compression.int8_codec import BlockwiseInt8Codec
from wanma.collectives.shared_memory.native_library import (
    DTYPE_CODES,
    CollectiveKind,
    NativeCall,
    ReduceOperation,
    load_library,
)
from wanma.parallel.embedding import native_rows
from wanma.parallel.embedding.id_groups import group_ids
from wanma.parallel.embedding.interaction import interact_compiled

ELEMENTS = 4099
"""Elements of a tensor: two blocks of the reduction and a few, which no width of vectors divides."""


def collective_results(library: Path) -> dict[str, bytes]:
    """Return the all-reduce of every type and operation, of two and of three ranks."""
    results = {}
    for ranks in (2, 3):
        for dtype, code in DTYPE_CODES.items():
            if dtype is torch.bool:
                continue  # as uint8
            inputs = [_numbers(dtype, seed) for seed in range(ranks)]
            for operation in ReduceOperation:
                # Rank 0 alone has not-a-numbers: of two, x86 keeps the first operand's payload, and compilers
                # may swap operands.
                outputs = all_reduce(library, code, operation, inputs)
                results[f"{operation.name} of {dtype}, {ranks} ranks"] = outputs
    return results


collective_results.library = "group"  # type: ignore[attr-defined]


def codec_results(library: Path) -> dict[str, bytes]:
    """Return encoded and decoded numbers and the residuals, of ordinary numbers and of special ones."""
    codec = BlockwiseInt8Codec(library)
    torch.manual_seed(0)
    ordinary = torch.randn(3, 256 * 9) * torch.logspace(-30, 30, 9).repeat_interleave(256)
    halves = ordinary.sign() * (torch.arange(256 * 9) % 128 + 0.5)
    special = ordinary.clone()
    special[0, ::100], special[1, 5], special[2, 300] = 0.0, float("inf"), float("nan")
    results = {}
    for name, numbers in {"ordinary": ordinary, "halves": halves, "special": special}.items():
        encoded, residual = codec.encode(numbers), numbers.clone()
        again = codec.encode_with_residual(residual)
        results[f"{name} encoded"] = _bytes(encoded)
        results[f"{name} encoded with residual"] = _bytes(again)
        results[f"{name} residual"] = _bytes(residual)
        results[f"{name} decoded"] = _bytes(codec.decode(encoded))
    return results


codec_results.library = "blockwise"  # type: ignore[attr-defined]


def row_results(library: Path) -> dict[str, bytes]:
    """Return groups of ids, and interactions of vectors with their gradients."""
    with pytest.MonkeyPatch.context() as patch:
        native = native_rows.open_library(library)
        patch.setattr(native_rows, "load_rows_library", lambda: native)
        groups = group_ids(torch.arange(ELEMENTS) ** 2 % 61)
        results = {"positions": _bytes(groups.positions), "starts": _bytes(groups.starts)}
        for width in (16, 17):
            values = _numbers(torch.float32, 1)[: 24 * 10 * width].clamp(-100, 100).view(24, 10, width)
            vectors = values.requires_grad_().unbind(0)
            output = interact_compiled(vectors, True)
            output.square().sum().backward()
            assert values.grad is not None
            results |= {f"output, {width}": _bytes(output), f"gradients, {width}": _bytes(values.grad)}
        return results


row_results.library = "rows"  # type: ignore[attr-defined]


def _numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (ELEMENTS,), generator=generator).to(dtype)
    limits = torch.finfo(dtype)
    numbers = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
    numbers *= 10.0 ** torch.randint(-6, 4, (ELEMENTS,), generator=generator)
    special = (0.0, -0.0, limits.max, limits.min, limits.tiny, limits.tiny / 2, float("inf"))
    for place, value in enumerate(special):
        numbers[3 + 7 * place + seed :: 97] = value
    if seed == 0:
        numbers[1::97] = float("nan")
    return numbers.to(dtype)


def all_reduce(library: Path, code: int, operation: ReduceOperation, inputs: list[torch.Tensor]) -> bytes:
    """Return the sums of ranks that are threads of this process, by the interface that ranks use."""
    native: Any = load_library(library)
    ranks, chunk_bytes = len(inputs), 1 << 14
    arena = mmap.mmap(-1, native.wanma_arena_bytes(ranks, chunk_bytes, 0))
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    nobody = (ctypes.c_int * ranks)(*[-1] * ranks)
    groups = [native.wanma_open(base, rank, ranks, chunk_bytes, 0, 1000, nobody) for rank in range(ranks)]
    outputs = [torch.zeros_like(each) for each in inputs]
    numbers = []
    for group, given, taken in zip(groups, inputs, outputs, strict=True):
        call = NativeCall(
            kind=CollectiveKind.ALL_REDUCE,
            type=code,
            operation=operation,
            root=-1,
            count=len(given),
            input=given.data_ptr(),
            output=taken.data_ptr(),
            timeout_nanoseconds=60 * 10**9,
        )
        numbers.append(native.wanma_submit(group, ctypes.byref(call), 1))
    outcomes = [
        native.wanma_wait(group, number, 60 * 10**9) for group, number in zip(groups, numbers, strict=True)
    ]
    assert outcomes == [0] * ranks
    for group in groups:
        native.wanma_close(group)
    for group in groups:
        native.wanma_free(group)
    assert all(torch.equal(_bits(each), _bits(outputs[0])) for each in outputs)
    return _bytes(outputs[0])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return _bits(tensor.detach()).numpy().tobytes()
