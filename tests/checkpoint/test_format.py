"""The format: boxes, the manifest and its checksum, the safetensors header."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as safetensors_load

from wanma.checkpoint.format.manifest import (
    Box,
    FileEntry,
    Manifest,
    SavedShard,
    TensorEntry,
    build_header,
    dump_manifest,
    intersect_boxes,
    parse_header,
    parse_manifest,
)
from wanma.job.errors import WanmaError

MANIFEST = Manifest(
    step=100,
    world_size=2,
    metric=1.25,
    state={"step": 100, "名": ["ä", 0.1, None, True]},
    rank_state={0: {"x": 1}, 11: {}},
    files={"rank-00000.safetensors": FileEntry(1234, "ab" * 32)},
    tensors={
        "w": TensorEntry("F32", (4, 3), (SavedShard(Box((2, 0), (2, 3)), "rank-00000.safetensors"),)),
        "scalar": TensorEntry("I64", (), (SavedShard(Box((), ()), "rank-00000.safetensors"),)),
    },
)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of a grid over `shape`, some of them empty."""
    edges = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        edges.append(list(itertools.pairwise([0, *cuts, size])))
    return [
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*edges)
    ]


@given(st.data(), st.lists(st.integers(0, 6), max_size=3).map(tuple))
def test_copying_overlaps_moves_a_tensor_from_any_grid_of_boxes_to_any_other(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    full = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)

    def part(box: Box) -> np.ndarray:
        return full[
            tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        ]

    saved = data.draw(partitions(shape))
    for wanted in data.draw(partitions(shape)):
        local = np.zeros(wanted.shape, dtype=full.dtype)
        copied = 0
        for box in saved:
            if (common := intersect_boxes(wanted, box)) is not None:
                local[common[0]] = part(box)[common[1]]
                copied += part(box)[common[1]].size
        assert np.array_equal(local, part(wanted))
        assert copied == wanted.numel  # nothing copied twice


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert parse_manifest(dump_manifest(MANIFEST)) == MANIFEST


def test_a_manifest_is_one_json_document() -> None:
    document = json.loads(dump_manifest(MANIFEST))
    assert document["format"] == "wanma-checkpoint"
    assert document["version"] == 1
    assert document["manifest"]["tensors"]["w"]["shards"][0]["offset"] == [2, 0]


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed() -> None:
    content = dump_manifest(MANIFEST)
    for position in range(len(content)):
        for bit in (0, 4):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(WanmaError, match="manifest"):
                parse_manifest(bytes(damaged))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_give_a_clear_error(content: bytes) -> None:
    with pytest.raises(WanmaError, match=r"manifest\.json is not the manifest"):
        parse_manifest(content)


def test_a_truncated_manifest_is_noticed() -> None:
    content = dump_manifest(MANIFEST)
    for length in range(len(content)):
        with pytest.raises(WanmaError):
            parse_manifest(content[:length])


def test_a_newer_format_asks_for_an_update() -> None:
    content = dump_manifest(MANIFEST).replace(b'"version":1', b'"version":3', 1)
    with pytest.raises(WanmaError, match=r"version 3; .* up to 2") as caught:
        parse_manifest(content)
    assert caught.value.hint == "update wanma"


def test_files_outside_the_checkpoint_and_shards_outside_their_tensor_are_refused() -> None:
    entry = TensorEntry("F32", (4, 3), (SavedShard(Box((3, 0), (2, 3)), "rank-00000.safetensors"),))
    for files, tensors, fact in (
        ({"../../etc/passwd": FileEntry(1, "")}, {}, "malformed"),
        (MANIFEST.files, {"w": entry}, "malformed.*shard"),
    ):
        with pytest.raises(WanmaError, match=fact):
            parse_manifest(dump_manifest(Manifest(1, 1, None, {}, {}, files, tensors)))


def test_deeply_nested_json_does_not_crash_the_reader() -> None:
    with pytest.raises(WanmaError):
        parse_manifest(b"[" * 200_000)


def test_state_that_json_cannot_hold_is_refused_when_saving() -> None:
    for value in (float("nan"), float("inf"), object(), b"bytes"):
        with pytest.raises(WanmaError, match="cannot be written as JSON"):
            dump_manifest(Manifest(1, 1, None, {"value": value}))


TENSORS = {
    "a": ("BOOL", (3,)),
    "b": ("F64", (2, 2)),
    "c": ("F16", ()),
    "d": ("F32", (0, 4)),
    "é": ("I16", (5,)),
}


def test_the_header_opens_with_the_safetensors_library() -> None:
    header, regions = build_header(TENSORS)
    size = max(region.stop for region in regions.values())
    content = header + bytes(size - len(header))
    loaded = safetensors_load(content)
    assert {name: value.shape for name, value in loaded.items()} == {
        name: shape for name, (_, shape) in TENSORS.items()
    }
    assert parse_header(content, size) == regions


def test_every_tensor_lies_aligned_to_its_element() -> None:
    header, regions = build_header(TENSORS)
    assert len(header) % 64 == 0
    for name, item_bytes in {"a": 1, "b": 8, "c": 2, "d": 4, "é": 2}.items():
        assert regions[name].start % item_bytes == 0


@given(st.binary(max_size=100).filter(lambda content: b"{}" not in content), st.integers(0, 200))
def test_bytes_that_are_no_safetensors_file_give_a_value_error(content: bytes, size: int) -> None:
    """`{}` is one: of no tensors."""
    with pytest.raises(ValueError):  # noqa: PT011 - any text: the reader adds the file's name
        parse_header(len(content).to_bytes(8, "little") + content + b"}", size)


def test_a_tensor_that_reaches_beyond_the_file_is_refused() -> None:
    header, regions = build_header({"w": ("F32", (10,))})
    with pytest.raises(ValueError, match="tensor w reaches outside the file"):
        parse_header(header, regions["w"].stop - 1)
