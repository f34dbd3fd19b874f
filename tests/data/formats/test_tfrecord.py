"""TFRecord: CRC-32C, examples and their wire format, records that are no examples."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data_files import example, frame, message, one_group, plain, varint
from wanma.data.formats.format import BadDataError
from wanma.data.formats.tfrecord import TFRecord, crc32c, decode_example


def read(path: Path, content: bytes, data_format: TFRecord | None = None) -> list[Any]:
    path.write_bytes(content)
    data_format = data_format or TFRecord()
    layout = data_format.scan(one_group(path))
    return [plain(one) for one in data_format.open(one_group(path), layout).read(np.arange(layout.rows))]


def reference_crc(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_crc_is_castagnoli_s() -> None:
    assert crc32c(memoryview(b"123456789")) == 0xE3069283  # RFC 3720, appendix B.4 and others
    assert crc32c(memoryview(bytes(32))) == 0x8A9136AA


@pytest.mark.parametrize("size", [0, 1, 1499, 1500, 1501, 1536, 5000, 65536, 100_003])
def test_crc_in_lanes_is_that_byte_by_byte(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert crc32c(memoryview(data)) == reference_crc(data)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.lists(st.binary(max_size=9), min_size=1)
        | st.lists(st.floats(width=32, allow_nan=False), min_size=1).map(
            lambda values: np.array(values, "f4")
        )
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1).map(lambda values: np.array(values, "i8")),
    )
)
def test_examples_are_decoded(features: dict[str, Any]) -> None:
    assert plain(decode_example(memoryview(example(features)))) == plain(features)


def test_numbers_that_are_not_packed_are_decoded() -> None:
    floats = message(2, b"".join(bytes([1 << 3 | 5]) + struct.pack("<f", value) for value in (1.5, 2.5)))
    integers = message(3, b"".join(bytes([1 << 3]) + varint(value) for value in (7, -7)))
    entries = [
        message(1, message(1, name) + message(2, value)) for name, value in ((b"f", floats), (b"i", integers))
    ]
    found = decode_example(memoryview(message(1, b"".join(entries))))
    assert plain(found) == plain({"f": np.array([1.5, 2.5], "f4"), "i": np.array([7, -7])})


def test_a_sequence_example_gives_lists_of_values() -> None:
    context = example({"id": np.array([3])})
    steps = b"".join(message(1, message(3, message(1, varint(number)))) for number in (4, 5))
    lists = message(2, message(1, message(1, b"step") + message(2, steps)))
    assert plain(decode_example(memoryview(context + lists))) == plain(
        {"id": np.array([3]), "step": [np.array([4]), np.array([5])]}
    )


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    content = frame(example({"a": np.array([1])})) + frame(b"\xff" * 40)
    with pytest.raises(BadDataError, match="row 1: no ") as raised:
        read(tmp_path / "a.tfrecord", content)
    assert raised.value.row == 1
    found = read(tmp_path / "a.tfrecord", content, TFRecord(content="bytes"))
    assert found[1] == {"record": b"\xff" * 40}


def test_damaged_data_is_named_unless_it_is_not_checked(tmp_path: Path) -> None:
    content = bytearray(frame(b"abc") + frame(b"def"))
    content[-5] ^= 1
    with pytest.raises(BadDataError, match="row 1: the data does not match its CRC"):
        read(tmp_path / "a", bytes(content), TFRecord(content="bytes"))
    assert read(tmp_path / "a", bytes(content), TFRecord("bytes", check=False))[1] == {"record": b"deg"}


def test_a_damaged_length_is_named(tmp_path: Path) -> None:
    content = bytearray(frame(b"abc") + frame(b"def"))
    content[len(content) // 2] ^= 1
    with pytest.raises(BadDataError, match="row 1: the length at byte 19"):
        read(tmp_path / "a", bytes(content))


def test_a_length_that_looks_like_gzip_is_no_compression(tmp_path: Path) -> None:
    content = frame(bytes(0x088B1F))
    assert content.startswith(b"\x1f\x8b\x08")
    assert len(read(tmp_path / "a", content, TFRecord(content="bytes"))[0]["record"]) == 0x088B1F
