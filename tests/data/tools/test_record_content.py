"""Content of records: fields decoded by their suffix, and sizes."""

from __future__ import annotations

import numpy as np
import pytest

from wanma.data.tools.record_content import (
    content_bytes,
    decode_tar_record,
)


def test_files_of_a_sample_are_decoded_by_their_suffix() -> None:
    record = {
        "__key__": "a/1",
        "cls": b"7",
        "id": b"007",
        "txt": "é".encode(),
        "image.jpg": memoryview(b"\xff"),
        "seg.png": b"s",
        "seg.bin": b"t",
        "json": b'{"width": 3}',
    }
    assert decode_tar_record(record) == {
        "__key__": "a/1",
        "cls": 7,
        "id": "007",
        "txt": "é",
        "image": b"\xff",
        "seg.png": b"s",
        "seg.bin": b"t",
        "width": 3,
    }
    with pytest.raises(ValueError, match=r"the file \.json cannot be decoded"):
        decode_tar_record({"json": b"{"})


def test_sizes_count_the_content_alone() -> None:
    assert content_bytes({"text": "é", "n": 1, "a": np.zeros(3, np.float32), "b": b"xy", "none": None}) == 24
