"""Images: a head that never lies about what is behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.in_memory.memory_file import (
    HEADER_BYTES,
    MemoryFileHeader,
    MemoryFileReader,
    MemoryFileWriter,
    read_header,
)

CONTENT = bytes(range(256)) * 20


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("wanma-test")
    yield descriptor
    os.close(descriptor)


def path(memory: int) -> str:
    return f"/proc/self/fd/{memory}"


def written(memory: int, step: int = 7) -> MemoryFileHeader:
    image = MemoryFileWriter(path(memory))
    image.mark_incomplete(MemoryFileHeader(step, 3, 1, 4, 99))
    image.content(len(CONTENT))[:] = CONTENT
    image.reserve(100)
    return image.finish(len(CONTENT), xxhash.xxh3_128(CONTENT), b'{"rank":1}')


@given(
    st.builds(
        MemoryFileHeader,
        step=st.integers(0, 2**64 - 1),
        generation=st.integers(0, 2**64 - 1),
        rank=st.integers(0, 2**32 - 1),
        world_size=st.integers(0, 2**32 - 1),
        layout_hash=st.integers(0, 2**64 - 1),
        is_complete=st.booleans(),
        content_bytes=st.integers(0, 2**64 - 1),
        rank_manifest_bytes=st.integers(0, 2**64 - 1),
        digest=st.binary(min_size=16, max_size=16),
    )
)
def test_a_head_reads_back_as_it_was_written(head: MemoryFileHeader) -> None:
    memory = os.memfd_create("wanma-test")
    os.pwrite(memory, head.pack(), 0)
    assert read_header(memory) == read_header(path(memory)) == head
    os.close(memory)


def test_an_empty_file_has_no_head(memory: int) -> None:
    assert read_header(memory) is None


def test_a_head_with_any_bit_flipped_is_none(memory: int) -> None:
    whole = MemoryFileHeader(7, 3, 1, 4, is_complete=True).pack()
    for bit in range(8 * len(whole)):
        packed = bytearray(whole)
        packed[bit // 8] ^= 1 << (bit % 8)
        os.pwrite(memory, packed, 0)
        assert read_header(memory) is None, bit


def test_an_image_holds_what_was_written(memory: int) -> None:
    head = written(memory)
    assert head == replace(
        MemoryFileHeader(7, 3, 1, 4, 99),
        is_complete=True,
        content_bytes=5120,
        rank_manifest_bytes=10,
        digest=head.digest,
    )
    image = MemoryFileReader(path(memory))
    assert image.header == head
    assert bytes(image.content) == CONTENT
    assert image.rank_manifest() == {"rank": 1}
    assert image.is_valid()


def test_an_image_counts_for_nothing_from_the_moment_it_is_written_anew(memory: int) -> None:
    written(memory)
    MemoryFileWriter(path(memory)).mark_incomplete(MemoryFileHeader(8, 3, 1, 4))
    head = read_header(memory)
    assert (head.step, head.is_complete) == (8, False)
    with pytest.raises(ValueError, match="not complete"):
        MemoryFileReader(path(memory))


def test_an_image_may_be_shorter_than_the_one_before(memory: int) -> None:
    written(memory)
    image = MemoryFileWriter(path(memory))
    image.mark_incomplete(MemoryFileHeader(8, 3, 1, 4))
    image.content(64)[:] = bytes(64)
    image.finish(64, xxhash.xxh3_128(bytes(64)), b"{}")
    found = MemoryFileReader(path(memory))
    assert found.is_valid()
    assert (bytes(found.content), found.rank_manifest()) == (bytes(64), {})


@pytest.mark.parametrize("offset", [0, 1, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 9])
def test_a_flipped_bit_of_content_or_table_is_found(offset: int, memory: int) -> None:
    written(memory)
    at = HEADER_BYTES + offset
    os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ 16]), at)
    assert not MemoryFileReader(path(memory)).is_valid()


def test_an_image_that_was_cut_is_refused(memory: int) -> None:
    written(memory)
    os.ftruncate(memory, HEADER_BYTES + len(CONTENT))
    with pytest.raises(ValueError, match="truncated"):
        MemoryFileReader(path(memory))


def test_reading_changes_nothing_in_the_file(memory: int) -> None:
    written(memory)
    MemoryFileReader(path(memory)).content[:4] = b"xxxx"
    assert MemoryFileReader(path(memory)).is_valid()
