"""Assignment of pieces to writers: every piece once, about the same bytes for each replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.format.local_shards import LocalShard, assign_writers, local_shards
from wanma.checkpoint.format.manifest import Box
from wanma.job.errors import WanmaError


def piece(name: str, elements: int, replicas: tuple[int, ...]) -> LocalShard:
    return LocalShard(name, "F32", (elements,), Box((0,), (elements,)), replicas)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000), st.sets(st.integers(0, 5), min_size=1).map(lambda s: tuple(sorted(s)))
        ),
        max_size=30,
    )
)
def test_every_piece_has_exactly_one_writer_among_the_ranks_that_hold_it(
    held: list[tuple[int, tuple[int, ...]]],
) -> None:
    pieces = [piece(f"t{number}", elements, replicas) for number, (elements, replicas) in enumerate(held)]
    writers: dict[str, list[int]] = {each.name: [] for each in pieces}
    for rank in range(6):
        for each in assign_writers([p for p in pieces if rank in p.replicas], rank):
            writers[each.name].append(rank)
    for each in pieces:
        assert len(writers[each.name]) == 1
        assert writers[each.name][0] in each.replicas


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(1, 8))
def test_replicas_write_within_one_tensor_of_the_same_bytes(sizes: list[int], replicas: int) -> None:
    pieces = [piece(f"t{number}", size, tuple(range(replicas))) for number, size in enumerate(sizes)]
    loads = [sum(each.bytes for each in assign_writers(pieces, rank)) for rank in range(replicas)]
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) - min(loads) <= 4 * max(sizes)


def test_the_order_of_the_tensors_does_not_change_who_writes_them() -> None:
    pieces = [piece(name, 10, (0, 1)) for name in "abcde"]
    assert {p.name for p in assign_writers(pieces, 1)} == {p.name for p in assign_writers(pieces[::-1], 1)}


def test_a_plain_tensor_is_one_box_held_by_all_replicas() -> None:
    (found,) = local_shards({"w": torch.zeros(3, 2, dtype=torch.bfloat16)}, replicas=[0, 1, 2])
    assert found == LocalShard("w", "BF16", (3, 2), Box((0, 0), (3, 2)), (0, 1, 2))
    assert found.bytes == 12


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    with pytest.raises(WanmaError, match=r"tensor w has dtype torch\.complex64") as caught:
        local_shards({"w": torch.zeros(1, dtype=torch.complex64)}, replicas=[0])
    assert "torch.float32" in caught.value.hint
