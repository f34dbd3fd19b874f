"""Samples that the libraries of data formats write to files, and that are to be read back equal."""

from __future__ import annotations

from typing import Any

import numpy as np

COUNT = 5


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
