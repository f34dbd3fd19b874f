"""A plan's arithmetic: who is where, and whose rows are whose."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import MESH_DIMS, Plan, uniform_count_reason
from wanma.job.sections.parallel import Shard

sizes = st.integers(1, 4)
plans = st.builds(
    Plan, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes, micro_batch=st.integers(1, 9)
)


@given(plans)
def test_every_rank_has_its_own_coordinates_with_tp_innermost(plan: Plan) -> None:
    places = [tuple(plan.coordinates(rank).values()) for rank in range(plan.world_size)]
    assert places == sorted(set(places))
    assert list(plan.coordinates(0)) == list(MESH_DIMS)
    assert places[0] == (0, 0, 0, 0, 0)


@given(plans, st.integers(0, 300))
def test_the_data_ranks_share_the_batch_without_gap_or_overlap_and_evenly(plan: Plan, batch: int) -> None:
    shares = [plan.batch_rows(batch, rank) for rank in range(plan.data_parallel_size)]
    assert [row for share in shares for row in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(plans, st.integers(1, 300))
def test_micro_batches_cover_the_rows_in_equal_number_on_every_rank_and_within_the_limit(
    plan: Plan, batch: int
) -> None:
    for rank in range(plan.data_parallel_size):
        parts = plan.micro_batches(batch, rank)
        assert [row for part in parts for row in part] == list(plan.batch_rows(batch, rank))
        assert len(parts) == plan.gradient_accumulation_steps(batch)
        assert max(map(len, parts)) <= plan.micro_batch


shares = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(shares, st.integers(0, 300), st.integers(1, 9), st.sampled_from(["none", "parameters"]))
def test_uneven_shares_cover_the_batch_to_within_a_row_and_keep_to_the_micro_batch(
    shares: tuple[int, ...], batch: int, micro_batch: int, shard: Shard
) -> None:
    plan = Plan(dp_shard=len(shares), shard=shard, micro_batch=micro_batch, batch_shares=shares)
    equal = plan.gradient_accumulation_steps(batch)
    parts = [plan.micro_batches(batch, rank) for rank in range(len(shares))]
    assert [row for part in parts for run in part for row in run] == list(range(batch))
    for rank, share in enumerate(shares):
        assert abs(len(plan.batch_rows(batch, rank)) - batch * share / sum(shares)) < 1
        own = max(math.ceil(len(plan.batch_rows(batch, rank)) / micro_batch), 1)
        assert len(parts[rank]) == (own if shard == "none" else equal) == plan.micro_batch_counts(batch)[rank]
        assert max(map(len, parts[rank])) <= micro_batch
    assert plan.max_rows_per_data_rank(batch) == max(
        len(plan.batch_rows(batch, rank)) for rank in range(len(shares))
    )
    assert [len(plan.batch_rows(sum(shares), rank)) for rank in range(len(shares))] == list(shares)


THIRDS = (1, 3)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(dp_replicate=2, batch_shares=THIRDS), None),
        (Plan(dp_shard=2, shard="optimizer", batch_shares=THIRDS), None),
        (Plan(dp_replicate=2, tp=2, cp=2, batch_shares=THIRDS), None),
        (Plan(pp=2, dp_shard=2, shard="parameters", batch_shares=THIRDS), None),
        (Plan(pp=2, dp_replicate=2, schedule="zbv", virtual_stages=2, batch_shares=THIRDS), None),
        (Plan(dp_shard=2, shard="gradients", batch_shares=THIRDS), "exchanged within every micro-batch"),
        (Plan(dp_shard=2, shard="parameters", batch_shares=THIRDS), "exchanged within every micro-batch"),
        (Plan(dp_replicate=2, ep=2, batch_shares=THIRDS), "experts of other data ranks"),
        (
            Plan(dp_shard=2, shard="optimizer", offload_parameters="disk", batch_shares=THIRDS),
            "offloaded are gathered within every micro-batch",
        ),
        (
            Plan(pp=2, dp_shard=2, shard="optimizer", schedule="zbv", virtual_stages=2, batch_shares=THIRDS),
            "in an order that their number decides",
        ),
    ],
    ids=str,
)
def test_ranks_run_as_many_micro_batches_as_their_rows_need_unless_they_meet_within_them(
    plan: Plan, reason: str | None
) -> None:
    told = uniform_count_reason(plan)
    assert told is None if reason is None else told is not None and reason in told
    assert plan.micro_batch_counts(8) == ([2, 6] if reason is None else [6, 6])
    assert replace(plan, batch_shares=()).micro_batch_counts(8) == [4, 4]


def test_equal_shares_are_an_even_batch() -> None:
    even, equal = Plan(dp_shard=4), Plan(dp_shard=4, batch_shares=(3, 3, 3, 3))
    assert [even.batch_rows(24, rank) for rank in range(4)] == [
        equal.batch_rows(24, rank) for rank in range(4)
    ]
    assert even.max_rows_per_data_rank(23) == 6


MIXED = Plan(
    pp=2,
    dp_replicate=3,
    tp=4,
    micro_batch=2,
    batch_shares=(6, 6, 1),
    placement=(
        ReplicaPlacement(
            2, (StagePlacement(0, 5, tp=4), StagePlacement(1, 3, tp=2)), micro_batch=2, recompute="full"
        ),
        ReplicaPlacement(1, (StagePlacement(1, 8),)),
    ),
)
"""Two replicas over both kinds of machines, and one on a single device."""


def test_placed_replicas_have_devices_and_micro_batches_of_their_own() -> None:
    assert MIXED.world_size == 2 * (4 + 2) + 1
    assert MIXED.placement[0].stage_cuts == (5,)
    assert [len(MIXED.micro_batches(26, rank)) for rank in range(3)] == [6, 6, 2]
    assert MIXED.gradient_accumulation_steps(26) == 6
    assert [MIXED.replica_placement_of(rank).micro_batch for rank in range(3)] == [2, 2, 1]
    assert str(MIXED) == "13 ranks (2 × 4-2 + 1 × 1), fp32, cpu"
    with pytest.raises(ValueError, match="no grid of ranks"):
        MIXED.coordinates(0)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: Plan(dp_replicate=2, batch_shares=(1, 2, 3)), "2 data ranks, and has 3"),
        (lambda: Plan(dp_replicate=2, batch_shares=(1, 0)), "at least 1 for each of 2 data ranks"),
        (lambda: replace(MIXED, tp=2), "pp = 2, dp_replicate = 3, tp = 4 and"),
        (lambda: replace(MIXED, batch_shares=()), "need batch_shares"),
        (lambda: ReplicaPlacement(1, ()), "at least one stage"),
        (lambda: ReplicaPlacement(1, (StagePlacement(0, 1, tp=0),)), "at least one device"),
        (lambda: Plan.from_json({"zp": 1}), r"\['zp'\]"),
        (lambda: Plan(tp=2).coordinates(2), "rank 2 outside a world of 2"),
        (lambda: Plan(dp_shard=2).with_changes(batch_shares=(1, 2, 3)), "batch_shares needs one number"),
    ],
)
def test_what_contradicts_the_axes_or_is_of_another_version_is_refused(
    make: Callable[[], object], fact: str
) -> None:
    with pytest.raises(ValueError, match=fact):
        make()


@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    for one in (plan, MIXED):
        assert Plan.from_json(json.loads(json.dumps(one.to_json()))) == one


@given(plans)
def test_the_repr_of_a_plan_makes_it_again(plan: Plan) -> None:
    assert eval(repr(plan)) == plan
    assert repr(Plan(dp_shard=2)) == "Plan(dp_shard=2)"


def test_a_plan_reads_as_a_sentence() -> None:
    assert str(Plan()) == "1 rank (one process), fp32, cpu"
    plan = Plan(dp_shard=2, tp=2, shard="parameters", precision="bf16")
    assert str(plan) == "4 ranks (dp_shard 2 × tp 2), parameters sharded, bf16, cpu"


@given(blocks=st.integers(1, 200), share=st.floats(0.001, 1))
def test_a_share_of_the_blocks_is_rounded_up_and_spread_evenly(blocks: int, share: float) -> None:
    indices = Plan(recompute="full", recompute_share=share).recomputed_blocks(blocks)
    assert blocks * share - 1e-6 <= len(indices) < blocks * share + 1
    gaps = {later - earlier for earlier, later in pairwise(indices)}
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_the_blocks_that_recompute_by_hand() -> None:
    assert Plan(recompute="full", recompute_share=0.5).recomputed_blocks(4) == [1, 3]
    assert Plan(recompute="selective").recomputed_blocks(3) == [0, 1, 2]
    assert Plan(recompute="full", recompute_share=0.5).recomputed_blocks(3) == [1, 2]
    assert len(Plan(recompute="full", recompute_share=0.7).recomputed_blocks(10)) == 7
    assert Plan(recompute="none").recomputed_blocks(4) == []


def test_a_changed_plan_is_as_if_made_anew_and_refuses_what_no_plan_has() -> None:
    plan = Plan(dp_shard=2, stage_cuts=(3,))
    assert plan.with_changes(tp=2, shard="parameters") == replace(plan, tp=2, shard="parameters")
    assert plan == Plan(dp_shard=2, stage_cuts=(3,))  # which stays what it was
    with pytest.raises(TypeError, match="a plan has no micro_batches"):
        plan.with_changes(micro_batches=2)
