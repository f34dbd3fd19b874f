"""Calendar of exchanges between sites, and the fragments of a model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization

NAMES = ["embedding.weight", "layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight", "norm.weight"]


@given(every=st.integers(1, 40), fragments=st.integers(1, 8), first=st.integers(0, 10))
def test_each_fragment_is_exchanged_every_so_many_steps_and_no_two_at_once(
    every: int, fragments: int, first: int
) -> None:
    fragments = min(fragments, every)
    plan = Synchronization("diloco", 2, every, synchronous_steps=first, fragments=fragments)
    assert [step for step in range(first + 1) if plan.fragments_to_exchange(step)] == []
    steps = {fragment: [] for fragment in range(fragments)}  # type: dict[int, list[int]]
    for step in range(first + 1, first + 3 * every + 1):
        due = plan.fragments_to_exchange(step)
        assert len(due) <= 1
        for fragment in due:
            steps[fragment].append(step)
    assert all(len(of_one) == 3 for of_one in steps.values())
    assert all(later - earlier == every for of in steps.values() for earlier, later in pairwise(of))
    assert steps[0][0] == first + every


def test_units_go_to_fragments_in_turn() -> None:
    plan = Synchronization("diloco", 2, 10, fragments=2)
    assert list(plan.assign_fragments(NAMES).values()) == [0, 1, 1, 0, 1]


def test_a_block_stays_whole_however_deep_its_name() -> None:
    names = ["model.layers.0.mlp.0.weight", "model.layers.0.mlp.1.weight", "model.layers.1.mlp.0.weight"]
    plan = Synchronization("diloco", 2, 10, fragments=3)
    assert list(plan.assign_fragments(names).values()) == [0, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"fragments": 11}, {"overlap_steps": 10}, {"sites": 0}, {"staleness": -1}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_cannot_be_is_no_synchronization(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        Synchronization("diloco", **{"every": 10, **wrong})  # type: ignore[arg-type]


# ------------------------------------------------------------------ in a plan


def test_sites_are_outermost_and_the_axes_within_them() -> None:
    plan = Plan(pp=2, dp_replicate=4, tp=2, synchronization=Synchronization("diloco", 2, 10))
    assert [plan.site_of(rank) for rank in range(16)] == [0] * 8 + [1] * 8
    at = [plan.coordinates(rank) for rank in range(16)]
    assert [one["pp"] for one in at] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [one["dp_replicate"] for one in at] == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert plan.cross_site_stage_group(13) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert (plan.replicate_group_size, plan.ranks_per_site, plan.ranks_per_pipeline_rank) == (2, 8, 4)


@given(sites=st.sampled_from([1, 2, 3]), within=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]))
def test_every_rank_has_a_place_of_its_own(sites: int, within: int, pp: int) -> None:
    seldom = Synchronization("local_sgd", sites, 5)
    plan = Plan(pp=pp, dp_replicate=sites * within, dp_shard=2, shard="optimizer", synchronization=seldom)
    places = {tuple(plan.coordinates(rank).values()) for rank in range(plan.world_size)}
    assert len(places) == plan.world_size
    rows = [plan.batch_rows(sites * within * 4, rank) for rank in range(plan.data_parallel_size)]
    assert [row for run in rows for row in run] == list(range(sites * within * 4))


def test_a_plan_with_sites_goes_through_json() -> None:
    plan = Plan(
        dp_replicate=2,
        synchronization=Synchronization("diloco", 2, 10, outer_learning_rate=0.7, momentum=0.9),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert "diloco between 2 sites every 10 steps" in str(plan)


def test_sites_divide_the_replicas() -> None:
    with pytest.raises(ValueError, match="2 sites cannot share dp_replicate = 3"):
        Plan(dp_replicate=3, synchronization=Synchronization("diloco", 2, 10))
