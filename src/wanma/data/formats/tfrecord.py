"""TFRecord files: framed records, checked by CRC-32C, and `tf.train.Example` decoded without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import Cursor, RangeFormat, RangeScan
from wanma.data.formats.compression import detect_compression, plain_head
from wanma.data.formats.format import BadDataError, Certainty, Content, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource

_FRAME_BYTES = 16
"""Size of a frame besides its data: uint64 length, its CRC, and the CRC of the data."""
_ZLIB_HEADS = (b"\x78\x01", b"\x78\x9c", b"\x78\xda")
_POLYNOMIAL = 0x82F63B78
_LANES_FROM_BYTES = 1500
"""Size from which the CRC is computed in parallel lanes."""
_LANE_BYTES = 64
_TABLE_STARTS = np.arange(0, 1024, 256)


@dataclass(frozen=True)
class TFRecord(RangeFormat):
    """TFRecord files, plain or compressed as a whole (GZIP, ZLIB).

    Values of an example are lists of bytes, float32 arrays and int64 arrays. A compressed file costs a plain
    copy in the scratch folder.

    Args:
        content: "example": a record is a `tf.train.Example` or `SequenceExample`; "bytes": it is the sample
            `{"record": bytes}`.
        check: compare data with its CRC when it is read.
    """

    content: Literal["example", "bytes"] = "example"
    check: bool = True
    name: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec")

    def detect(self, probe: Probe) -> Certainty:
        head = probe.head
        if head.startswith(_ZLIB_HEADS):
            head = plain_head(head, "zlib", 12)
        return Certainty.SURE if _length_fits(head[:12]) else Certainty.NO

    def compression(self, head: bytes) -> str:
        if _length_fits(head):  # the length of a record may look like a magic number
            return ""
        return "zlib" if head.startswith(_ZLIB_HEADS) else detect_compression(head)

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        cursor = Cursor(source)
        starts: list[int] = []
        ends: list[int] = []
        position = 0
        while position < source.size:
            head = cursor.take(position, 12)
            row = len(starts)
            if len(head) < 12:
                raise BadDataError(source.url, f"truncated inside a length at byte {position}", row)
            if not _length_fits(head):
                raise BadDataError(source.url, f"the length at byte {position} does not match its CRC", row)
            end = position + _FRAME_BYTES + int.from_bytes(head[:8], "little")
            if end > source.size:
                raise BadDataError(
                    source.url, f"truncated: it ends at byte {end}, the file at {source.size}", row
                )
            starts.append(position)
            ends.append(end)
            position = end
        return RangeScan(np.array(starts, np.int64), np.array(ends, np.int64))

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        frame = memoryview(content)
        data = frame[12:-4]
        if self.check and masked_crc(data) != int.from_bytes(frame[-4:], "little"):
            raise ValueError("the data does not match its CRC")
        return {"record": data} if self.content == "bytes" else decode_example(data)


def _length_fits(head: bytes) -> bool:
    return len(head) >= 12 and masked_crc(memoryview(head)[:8]) == int.from_bytes(head[8:12], "little")


def masked_crc(data: memoryview) -> int:
    """Return the CRC-32C of `data`, rotated and shifted as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: memoryview) -> int:
    """Return the CRC-32C (Castagnoli) of `data`.

    Long data is cut into lanes of 64 bytes, whose CRCs numpy computes side by side, two bytes a step.
    Neighbours are then joined pair by pair: a CRC is linear, so that moving one over the bytes of the next is
    a lookup.
    """
    size = len(data)
    if size < _LANES_FROM_BYTES:
        return _crc_bytes(data) ^ 0xFFFFFFFF
    lanes = -(-size // _LANE_BYTES)
    padded = np.zeros(lanes * _LANE_BYTES, np.uint8)  # zero bytes before the data change nothing
    start = len(padded) - size
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 0xFF  # the initial state
    states = np.zeros(lanes, np.uint32)
    table = _step_table()
    for step in padded.view("<u2").reshape(lanes, -1).T.astype(np.uint32):
        states = table[(states ^ step) & 0xFFFF] ^ states >> 16
    level = 0
    while len(states) > 1:
        if len(states) % 2:
            states = np.concatenate([np.zeros(1, np.uint32), states])
        states = _move(states[::2], _move_table(level)) ^ states[1::2]
        level += 1
    return int(states[0]) ^ 0xFFFFFFFF


def _crc_bytes(data: memoryview) -> int:
    table = _byte_table()
    state = 0xFFFFFFFF
    for value in data:
        state = table[(state ^ value) & 0xFF] ^ state >> 8
    return state


@cache
def _byte_table() -> list[int]:
    """Return the table of a step by one byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ np.uint32(_POLYNOMIAL), values >> 1).astype(np.uint32)
    table: list[int] = values.tolist()
    return table


@cache
def _step_table() -> NDArray[np.uint32]:
    """Return the table of a step by two bytes."""
    table = np.array(_byte_table(), np.uint32)
    values = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(2):
        values = table[values & 0xFF] ^ values >> 8
    return values


@cache
def _move_table(level: int) -> NDArray[np.uint32]:
    """Return four tables, one for each byte of a state, that move it over 64 x 2^`level` bytes of zero."""
    states = (np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]).ravel()
    if level:
        return _move(_move(states, _move_table(level - 1)), _move_table(level - 1))
    table = _step_table()
    for _ in range(_LANE_BYTES // 2):
        states = table[states & 0xFFFF] ^ states >> 16
    return states


def _move(states: NDArray[np.uint32], table: NDArray[np.uint32]) -> NDArray[np.uint32]:
    values = np.ascontiguousarray(states, "<u4").view(np.uint8).reshape(-1, 4)
    moved: NDArray[np.uint32] = np.bitwise_xor.reduce(table[values + _TABLE_STARTS], axis=1)
    return moved


def decode_example(data: memoryview) -> Record:
    """Decode a `tf.train.Example`; of a `SequenceExample` the lists of features become lists of values.

    Raises:
        ValueError: the data is no such message.
    """
    record: Record = {}
    for number, kind, value in _fields(data):
        if kind != 2 or number not in (1, 2):
            raise ValueError(f"no tf.train.Example: it has a field {number} of type {kind}")
        for name, feature in _map_entries(value):
            if number == 1:
                record[name] = _decode_feature(feature)
            else:
                record[name] = [_decode_feature(one) for field, _, one in _fields(feature) if field == 1]
    return record


def _map_entries(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield the entries of a map<string, message> in field 1."""
    for _, kind, entry in _fields(data):
        if kind != 2:
            raise ValueError("no tf.train.Example: its features are no mapping")
        name, value = "", memoryview(b"")
        for number, _, part in _fields(entry):
            if number == 1:
                name = str(part, "utf-8")
            else:
                value = part
        yield name, value


def _decode_feature(data: memoryview) -> list[memoryview] | NDArray[Any]:
    """Decode a Feature: a list of bytes, floats or integers; an empty one is an empty list."""
    for number, _, values in _fields(data):
        parts = list(_fields(values))
        if number == 1:
            return [value for _, _, value in parts]
        if number == 2:  # packed, or one by one
            return np.frombuffer(b"".join(value for _, _, value in parts), "<f4")
        if number == 3:
            return np.array([one for _, _, value in parts for one in _integers(value)], np.int64)
    return []


def _integers(data: memoryview) -> list[int]:
    values, position = [], 0
    while position < len(data):
        value, position = _varint(data, position)
        values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield number, wire type and bytes of each field of a protocol buffer (its encoding guide)."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            end = _varint(data, position)[1]
        elif kind == 1:
            end = position + 8
        elif kind == 2:
            size, position = _varint(data, position)
            end = position + size
        elif kind == 5:
            end = position + 4
        else:
            raise ValueError(f"no protocol buffer: a field of type {kind}")
        if end > len(data):
            raise ValueError("no protocol buffer, or a truncated one")
        yield tag >> 3, kind, data[position:end]
        position = end


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise ValueError("no protocol buffer: a number does not end")
