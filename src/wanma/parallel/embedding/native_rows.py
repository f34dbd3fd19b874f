"""Compiled code of embedding lookups on CPUs: each in one pass through memory."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wanma.hardware.native.native_library import find_or_build_library

NATIVE_SOURCE = Path(__file__).parent / "native" / "rows.cpp"
"""Source of the code in C++."""


def rows_library(*tensors: Tensor) -> Any:
    """Return the library that computes with tensors, or None: torch's operators do.

    It takes int64 or float32 on CPUs. Both give the same numbers, up to the rounding of sums.
    """
    dtype = tensors[0].dtype
    if dtype not in (torch.int64, torch.float32):
        return None
    is_taken = all(tensor.dtype == dtype and tensor.device.type == "cpu" for tensor in tensors)
    return load_rows_library() if is_taken else None


@cache
def load_rows_library() -> ctypes.CDLL | None:
    """Load the library of this process, whose calls release Python's lock; None: there is none."""
    library = find_or_build_library(NATIVE_SOURCE)
    if library.path is None:
        print(f"embedding lookups are slower without compiled code: {library.failure_reason}", flush=True)
        return None
    return open_library(library.path)


def open_library(path: Path) -> ctypes.CDLL:
    """Open a compiled `NATIVE_SOURCE`."""
    native = ctypes.CDLL(str(path))
    memory, size, flag, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    argument_types = {
        "wanma_group": [memory, size, memory, memory, memory],
        "wanma_locate": [memory] * 3 + [size] * 2 + [memory] * 5,
        "wanma_interact": [memory, *[size] * 4, flag, memory, flag],
        "wanma_interact_backward": [memory, *[size] * 4, flag, memory, memory, flag],
        "wanma_sum_groups": [memory, size, memory, memory, size, memory, size, number, memory, memory, flag],
        "wanma_adagrad": [*[memory, size] * 2, size, memory, size, memory, number, number, flag],
        "wanma_rowwise_adagrad": [*[memory, size] * 2, size, memory, size, memory, number, number, flag],
    }
    for name, types in argument_types.items():
        function = getattr(native, name)
        function.argtypes, function.restype = types, None
    native.wanma_group.restype = native.wanma_locate.restype = size
    return native
