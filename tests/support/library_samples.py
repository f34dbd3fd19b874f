"""Samples that the libraries of data formats write to files, and that are to be read back equal."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

COUNT = 5

MDS_COLUMNS = {
    "array": "ndarray",
    "array_dtype": "ndarray:int32",
    "array_fixed": "ndarray:float32:2,3",
    "bytes": "bytes",
    "decimal": "str_decimal",
    "float16": "float16",
    "float64": "float64",
    "int": "int",
    "json": "json",
    "pil": "pil",
    "png": "png",
    "str": "str",
    "str_float": "str_float",
    "str_int": "str_int",
    "uint8": "uint8",
}


def mds_samples() -> list[dict[str, Any]]:
    """Return samples of MDS; `pil` and `png` are the pixels of an image (height, width, channels)."""
    return [
        {
            "array": np.arange(number + 1, dtype="i2").reshape(1, -1),
            "array_dtype": np.full((2, number + 1), -number, "i4"),
            "array_fixed": np.full((2, 3), number / 4, "f4"),
            "bytes": bytes(range(number)),
            "decimal": Decimal(number) / 8,
            "float16": number / 2,
            "float64": number / 3,
            "int": number - 2,
            "json": {"number": [number, None, "é"]},
            "pil": np.full((2, 3, 3), number, "u1"),
            "png": np.full((2, 3, 3), number, "u1"),
            "str": "马" * number,
            "str_float": number / 3,
            "str_int": 10**30 + number,
            "uint8": number,
        }
        for number in range(COUNT)
    ]


def webdataset_samples() -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"{'folder' * (number * 8)}/{number:06d}",
            "cls": number,
            "json": {"number": number},
            "npy": np.arange(number),
            "txt": "马" * number,
        }
        for number in range(COUNT)
    ]


def megatron_documents() -> list[list[list[int]]]:
    """Return documents of Megatron: lists of sequences of tokens."""
    return [
        [list(range(number, number + size)) for size in (3, number + 1)[: 1 + number % 2]]
        for number in range(COUNT)
    ]


def tfrecord_samples() -> list[dict[str, Any]]:
    """Return features of `tf.train.Example`."""
    return [
        {
            "bytes": [bytes([number]) * size for size in range(number + 1)],
            "floats": np.arange(number, dtype="f4") / 4,
            "image": [bytes(range(200)) * number * 4],
            "integers": np.array([number, -number, 2**40], np.int64),
        }
        for number in range(COUNT)
    ]


def table_rows() -> list[dict[str, Any]]:
    """Return rows of a Hugging Face data set."""
    return [
        {
            "id": number,
            "nested": [{"a": number, "b": None}] * (number % 3),
            "text": None if number == 1 else "马" * number,
            "tokens": list(range(number)),
        }
        for number in range(4 * COUNT)
    ]
