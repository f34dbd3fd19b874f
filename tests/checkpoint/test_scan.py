"""A scan finds everything that is wrong, with the file and the cause."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.format.manifest import Box, SavedShard, TensorEntry, dump_manifest
from wanma.checkpoint.inspection.integrity_scan import (
    Defect,
    LocalFiles,
    find_coverage_error,
    find_size_mismatch,
    scan_checkpoint,
)
from wanma.checkpoint.load.verification import find_defects
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import read_manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One checkpoint of two ranks."""
    ranks = [Checkpointer(tmp_path, rank, 2) for rank in range(2)]
    for checkpointer in ranks:
        checkpointer.save(3, {name: torch.ones(40, 10) for name in ("a", "b", "c", "d")}, {"step": 3})
    for checkpointer in ranks:
        checkpointer.close()
    return tmp_path / "step-00000003"


def problems(path: Path) -> list[Defect]:
    found = scan_checkpoint(path.name, LocalFiles(path)).defects
    assert scan_checkpoint(path.name, RemoteStorage(f"file://{path}")).defects == found  # at a URL the same
    return list(found)


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: object) -> None:
    manifest = replace(read_manifest(path), **changes)
    (path / "manifest.json").write_bytes(dump_manifest(manifest))


def test_a_whole_checkpoint_has_no_problem(path: Path) -> None:
    found = scan_checkpoint(path.name, LocalFiles(path))
    assert found.is_valid
    assert found.manifest == read_manifest(path)
    assert problems(path) == []


def test_all_damaged_files_are_listed_not_only_the_first(path: Path) -> None:
    flip_bit(path / "rank-00000.safetensors", -1)
    flip_bit(path / "rank-00001.safetensors", -1)
    damaged = "is damaged: its content differs from its SHA-256"
    assert problems(path) == [
        Defect("rank-00000.safetensors", damaged),
        Defect("rank-00001.safetensors", damaged),
    ]
    (path / "rank-00000.safetensors").unlink()
    (path / "rank-00001.safetensors").write_bytes(b"short")
    assert [problem.cause.split(" bytes")[0] for problem in problems(path)] == ["is missing", "has 5"]
    assert (
        find_size_mismatch(LocalFiles(path).size, read_manifest(path)) == "rank-00000.safetensors is missing"
    )


def test_a_damaged_header_is_two_problems_and_no_crash(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    flip_bit(file, 0)
    content = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + content[8:])
    assert [problem.cause for problem in problems(path)] == [
        "is damaged: its content differs from its SHA-256",
        "no safetensors header",
    ]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "is missing: the checkpoint was never committed"),
        (b"{}", "is not the manifest of a checkpoint"),
        (b"", "is not the manifest of a checkpoint"),
    ],
)
def test_without_a_manifest_that_is_the_problem(path: Path, content: bytes | None, cause: str) -> None:
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_bytes(content)
    assert problems(path) == [Defect("manifest.json", cause)]


def test_a_manifest_that_was_edited_is_noticed(path: Path) -> None:
    flip_bit(path / "manifest.json", -20)
    assert problems(path) == [Defect("manifest.json", "is damaged: its content differs from its SHA-256")]


def test_what_no_hash_tells_is_found_too(path: Path) -> None:
    """Files and manifest with right hashes that do not fit each other."""
    tensors = dict(read_manifest(path).tensors)
    file = tensors["a"].shards[0].file
    other = next(name for name in ("rank-00000.safetensors", "rank-00001.safetensors") if name != file)
    half = Box((0, 0), (20, 10))
    tensors["a"] = TensorEntry("F32", (40, 10), (SavedShard(half, file),))
    tensors["e"] = TensorEntry("F32", (40, 10), (SavedShard(Box((0, 0), (40, 10)), other),))
    moved = tensors.pop("b")
    rewrite(path, tensors=tensors, step=4)
    expected = [
        Defect("manifest.json", "is of step 4, which differs from the step in the name of its folder"),
        Defect("manifest.json", "tensor a: its shards cover 200 of 400 elements"),
        Defect(file, "tensor a is F32 (40, 10), but F32 (20, 10) in the manifest"),
        Defect(other, "tensor e is missing in it"),
        Defect(moved.shards[0].file, "tensor b is in it, but not in the manifest"),
    ]
    assert sorted(problems(path), key=str) == sorted(expected, key=str)


def test_shards_that_overlap_are_found_although_their_sizes_add_up(path: Path) -> None:
    tensors = dict(read_manifest(path).tensors)
    file = tensors["a"].shards[0].file
    boxes = [Box((0, 0), (20, 10)), Box((10, 0), (20, 10))]
    tensors["a"] = TensorEntry("F32", (40, 10), tuple(SavedShard(box, file) for box in boxes))
    rewrite(path, tensors=tensors)
    causes = [problem.cause for problem in problems(path) if problem.file == "manifest.json"]
    assert causes == [
        "tensor a: shards at (0, 0) and (10, 0) overlap",
        f"tensor a: 2 shards with this name in {file}",
    ]


def test_a_header_without_a_tensor_is_found(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    header = json.dumps({"__metadata__": {}}).encode()
    content = len(header).to_bytes(8, "little") + header
    file.write_bytes(content.ljust(file.stat().st_size))
    assert [problem.cause for problem in problems(path)][1:] == [
        f"tensor {name} is missing in it" for name in ("a", "c")
    ]


# ---------------------------------------------------------------- covering a tensor


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor, and a grid of boxes that make it up, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    ends = [sorted({*draw(st.lists(st.integers(1, size), max_size=3)), size}) for size in shape]
    spans = [list(zip([0, *stops], stops, strict=False)) for stops in ends]
    boxes = [
        Box(tuple(start for start, _ in part), tuple(stop - start for start, stop in part))
        for part in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@given(cut())
def test_a_grid_of_boxes_covers_its_tensor(tensor: tuple[tuple[int, ...], list[Box]]) -> None:
    assert find_coverage_error(*tensor) is None


@given(cut(), st.data())
def test_a_missing_box_and_a_doubled_box_are_noticed(
    tensor: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tensor
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert find_coverage_error(shape, boxes[:at] + boxes[at + 1 :]) is not None
    assert "overlap" in str(find_coverage_error(shape, [*boxes, boxes[at]]))


def test_a_tensor_without_elements_needs_no_box() -> None:
    assert find_coverage_error((0, 4), []) is None
    assert find_coverage_error((0, 4), [Box((0, 0), (0, 4))]) is None


def test_many_shards_are_looked_through_quickly() -> None:
    boxes = [Box((row, column), (1, 64)) for row in range(128) for column in range(0, 4096, 64)]
    assert find_coverage_error((128, 4096), boxes) is None


def test_a_folder_in_place_of_a_data_file_is_no_file(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()
    (path / "rank-00000.safetensors").mkdir()
    assert [problem.cause for problem in problems(path)] == ["is missing"]
    assert find_defects(path) == ["rank-00000.safetensors is not a file"]
