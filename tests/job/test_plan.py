"""A plan's arithmetic: who is where, and whose rows are whose."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan import AXES, Plan

sizes = st.integers(1, 4)
plans = st.builds(
    Plan, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes, micro_batch=st.integers(1, 9)
)


@given(plans)
def test_every_rank_has_its_own_coordinates_with_tp_innermost(plan: Plan) -> None:
    places = [tuple(plan.coordinates(rank).values()) for rank in range(plan.world_size)]
    assert places == sorted(set(places))
    assert list(plan.coordinates(0)) == list(AXES)
    assert places[0] == (0, 0, 0, 0, 0)


@given(plans, st.integers(0, 300))
def test_the_data_ranks_share_the_batch_without_gap_or_overlap_and_evenly(plan: Plan, batch: int) -> None:
    shares = [plan.rows(batch, rank) for rank in range(plan.data_ranks)]
    assert [row for share in shares for row in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(plans, st.integers(1, 300))
def test_micro_batches_cover_the_rows_in_equal_number_on_every_rank_and_within_the_limit(
    plan: Plan, batch: int
) -> None:
    for rank in range(plan.data_ranks):
        parts = plan.micro_batches(batch, rank)
        assert [row for part in parts for row in part] == list(plan.rows(batch, rank))
        assert len(parts) == plan.accumulation(batch)
        assert max(map(len, parts)) <= plan.micro_batch


@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_reads_as_a_sentence() -> None:
    assert str(Plan()) == "1 rank (one process), fp32, cpu"
    plan = Plan(dp_shard=2, tp=2, shard="parameters", precision="bf16")
    assert str(plan) == "4 ranks (dp_shard 2 × tp 2), parameters sharded, bf16, cpu"


def test_a_plan_from_another_version_and_a_rank_outside_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown plan fields \['zp'\]"):
        Plan.from_json({"zp": 1})
    with pytest.raises(ValueError, match="rank 2 outside a world of 2"):
        Plan(tp=2).coordinates(2)


@given(blocks=st.integers(1, 200), share=st.floats(0.001, 1))
def test_a_share_of_the_blocks_is_rounded_up_and_spread_evenly(blocks: int, share: float) -> None:
    indices = Plan(recompute="full", recompute_share=share).recomputed(blocks)
    assert blocks * share - 1e-6 <= len(indices) < blocks * share + 1
    gaps = {later - earlier for earlier, later in pairwise(indices)}
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_the_blocks_that_recompute_by_hand() -> None:
    assert Plan(recompute="full", recompute_share=0.5).recomputed(4) == [1, 3]
    assert Plan(recompute="selective").recomputed(3) == [0, 1, 2]
    assert Plan(recompute="full", recompute_share=0.5).recomputed(3) == [1, 2]
    assert len(Plan(recompute="full", recompute_share=0.7).recomputed(10)) == 7
    assert Plan(recompute="none").recomputed(4) == []
