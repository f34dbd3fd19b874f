"""Placed plans that form one grid of ranks, and the best of those."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.fleets import START, costs, fleet
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.planner.heterogeneous.mesh_plans import as_mesh_plan, search_mesh_plans, with_mesh_plans
from wanma.planner.heterogeneous.placement_search import search_placements
from wanma.planner.heterogeneous.replica_shapes import HeterogeneousSpace

FAST, SLOW = StagePlacement(0, 4), StagePlacement(1, 4)


def placed(*replicas: ReplicaPlacement, shares: tuple[int, ...] = (), shard: str = "optimizer") -> Plan:
    count = sum(one.count for one in replicas)
    return replace(
        START,
        pp=max(len(one.places) for one in replicas),
        dp_replicate=count,
        tp=max(place.tp for one in replicas for place in one.places),
        shard=shard,
        micro_batch=2,
        placement=replicas,
        batch_shares=shares or (1,) * count,
    )


def test_replicas_that_differ_by_their_device_alone_are_a_grid_with_unlike_shares() -> None:
    slow_first = placed(
        ReplicaPlacement(4, (SLOW,), 2), ReplicaPlacement(4, (FAST,), 2), shares=(1, 1, 1, 1, 3, 3, 3, 2)
    )
    grid = as_mesh_plan(slow_first, fleet())
    assert isinstance(grid, Plan)
    assert (grid.pp, grid.dp_replicate, grid.dp_shard, grid.shard) == (1, 1, 8, "optimizer")
    assert grid.batch_shares == (3, 3, 3, 2, 1, 1, 1, 1), "in the order of the machines"
    assert grid.micro_batch == 2
    assert grid.placement == ()
    assert grid.micro_batch_counts(15) == [2, 2, 2, 1, 1, 1, 1, 1]
    whole = as_mesh_plan(replace(slow_first, shard="none"), fleet())
    assert isinstance(whole, Plan)
    assert (whole.dp_replicate, whole.dp_shard, whole.shard) == (8, 1, "none")


def test_replicas_of_split_matrices_are_one_too() -> None:
    wide = placed(
        ReplicaPlacement(2, (replace(FAST, tp=2),), 2),
        ReplicaPlacement(2, (replace(SLOW, tp=2),), 2),
        shares=(4, 4, 1, 1),
    )
    grid = as_mesh_plan(wide, fleet())
    assert isinstance(grid, Plan)
    assert (grid.tp, grid.dp_shard, grid.world_size, grid.sequence_parallel) == (2, 4, 8, True)


def test_stages_that_are_cut_by_the_speed_of_their_devices_are_a_grid() -> None:
    spanning = placed(ReplicaPlacement(4, (StagePlacement(0, 3), StagePlacement(1, 1)), 2, "full"))
    grid = as_mesh_plan(spanning, fleet())
    assert isinstance(grid, Plan)
    assert (grid.pp, grid.dp_shard, grid.stage_cuts, grid.recompute) == (2, 4, (3,), "full")
    assert grid.batch_shares == ()


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            placed(ReplicaPlacement(4, (FAST,)), ReplicaPlacement(2, (replace(SLOW, tp=2),))),
            "different stages or tp",
        ),
        (
            placed(ReplicaPlacement(4, (FAST,)), ReplicaPlacement(4, (SLOW,), 1, "full")),
            "different micro-batches or recompute",
        ),
        (placed(ReplicaPlacement(4, (FAST,)), ReplicaPlacement(4, (SLOW,), 2)), "different micro-batches"),
        (
            placed(ReplicaPlacement(2, (StagePlacement(0, 3), StagePlacement(1, 1, tp=2)))),
            "stages with different tp",
        ),
        (
            placed(ReplicaPlacement(4, (StagePlacement(1, 3), StagePlacement(0, 1)))),
            "in another order than the nodes",
        ),
        (
            placed(ReplicaPlacement(4, (FAST,)), ReplicaPlacement(3, (SLOW,))),
            "7 ranks do not fill 2 nodes",
        ),
        (placed(ReplicaPlacement(4, (FAST,))), "in another order than the nodes"),
    ],
    ids=["tp", "recompute", "micro-batches", "stages' tp", "order", "count", "one kind"],
)
def test_what_is_no_grid_says_why(plan: Plan, reason: str) -> None:
    told = as_mesh_plan(plan, fleet())
    assert isinstance(told, str)
    assert reason in told


def test_the_best_grid_gives_the_slow_devices_less_and_is_faster_than_an_even_one() -> None:
    of = costs(fleet(outer=50e9, across=50e9), batch=48)
    found = search_mesh_plans(of.problem, of.hardware, START)
    best = found.candidates[0]
    assert best.unsupported_reason is None
    assert sum(best.plan.batch_shares) == 48
    half = best.plan.data_parallel_size // 2
    assert min(best.plan.batch_shares[:half]) > max(best.plan.batch_shares[half:])
    seconds = [one.seconds for one in found.candidates]
    assert seconds == sorted(seconds)
    assert all(one.plan.world_size == 8 for one in found.candidates)


def test_a_general_search_shows_as_grids_what_is_one() -> None:
    of = costs(batch=48)
    space = HeterogeneousSpace(tp=(1,), stage_counts=(1,), micro_batch=(2,), recompute=("none",))
    found = search_placements(of.problem, of.hardware, START, space)
    turned = with_mesh_plans(found, of.hardware)
    both = [number for number, one in enumerate(found.candidates) if len(one.plan.placement) == 2]
    assert both
    for number, (before, after) in enumerate(zip(found.candidates, turned.candidates, strict=True)):
        assert after.forecast == before.forecast
        assert (after.plan.placement == ()) == (number in both)
