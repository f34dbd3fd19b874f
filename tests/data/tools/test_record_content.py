"""Content of records: equal whatever format stores it, and fingerprints that add up."""

from __future__ import annotations

import datetime
from decimal import Decimal
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.tools.record_content import (
    ContentFingerprint,
    content_bytes,
    content_hash,
    decode_tar_record,
)

HASHES = st.lists(st.integers(0, 2**128 - 1), max_size=20)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": None}, {"x": 1.0}),
        ({"x": [1, 2]}, {"x": np.array([1, 2], np.uint8)}),
        ({"x": [0.5, 2.0]}, {"x": np.array([0.5, 2], np.float32)}),
        ({"x": b"ab"}, {"x": memoryview(b"ab")}),
        ({"x": "2026-01-02"}, {"x": datetime.date(2026, 1, 2)}),
        ({"x": "1.50"}, {"x": Decimal("1.50")}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x": 1}, {"x": 1, "__key__": "a"}),
        ({"x": {"y": None}}, {"x": {}}),
    ],
)
def test_equal_contents_have_one_hash(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert content_hash(a) == content_hash(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1}, {"x": True}),
        ({"x": 1}, {"x": "1"}),
        ({"x": b"a"}, {"x": "a"}),
        ({"x": b"a"}, {"x": b"b"}),
        ({"x": [1, None]}, {"x": [1]}),
        ({"x": 1}, {"y": 1}),
        ({"x": [1, 2]}, {"x": [2, 1]}),
    ],
)
def test_other_contents_have_another_hash(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert content_hash(a) != content_hash(b)


def fingerprint(hashes: list[int]) -> ContentFingerprint:
    return reduce(ContentFingerprint.add, hashes, ContentFingerprint())


@given(HASHES, HASHES)
def test_fingerprints_of_parts_add_up(a: list[int], b: list[int]) -> None:
    assert fingerprint(a) + fingerprint(b) == fingerprint(a + b)


@given(HASHES)
def test_the_order_counts(hashes: list[int]) -> None:
    if hashes != hashes[::-1]:
        assert fingerprint(hashes) != fingerprint(hashes[::-1])


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
