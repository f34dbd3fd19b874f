"""Plans are counted without being listed, and those that are left out unseen are beaten."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.search.cost_cache import CostCache
from wanma.planner.search.enumeration import PlanEnumeration
from wanma.planner.search.space import (
    SearchSpace,
    compute_splits,
    enumerate_mesh_shapes,
    recompute_options,
    sharding_plans,
    unsharded_plans,
)

MODELS = [SMALL, replace(SMALL, layers=7, experts=8, experts_per_token=2, dense_layers=2)]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([6, 8]), st.data())
def test_a_grid_has_as_many_plans_as_are_counted(
    dimensions: DecoderConfig, devices: int, data: st.DataObject
) -> None:
    given_ = problem(job(global_batch=24), dimensions)
    space = SearchSpace.unrestricted(given_.job, given_.cluster, dimensions, world_sizes=(devices,))
    grid = data.draw(st.sampled_from(list(enumerate_mesh_shapes(space))))
    listing = PlanEnumeration(space, CostCache(given_))
    counted = sum(listing.count(split, listing.mesh_options(grid)) for split in compute_splits(space, grid))
    ways = len(sharding_plans(space, grid))
    listed = (
        sum(len(recompute_options(space, core)) for core in unsharded_plans(space, grid, given_.workload))
        * ways
    )
    assert counted == listed


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([4, 6, 8]), st.data())
def test_a_plan_that_is_left_out_is_slower_and_no_smaller_than_itself_compiled(
    dimensions: DecoderConfig, devices: int, data: st.DataObject
) -> None:
    given_ = problem(job(global_batch=24), dimensions)
    space = SearchSpace.unrestricted(given_.job, given_.cluster, dimensions, world_sizes=(devices,))
    grid = data.draw(st.sampled_from(list(enumerate_mesh_shapes(space))))
    listing = PlanEnumeration(space, CostCache(given_))
    shared = listing.mesh_options(grid)
    eager = data.draw(st.sampled_from([split for split in compute_splits(space, grid) if not split.compile]))
    every, left = listing.schedules_of(eager, shared), listing.undominated_schedules(eager, shared)
    beaten = [
        (one, again)
        for one, kept in zip(every, left, strict=True)
        for again in one.recompute_options
        if again not in kept.recompute_options
    ]
    assume(any(one.sizes for one, _ in beaten))
    one, (recompute, share) = data.draw(st.sampled_from([(one, again) for one, again in beaten if one.sizes]))
    way = data.draw(st.sampled_from(shared.sharding_options.plans))
    plain = replace(
        way,
        **{name: getattr(eager, name) for name in ("sequence_parallel", "cp_method")},
        schedule=one.schedule,
        virtual_stages=one.virtual_stages,
        stage_cuts=one.stage_cuts,
        recompute=recompute,
        recompute_share=share,
        micro_batch=data.draw(st.sampled_from(one.sizes)),
    )
    slow, fast = (forecast_plan(given_, replace(plain, compile=compiled)) for compiled in (False, True))
    assert fast.step.seconds < slow.step.seconds
    assert fast.memory_bytes <= slow.memory_bytes
