"""Replicas that should hold the same: one flipped bit is seen, and a majority says whose it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.inspection.replica_hashes import (
    ReplicaHasher,
    ReplicaHashes,
    ReplicaMismatch,
    find_mismatched_groups,
    find_mismatches,
    hash_tensors,
)
from wanma.checkpoint.inspection.replica_hashes import _hash_device_tensor as sum_of_words

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    content = tensor.clone().reshape(-1).view(torch.uint8)
    content[bit // 8] ^= 1 << bit % 8
    return content.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(bit=st.integers(0, 8 * 15 - 1), seed=st.integers(0, 99))
def test_any_flipped_bit_changes_the_hash_in_host_memory_and_on_a_gpu(
    dtype: torch.dtype, bit: int, seed: int
) -> None:
    numbers = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    tensor = (100 * numbers).to(dtype)
    other = flipped(tensor, bit)
    assert hash_tensors([tensor]) == hash_tensors([tensor.clone()])
    assert hash_tensors([tensor]) != hash_tensors([other])
    assert int(sum_of_words(tensor)) == int(sum_of_words(tensor.clone()))
    assert int(sum_of_words(tensor)) != int(sum_of_words(other))


def test_a_gpus_hash_does_not_depend_on_its_chunks_and_sees_exchanged_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.randn(1000)
    whole = int(sum_of_words(tensor))
    monkeypatch.setattr("wanma.checkpoint.inspection.replica_hashes.CHUNK_ELEMENTS", 7)
    assert int(sum_of_words(tensor)) == whole
    tensor[[3, 900]] = tensor[[900, 3]]
    assert int(sum_of_words(tensor)) != whole


def test_the_content_counts_and_not_how_it_lies_in_memory() -> None:
    tensor = torch.randn(4, 6)
    assert hash_tensors([tensor.t()]) == hash_tensors([tensor.t().contiguous()])
    assert hash_tensors([torch.tensor(1.5), torch.empty(0)]) == hash_tensors(
        [torch.tensor([1.5]), torch.empty(0, 3)]
    )


def test_what_one_rank_holds_alone_is_not_hashed() -> None:
    assert ReplicaHasher([4]).hash_groups({"w": torch.ones(2)}) == []
    [group] = ReplicaHasher([4, 6]).hash_groups({"w": torch.ones(2), "v": torch.zeros(3)})
    assert group.ranks == (4, 6)
    assert set(group.hashes) == {"w", "v"}
    parts = ReplicaHasher([0, 1])
    before = parts.hash_groups({"w": torch.ones(2)})
    [after] = parts.hash_groups({"w": torch.ones(2), "optimizer.w.m": torch.ones(2)})
    assert after.hashes["optimizer.w.m"] == before[0].hashes["w"], "state that came later is hashed, too"


def test_a_group_has_one_number_on_all_its_ranks_and_its_digest_follows_the_names() -> None:
    assert ReplicaHashes((0, 2), {}).group_hash == ReplicaHashes((0, 2), {"w": 1}).group_hash
    assert len({ReplicaHashes(ranks, {}).group_hash for ranks in ((0, 1), (0, 2), (0, 1, 2), (1, 0))}) == 4
    assert (
        ReplicaHashes((0,), {"v": 2, "w": 1}).content_hash
        == ReplicaHashes((0,), {"w": 1, "v": 2}).content_hash
    )
    assert (
        ReplicaHashes((0,), {"v": 1, "w": 2}).content_hash
        != ReplicaHashes((0,), {"v": 2, "w": 1}).content_hash
    )


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_the_odd_ones_are_those_that_more_than_half_of_all_outvote(values: list[int]) -> None:
    found = find_mismatches((rank, {"w": value, "same": 7}) for rank, value in enumerate(values))
    if len(set(values)) == 1:
        assert found == []
        return
    [one] = found
    assert one.name == "w"
    assert sorted(rank for ranks in one.ranks_by_content for rank in ranks) == list(range(len(values)))
    majority = [value for value in set(values) if 2 * values.count(value) > len(values)]
    assert one.outlier_ranks == tuple(
        rank for rank, value in enumerate(values) if majority and value != majority[0]
    )


def test_of_two_ranks_none_is_the_odd_one() -> None:
    assert ReplicaMismatch("w", ((0,), (1,))).outlier_ranks == ()
    assert ReplicaMismatch("w", ((0, 2), (1,))).outlier_ranks == (1,)
    assert ReplicaMismatch("w", ((0, 2), (1, 3))).outlier_ranks == ()


def test_groups_are_found_wherever_they_stand_in_a_ranks_row() -> None:
    rows = [[11, 5, 22, 6], [11, 5, 0, 0], [33, 9, 22, 6], [33, 8, 0, 0]]
    assert find_mismatched_groups(rows) == {33}
    rows[0][3] = 7
    assert find_mismatched_groups(rows) == {22, 33}
