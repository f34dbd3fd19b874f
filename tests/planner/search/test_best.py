"""The optimum that a search finds is the optimum of the model, and what it leaves out could not have won."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Schedule
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.hardware_model.model import FrameworkOverhead
from wanma.planner.pipeline import simulation
from wanma.planner.pipeline.simulation import PipelineTime, StageCost, _simulate
from wanma.planner.search.branch_and_bound import (
    FRONT_TOLERANCE,
    MAX_SLOWDOWN,
    candidate_order,
    complexity,
    search,
)
from wanma.planner.search.result import Candidate, build_pareto_front
from wanma.planner.search.space import SearchSpace, enumerate_plans

TINY = replace(SMALL, layers=3)
MIXTURE = replace(TINY, experts=4, experts_per_token=2, dense_layers=1)


def small_space(given: PlanningProblem, **choices: Any) -> SearchSpace:
    """Small enough to forecast every plan."""
    some: dict[str, Any] = {
        "schedules": (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)),
        "compile": (False,),
        "cp_method": ("ring",),
    }
    return SearchSpace.unrestricted(given.job, given.cluster, given.dimensions, **{**some, **choices})


def away(parameters: Any, optimizer: Any, activations: Any) -> Plan:
    """Offload settings for a space to start from."""
    return Plan(
        precision="bf16",
        device="cuda",
        offload_parameters=parameters,
        offload_optimizer=optimizer,
        offload_activations=activations,
    )


def every_one(given: PlanningProblem, space: SearchSpace) -> list[Candidate]:
    """All plans that fit; on fewer devices those that are faster than all on more."""
    found: list[Candidate] = []
    for devices in sorted(space.world_sizes, reverse=True):
        fastest = min((one.seconds for one in found), default=float("inf"))
        here = [
            Candidate(plan, forecast_plan(given, plan))
            for plan in enumerate_plans(replace(space, world_sizes=(devices,)), given.workload)
        ]
        found += [
            one
            for one in here
            if one.memory_bytes <= given.memory_limit_bytes and one.seconds < fastest * (1 - 1e-9)
        ]
    return found


def best_of_layouts(candidates: list[Candidate]) -> list[Candidate]:
    best: dict[tuple[int, ...], Candidate] = {}
    for one in sorted(candidates, key=candidate_order):
        shape = one.plan.pp, one.plan.data_parallel_size, one.plan.cp, one.plan.tp, one.plan.ep
        best.setdefault(shape, one)
    return list(best.values())


def points(candidates: tuple[Candidate, ...]) -> list[tuple[float, int]]:
    return [(float(f"{one.seconds:.9g}"), one.memory_bytes) for one in candidates]


@pytest.mark.parametrize(
    ("dimensions", "devices", "memory_bytes", "batch", "choices"),
    [
        (TINY, (4,), 80e9, 4, {}),
        (TINY, (4, 2), 1.62e9, 6, {"schedules": (("1f1b", 1), ("gpipe", 1))}),
        (TINY, (8,), 1.5e9, 4, {"tp": (1, 2), "cp": (1,), "sequence_parallel": (True,)}),
        (MIXTURE, (4,), 80e9, 4, {"cp": (1,), "schedules": (("interleaved_zero_bubble", 1),)}),
        (replace(TINY, layers=6), (4,), 1.55e9, 8, {"tp": (1,), "compile": (False, True)}),
        (TINY, (4,), 1.45e9, 8, {"cp": (1,), "base_plan": away("host", "host", "host")}),
        (replace(TINY, vocabulary=32768), (8, 4, 2, 1), 80e9, 2, {"cp": (1,), "schedules": (("1f1b", 1),)}),
    ],
)
def test_the_best_plans_and_the_front_are_those_of_every_plan(
    dimensions: DecoderConfig,
    devices: tuple[int, ...],
    memory_bytes: float,
    batch: int,
    choices: dict[str, Any],
) -> None:
    given = problem(job(global_batch=batch), dimensions, memory_bytes=memory_bytes)
    space = small_space(given, world_sizes=devices, **choices)
    every = every_one(given, space)
    assert every
    found = search(given, space, keep=6, tolerance=0.0)
    assert [one.plan for one in found.candidates] == [one.plan for one in best_of_layouts(every)[:6]]
    slowest = min(one.seconds for one in every) * MAX_SLOWDOWN
    assert points(found.pareto_front) == points(
        build_pareto_front([one for one in every if one.seconds <= slowest])
    )
    assert found.plan_count == sum(1 for _ in enumerate_plans(space, given.workload))
    assert found.best.forecast == forecast_plan(given, found.best.plan)


@pytest.mark.parametrize("shared", [pytest.param(1.0, marks=pytest.mark.full), 2.0])
def test_what_programs_take_of_a_cpu_is_searched_as_it_is_forecast(shared: float) -> None:
    given = problem(job(global_batch=4), TINY)
    taken = replace(given.hardware, program=FrameworkOverhead(1e-5, 5e-3, 2e-3, 4e-3), shared=shared)
    given = replace(given, hardware=taken)
    space = small_space(given, world_sizes=(4,), cp=(1,))
    found = search(given, space, keep=6, tolerance=0.0)
    assert [one.plan for one in found.candidates] == [
        one.plan for one in best_of_layouts(every_one(given, space))[:6]
    ]


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 6, 8]),
    st.sampled_from([1.35e9, 1.6e9, 2.2e9, 80e9]),
    st.sampled_from([1, 3, 6]),
    st.sampled_from([1e9, 10e9, 200e9]),
    st.sampled_from(["none", "parameters"]),
    st.sampled_from([("1f1b", 1), ("interleaved_1f1b", 3), ("dualpipev", 2), ("gpipe", 1)]),
    st.sampled_from([("none",) * 3, ("none",) * 3, ("host",) * 3, ("disk", "none", "host")]),
)
def test_no_plan_of_a_small_cluster_beats_the_one_that_is_found(
    devices: int, memory_bytes: float, batch: int, outer: float, shard: Any, schedule: Any, places: Any
) -> None:
    one = job(global_batch=batch * 2)
    given = problem(one, replace(TINY, layers=4), memory_bytes=memory_bytes, outer=outer)
    space = small_space(
        given,
        world_sizes=(devices,),
        shard=(shard,),
        schedules=(schedule,),
        sequence_parallel=(True,),
        cp=(1,),
    )
    space = replace(space, base_plan=away(*places))
    every = every_one(given, space)
    found = search(given, space, keep=3)
    assert [one.plan for one in found.candidates] == [one.plan for one in best_of_layouts(every)[:3]]
    fastest = min((one.seconds for one in every), default=0.0)
    # Of every plan there is one on the front that is hardly slower and hardly larger.
    for one in every:
        if one.seconds <= fastest * MAX_SLOWDOWN:
            assert any(
                other.seconds <= one.seconds * (1 + FRONT_TOLERANCE) * (1 + 1e-9)
                and other.memory_bytes <= one.memory_bytes * (1 + FRONT_TOLERANCE) + 16
                for other in found.pareto_front
            )


def seconds_of(given: PlanningProblem, **choices: Any) -> float:
    best = search(given, small_space(given, world_sizes=(8,), **choices), keep=1).best
    return best.seconds if best else float("inf")


@settings(max_examples=3, deadline=None)
@given(st.floats(1.2e9, 3e9), st.floats(1.0, 2.0), st.sampled_from([TINY, MIXTURE]))
def test_more_memory_never_makes_the_best_plan_slower(
    memory_bytes: float, factor: float, dimensions: DecoderConfig
) -> None:
    less, more = (
        seconds_of(problem(dimensions=dimensions, memory_bytes=size))
        for size in (memory_bytes, factor * memory_bytes)
    )
    assert more <= less


@settings(max_examples=3, deadline=None)
@given(st.floats(0.5e9, 50e9), st.floats(1.0, 10.0), st.sampled_from(["inner", "outer"]))
def test_a_faster_link_never_hurts(rate: float, factor: float, link: str) -> None:
    slow, fast = (seconds_of(problem(memory_bytes=2e9, **{link: rate * by})) for by in (1.0, factor))
    assert fast <= slow * (1 + 1e-9)


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_a_larger_space_has_no_slower_best_plan(data: st.DataObject) -> None:
    given = problem(job(global_batch=12), memory_bytes=1.7e9)
    space = small_space(given, world_sizes=(6,))
    narrowed = {
        "tp": data.draw(st.sampled_from([None, (1,), (2,)])),
        "pp": data.draw(st.sampled_from([None, (1,), (3,)])),
        "shard": data.draw(st.sampled_from([space.shard, ("none",), ("optimizer", "parameters")])),
        "recompute": data.draw(st.sampled_from([space.recompute, (("none", 1.0),), (("full", 1.0),)])),
    }
    part = search(given, replace(space, **narrowed), keep=1).best
    whole = search(given, space, keep=1).best
    assert part is None or (whole is not None and whole.seconds <= part.seconds)


def test_where_nothing_fits_it_says_which_plan_comes_nearest() -> None:
    given = problem(memory_bytes=1e6)
    space = replace(SearchSpace.from_job(job({"pp": 1}), given.cluster, SMALL), world_sizes=(8,))
    found = search(given, space)
    assert found.candidates == () == found.pareto_front
    assert set(found.pruned) == {"memory", "beaten"}
    assert sum(found.pruned.values()) == found.plan_count
    smallest = min(forecast_plan(given, plan).memory_bytes for plan in enumerate_plans(space, given.workload))
    assert found.smallest.memory_bytes == smallest
    assert found.smallest.forecast.step is not None


def test_plans_that_take_the_same_time_are_told_apart_by_how_simple_they_are() -> None:
    given = problem()
    simple, split = (
        Candidate(plan, forecast_plan(given, plan))
        for plan in (search(given, small_space(given, world_sizes=(1,))).candidates[0].plan,) * 2
    )
    assert candidate_order(simple) == candidate_order(split)
    both = replace(simple, plan=replace(simple.plan, dp_replicate=2))
    assert complexity(both.plan) > complexity(simple.plan)
    assert candidate_order(both) > candidate_order(simple)


def test_without_rates_the_simplest_plans_that_fit_are_found() -> None:
    one = job(precision="fp64")
    given = problem(one, memory_bytes=3e9)
    found = search(given, small_space(given, world_sizes=(2,)))
    assert found.best.forecast.step is None
    assert found.best.memory_bytes <= 3e9


def test_an_outcome_is_pure_data() -> None:
    given = problem()
    space = replace(
        SearchSpace.from_job(job({"pp": 1, "tp": 1, "cp": 1}), given.cluster, SMALL), world_sizes=(2,)
    )
    found = search(given, space)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.best is not None


def test_no_pipeline_is_played_twice_also_not_for_the_forecasts_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[tuple[object, ...]] = []

    def play(schedule: Schedule, costs: Sequence[StageCost], pp: int, *rest: Any) -> PipelineTime:
        played.append((schedule, tuple(costs), pp, *rest))
        return _simulate(schedule, costs, pp, *rest)

    monkeypatch.setattr(simulation, "_simulate", play)
    given = problem(job(global_batch=12), TINY)
    found = search(given, small_space(given, world_sizes=(4,), pp=(2, 4)))
    assert len([one for one in found.candidates if one.plan.pp > 1]) > 1
    assert played
    assert len(set(played)) == len(played)
