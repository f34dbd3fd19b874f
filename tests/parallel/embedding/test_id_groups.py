"""Ids are grouped in a fixed order, and lists of rows are summed one by one."""

from __future__ import annotations

import pytest
import torch

from wanma.parallel.embedding import native_rows
from wanma.parallel.embedding.id_groups import group_ids, sum_groups, sum_rows


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that groups: compiled, or torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(native_rows, "load_rows_library", lambda: None)


@pytest.mark.parametrize("largest", [0, 20, 1 << 61])
@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_groups_are_those_of_unique_and_keep_the_order_of_equal_ids(count: int, largest: int) -> None:
    ids = torch.randint(largest + 1, (count,), generator=torch.Generator().manual_seed(count)) - 9
    ids[count // 2 :] = ids[: count - count // 2].clone()
    before = ids.clone()
    groups = group_ids(ids)
    different, numbers = ids.unique(return_inverse=True)
    assert torch.equal(ids, before)
    assert torch.equal(ids[groups.first_positions], different)
    assert torch.equal(groups.numbers, numbers)
    assert torch.equal(groups.positions, numbers.argsort(stable=True))
    assert torch.equal(groups.positions[groups.is_first], groups.first_positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_list_is_summed_and_an_empty_one_is_zero(dtype: torch.dtype) -> None:
    matrix = torch.arange(21.0).view(7, 3).to(dtype).requires_grad_()
    sums = sum_rows(matrix, torch.tensor([6, 0, 6, 2]), torch.tensor([0, 0, 3, 4]))
    rows = torch.tensor([[0, 0, 0], [36, 39, 42], [6, 7, 8], [0, 0, 0]])
    assert torch.equal(sums, rows.to(dtype))
    assert not sums.requires_grad
    nothing = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(sum_rows(matrix[:0], nothing, torch.zeros(2, dtype=torch.int64)), sums.new_zeros(2, 3))


@pytest.mark.parametrize("width", [1, 16, 37])
def test_vectors_are_summed_by_group_and_divided_and_a_zero_sum_is_told(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(40, (900,), generator=generator)
    values, sources = torch.randn(60, width, generator=generator), torch.randint(60, (900,))
    values[:5] = 0.0
    sources[ids == 7] %= 5
    groups = group_ids(ids)
    sums, is_used = sum_groups(values, sources, groups, 3)
    expected = torch.zeros(40, width).index_add_(0, ids, values[sources]) / 3
    different = ids[groups.first_positions]
    torch.testing.assert_close(sums, expected[different], rtol=1e-5, atol=1e-5)
    assert torch.equal(is_used, different != 7)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert [len(each) for each in sum_groups(values, nothing, group_ids(nothing), 1)] == [0, 0]
