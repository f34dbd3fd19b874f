"""Differences between two checkpoints, in numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.format.manifest import Box
from wanma.checkpoint.format.tensor_blocks import iterate_blocks
from wanma.checkpoint.inspection.comparison import CheckpointDifference, TensorDifference, compare_checkpoints
from wanma.checkpoint.load.reader import CheckpointReader
from wanma.checkpoint.save.checkpointer import Checkpointer


def save(folder: Path, tensors: dict[str, torch.Tensor], ranks: int = 1, step: int = 1, **state: Any) -> Path:
    checkpointers = [Checkpointer(folder, rank, ranks) for rank in range(ranks)]
    for rank, checkpointer in enumerate(checkpointers):
        checkpointer.save(step, tensors, {"step": step, **state}, rank_state={"rank": rank % 2})
    for checkpointer in checkpointers:
        checkpointer.close()
    return folder / f"step-{step:08d}"


def differences(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, block: int = 4) -> CheckpointDifference:
    return compare_checkpoints(save(tmp_path / "a", {"w": a}), save(tmp_path / "b", {"w": b}), block)


def test_the_same_tensors_in_other_files_do_not_differ(tmp_path: Path) -> None:
    tensors = {name: torch.randn(30, 20) for name in ("a", "b", "c")}
    tensors["scalar"] = torch.tensor(3)
    found = compare_checkpoints(
        save(tmp_path / "a", tensors, ranks=1), save(tmp_path / "b", tensors, ranks=1)
    )
    assert found.is_empty
    assert found.equal_tensors == 4
    two = compare_checkpoints(save(tmp_path / "c", tensors, ranks=2), save(tmp_path / "d", tensors, ranks=1))
    assert (two.tensors, two.state_differences, two.ranks_with_different_state) == ((), (), (1,))


def test_largest_and_relative_difference_and_the_state(tmp_path: Path) -> None:
    a = {"w": torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]), "gone": torch.ones(1), "same": torch.ones(9)}
    b = {"w": torch.tensor([[3.0, 0.5, 4.0], [0.0, -1.2, 0.0]]), "new": torch.ones(1), "same": torch.ones(9)}
    found = compare_checkpoints(
        save(tmp_path / "a", a, step=10, samples=320, schedule={"base": 1.0}),
        save(tmp_path / "b", b, step=20, samples=640, schedule={"base": 1.0}),
        block_elements=2,
    )
    (w,) = found.tensors
    assert (w.name, w.unequal_elements, w.non_finite_elements) == ("w", 2, 0)
    assert w.max_absolute_difference == pytest.approx(1.2)
    assert w.relative_norm == pytest.approx(1.3 / 5.0)
    assert (found.only_a, found.only_b, found.equal_tensors) == (("gone",), ("new",), 1)
    assert found.state_differences == (("step", 10, 20), ("samples", 320, 640))


def test_other_shapes_and_dtypes_are_differences_of_their_own(tmp_path: Path) -> None:
    (shape,) = differences(tmp_path / "1", torch.ones(4, 2), torch.ones(2, 4)).tensors
    assert shape == TensorDifference("w", ("F32", "F32"), ((4, 2), (2, 4)), relative_norm=None)
    (dtype,) = differences(tmp_path / "2", torch.ones(8), torch.ones(8).bfloat16()).tensors
    assert dtype == TensorDifference("w", ("F32", "BF16"), ((8,), (8,)))
    (rounded,) = differences(tmp_path / "3", torch.full((8,), 1.001), torch.ones(8).bfloat16()).tensors
    assert rounded.max_absolute_difference == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.bool]
)
def test_every_kind_of_number_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    (found,) = differences(tmp_path, a, b, block=1).tensors
    assert (found.unequal_elements, found.max_absolute_difference) == (1, 1.0)
    assert found.relative_norm == pytest.approx(1 / math.sqrt(2))


def test_large_integers_that_fp64_cannot_tell_apart_still_differ(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, torch.tensor([2**60]), torch.tensor([2**60 + 1])).tensors
    assert found.unequal_elements == 1


def test_what_is_not_finite_is_counted_and_left_out_of_the_numbers(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, nan, inf, inf, 2.0, -0.0])
    b = torch.tensor([nan, 1.0, inf, -inf, 2.5, 0.0])
    (found,) = differences(tmp_path, a, b).tensors
    assert (
        found.unequal_elements,
        found.non_finite_elements,
        found.max_absolute_difference,
        found.relative_norm,
    ) == (3, 2, 0.5, 0.25)


def test_against_zeros_there_is_no_relative_difference(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, torch.zeros(5), torch.ones(5)).tensors
    assert (found.max_absolute_difference, found.relative_norm) == (1.0, None)


def test_no_more_than_a_block_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = CheckpointReader.read

    def noting(self: CheckpointReader, name: str, box: Box | None = None) -> torch.Tensor:
        part = real(self, name, box)
        sizes.append(part.numel())
        return part

    monkeypatch.setattr(CheckpointReader, "read", noting)
    differences(tmp_path, torch.randn(50, 30), torch.randn(50, 30), block=100)
    assert max(sizes) <= 100
    assert sum(sizes) == 2 * 1500


@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    limit=st.integers(1, 40),
)
def test_blocks_are_the_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    parts = [
        whole[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
        for box in iterate_blocks(shape, limit)
    ]
    assert all(0 < part.numel() <= limit for part in parts)
    assert torch.cat([whole.new_empty(0), *(part.reshape(-1) for part in parts)]).equal(whole.reshape(-1))
