"""Bindings of the native C++ library; every call releases Python's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_RANKS = 256
"""Most ranks of a group: kMostRanks in native/arena.hpp."""


class CollectiveStatus(IntEnum):
    """Result of a collective; as in native/arena.hpp."""

    DONE = 0
    TIMED_OUT = 1
    PEER_EXITED = 2
    PEER_CLOSED = 3
    ABORTED = 4
    MISMATCH = 5
    IN_PROGRESS = 6


class CollectiveKind(IntEnum):
    """Kind of a collective; as in native/collectives.hpp."""

    BARRIER = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5


class ReduceOperation(IntEnum):
    """Reduction of all ranks' elements; as in native/reduce.hpp."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4


DTYPE_CODES = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int8: 6,
    torch.uint8: 7,
    torch.bool: 7,
}
"""Element types that can be reduced; as in native/reduce.hpp. Booleans are bytes of 0 and 1."""
RAW_BYTES_CODE = 8
"""Element type of data that is only copied."""


class NativeCall(ctypes.Structure):
    """Arguments of a collective: WanmaCall in native/group.cpp."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("operation", ctypes.c_uint32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        ("input_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("output_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("timeout_nanoseconds", ctypes.c_int64),
    )


def make_pointer_array(addresses: Sequence[int]) -> Any:
    """Return a C array of addresses, one for each rank."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def make_size_array(counts: Sequence[int]) -> Any:
    """Return a C array of byte counts, one for each rank."""
    return (ctypes.c_uint64 * len(counts))(*counts)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """Load the library and declare the types of its functions.

    Raises:
        OSError: it cannot be loaded.
    """
    library = ctypes.CDLL(str(path))
    handle, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "wanma_arena_bytes": (size, [number, size, size]),
        "wanma_heap_offset": (size, [number, number, size, size]),
        "wanma_has_float16": (number, []),
        "wanma_open": (
            handle,
            [handle, number, number, size, size, ctypes.c_int64, ctypes.POINTER(number)],
        ),
        "wanma_submit": (size, [handle, ctypes.POINTER(NativeCall), number]),
        "wanma_wait": (number, [handle, size, ctypes.c_int64]),
        "wanma_done": (size, [handle]),
        "wanma_cause": (number, [handle, ctypes.POINTER(ctypes.c_uint8)]),
        "wanma_send": (
            number,
            [handle, number, ctypes.c_int32, handle, size, ctypes.c_int64, ctypes.POINTER(number)],
        ),
        "wanma_taken": (number, [handle, number, ctypes.c_uint32]),
        "wanma_receive": (
            number,
            [
                *(handle, ctypes.POINTER(number), ctypes.c_int32, handle, size, ctypes.c_int64),
                ctypes.POINTER(number),
            ],
        ),
        "wanma_mail": (ctypes.c_uint32, [handle]),
        "wanma_rest": (None, [handle, ctypes.c_uint32, ctypes.c_int64]),
        "wanma_usable": (number, [handle, number, ctypes.POINTER(number)]),
        "wanma_give_up": (None, [handle, number, number]),
        "wanma_abort": (None, [handle]),
        "wanma_close": (None, [handle]),
        "wanma_free": (None, [handle]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
