"""Plans are counted without being listed, and those that are left out unseen are beaten."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.forecast.plan_forecast import forecast
from wanma.planner.search.cost_cache import Tables
from wanma.planner.search.enumeration import Listing
from wanma.planner.search.space import (
    Space,
    cores,
    grids,
    recomputes,
    splits,
    states,
)

MODELS = [SMALL, replace(SMALL, layers=7, experts=8, experts_per_token=2, dense_layers=2)]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([6, 8]), st.data())
def test_a_grid_has_as_many_plans_as_are_counted(
    dimensions: DecoderDimensions, devices: int, data: st.DataObject
) -> None:
    given_ = problem(job(global_batch=24), dimensions)
    space = Space.everything(given_.job, given_.cluster, dimensions, devices=(devices,))
    grid = data.draw(st.sampled_from(list(grids(space))))
    listing = Listing(space, Tables(given_))
    counted = sum(listing.count(split, listing.of_grid(grid)) for split in splits(space, grid))
    ways = len(states(space, grid))
    listed = sum(len(recomputes(space, core)) for core in cores(space, grid, given_.workload)) * ways
    assert counted == listed


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([4, 6, 8]), st.data())
def test_a_plan_that_is_left_out_is_slower_and_no_smaller_than_itself_compiled(
    dimensions: DecoderDimensions, devices: int, data: st.DataObject
) -> None:
    given_ = problem(job(global_batch=24), dimensions)
    space = Space.everything(given_.job, given_.cluster, dimensions, devices=(devices,))
    grid = data.draw(st.sampled_from(list(grids(space))))
    listing = Listing(space, Tables(given_))
    shared = listing.of_grid(grid)
    eager = data.draw(st.sampled_from([split for split in splits(space, grid) if not split.compile]))
    every, left = listing.schedules_of(eager, shared), listing.unbeaten(eager, shared)
    beaten = [
        (one, again)
        for one, kept in zip(every, left, strict=True)
        for again in one.recomputes
        if again not in kept.recomputes
    ]
    assume(any(one.sizes for one, _ in beaten))
    one, (recompute, share) = data.draw(st.sampled_from([(one, again) for one, again in beaten if one.sizes]))
    way = data.draw(st.sampled_from(shared.states.plans))
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
    slow, fast = (forecast(given_, replace(plain, compile=compiled)) for compiled in (False, True))
    assert slow.step is not None
    assert fast.step is not None
    assert fast.step.seconds < slow.step.seconds
    assert fast.memory_bytes <= slow.memory_bytes
