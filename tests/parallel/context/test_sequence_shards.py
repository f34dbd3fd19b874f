"""Part of a sequence of each rank, and batches that cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wanma.data.batch import Batch
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.context.sequence_shards import context_rank_positions, residual_positions, shard_sequence
from wanma.parallel.mesh.parallel_mesh import ParallelMesh

KINDS = ("ring", "all_to_all")


def grid(plan: Plan, rank: int) -> ParallelMesh:
    """Without process groups, which cutting does not need."""
    return ParallelMesh(plan, rank, torch.device("cpu"), cast(Any, None), cast(Any, None), None)


def batch(*inputs: Tensor, targets: Tensor | None = None, **keywords: Tensor) -> Batch:
    rows = len(keywords["input_ids"]) if not inputs else len(inputs[0])
    return Batch(
        inputs=inputs,
        targets=inputs[0] + 1000 if targets is None else targets,
        samples=torch.arange(rows),
        real=torch.ones(rows, dtype=torch.bool),
        keywords=keywords,
    )


@given(kind=st.sampled_from(KINDS), ranks=st.integers(1, 6), pieces=st.integers(1, 5))
def test_every_position_is_held_once_and_in_rising_order(kind: Any, ranks: int, pieces: int) -> None:
    length = 2 * ranks * pieces
    held = [context_rank_positions(length, kind, ranks, rank) for rank in range(ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    for positions in held:
        assert positions.tolist() == sorted(positions.tolist())
        assert len(positions) == length // ranks


@given(ranks=st.integers(1, 6), pieces=st.integers(1, 5))
def test_a_ring_gives_each_rank_the_same_work_under_a_causal_mask(ranks: int, pieces: int) -> None:
    length = 2 * ranks * pieces
    seen = {int((context_rank_positions(length, "ring", ranks, rank) + 1).sum()) for rank in range(ranks)}
    assert len(seen) == 1


def test_a_ring_pairs_a_piece_from_the_front_with_its_mirror() -> None:
    held = [context_rank_positions(8, "ring", 2, rank).tolist() for rank in range(2)]
    assert held == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [context_rank_positions(8, "all_to_all", 2, rank).tolist() for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@given(
    kind=st.sampled_from(KINDS),
    cp=st.integers(1, 3),
    tp=st.integers(1, 3),
    sequence=st.booleans(),
    pieces=st.integers(1, 3),
)
def test_the_residual_stream_holds_every_position_once_per_copy(
    kind: Any, cp: int, tp: int, sequence: bool, pieces: int
) -> None:
    plan = Plan(cp=cp, tp=tp, sequence_parallel=sequence and tp > 1, cp_method=kind)
    length = plan.sequence_length_multiple * pieces
    tokens = batch(torch.zeros(1, length, dtype=torch.int64))
    held = [residual_positions(tokens, plan, rank) for rank in range(plan.world_size)]
    if plan.cp == 1 and not plan.sequence_parallel:
        assert held == [None] * plan.world_size
        return
    copies = 1 if plan.sequence_parallel else plan.tp
    everything = torch.cat([positions for positions in held if positions is not None])
    assert sorted(everything.tolist()) == sorted(list(range(length)) * copies)


def test_a_rank_is_given_its_positions_of_everything_that_has_a_sequence() -> None:
    tokens = torch.arange(16).view(2, 8)
    whole = batch(tokens, documents=tokens // 3, weight=torch.ones(2))
    part = shard_sequence(whole, grid(Plan(cp=2), 1))
    assert part.inputs[0].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert part.targets.tolist() == [[1002, 1003, 1004, 1005], [1010, 1011, 1012, 1013]]
    assert part.keywords["documents"].tolist() == [[0, 1, 1, 1], [3, 3, 4, 4]]
    assert part.keywords["positions"].tolist() == [[2, 3, 4, 5]] * 2
    assert part.keywords["weight"].tolist() == [1, 1]
    assert part.samples is whole.samples


def test_positions_within_documents_stay_those_of_the_data() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    part = shard_sequence(batch(tokens, positions=positions), grid(Plan(cp=2), 0))
    assert part.keywords["positions"].tolist() == [[0, 1, 3, 4]]


def test_inputs_by_name_are_cut_too() -> None:
    tokens = torch.arange(8).view(1, 8)
    part = shard_sequence(
        batch(targets=tokens + 1, input_ids=tokens), grid(Plan(cp=2, cp_method="all_to_all"), 1)
    )
    assert part.keywords["input_ids"].tolist() == [[4, 5, 6, 7]]
    assert part.targets.tolist() == [[5, 6, 7, 8]]


def test_sequence_parallel_alone_keeps_the_batch_whole_and_tells_the_positions() -> None:
    tokens = torch.arange(8).view(1, 8)
    plan = Plan(tp=2, sequence_parallel=True)
    part = shard_sequence(batch(tokens), grid(plan, 1))
    assert part.inputs[0] is tokens
    assert part.keywords["positions"].tolist() == [list(range(8))]
    positions = residual_positions(batch(tokens), plan, 1)
    assert positions is not None
    assert positions.tolist() == [4, 5, 6, 7]


def test_without_either_a_batch_is_left_alone() -> None:
    images = batch(torch.zeros(2, 3, 8, 8), targets=torch.zeros(2, dtype=torch.int64))
    assert shard_sequence(images, grid(Plan(), 0)) is images
    assert residual_positions(images, Plan(), 0) is None


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(2)),
        (torch.zeros(2, 8), torch.zeros(2)),
        (torch.zeros(2, 8), torch.zeros(2, 4)),
    ],
    ids=["images", "numbers", "one target per sequence", "another length of targets"],
)
def test_what_has_no_sequence_is_refused(inputs: Tensor, targets: Tensor) -> None:
    whole = batch(inputs, targets=targets)
    with pytest.raises(WanmaError, match=r"parallel.cp = 2 splits sequences"):
        shard_sequence(whole, grid(Plan(cp=2), 0))


def test_sequence_parallel_refuses_inputs_without_a_sequence() -> None:
    plan = Plan(tp=2, sequence_parallel=True)
    with pytest.raises(WanmaError, match="sequence_parallel = true splits"):
        residual_positions(batch(torch.zeros(2)), plan, 0)


@pytest.mark.parametrize(
    ("plan", "unit"),
    [
        (Plan(cp=2), 4),
        (Plan(cp=3, cp_method="all_to_all"), 3),
        (Plan(cp=2, tp=3, sequence_parallel=True), 12),
        (Plan(cp=2, tp=2, sequence_parallel=True, cp_method="all_to_all"), 4),
        (Plan(tp=3, sequence_parallel=True), 3),
    ],
    ids=str,
)
def test_lengths_that_cannot_be_cut_evenly_are_refused_with_the_unit(plan: Plan, unit: int) -> None:
    assert plan.sequence_length_multiple == unit
    shard_sequence(batch(torch.zeros(1, unit)), grid(plan, 0))
    with pytest.raises(WanmaError, match=f"a multiple of {unit}"):
        shard_sequence(batch(torch.zeros(1, unit + 1)), grid(plan, 0))


def test_masks_of_pairs_of_positions_are_refused() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    with pytest.raises(WanmaError, match=r"attention_mask .*\(1, 8, 8\)"):
        shard_sequence(batch(tokens, attention_mask=mask), grid(Plan(cp=2), 0))
    alone = replace(batch(tokens), keywords={"attention_mask": mask})
    assert (
        shard_sequence(alone, grid(Plan(tp=2, sequence_parallel=True), 0)).keywords["attention_mask"] is mask
    )
