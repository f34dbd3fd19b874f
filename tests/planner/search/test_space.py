"""Plans of a search space: all that the rules allow, each once, the job's own settings kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, cluster, job
from wanma.job.plan.plan import Plan
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.pipeline.schedules import plan_stage_cuts
from wanma.planner.rules.mesh import (
    check_mesh,
    check_micro_batches,
    check_model_dimensions,
    check_schedule,
    check_stage_cuts,
)
from wanma.planner.rules.predicates import candidate_micro_batch_sizes, divisors
from wanma.planner.search.space import (
    MeshShape,
    SearchSpace,
    candidate_world_sizes,
    enumerate_mesh_shapes,
    enumerate_plans,
    mesh_micro_batch_sizes,
)

MIXTURE = replace(SMALL, experts=8, experts_per_token=2)
WORKLOAD = compute_decoder_workload(SMALL, 512)


def listed(space: SearchSpace) -> list[Plan]:
    return list(enumerate_plans(space, WORKLOAD))


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([2, 4, 6]), st.sampled_from([6, 16, 24]), st.sampled_from([SMALL, MIXTURE]), st.data())
def test_every_plan_of_a_space_obeys_the_rules_and_is_there_once(
    devices: int, batch: int, dimensions: object, data: st.DataObject
) -> None:
    machines, one = cluster(devices), job(global_batch=batch)
    space = SearchSpace.unrestricted(one, machines, dimensions, world_sizes=(devices,))  # type: ignore[arg-type]
    found = listed(space)
    assert len(set(found)) == len(found)
    for plan in data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=200)):
        assert plan.world_size == devices
        check_mesh(one, plan, machines)
        check_model_dimensions(plan, dimensions)  # type: ignore[arg-type]
        check_stage_cuts(one, plan, SMALL.layers)
        check_micro_batches(one, plan)
        if plan.pp > 1:
            check_schedule(plan)


def test_what_the_job_says_is_kept_and_the_rest_is_free() -> None:
    one = job({"tp": 2, "recompute": "selective", "recompute_share": 0.5, "schedule": "zbv"})
    found = listed(SearchSpace.from_job(one, cluster(8), SMALL))
    assert {plan.tp for plan in found} == {2}
    assert {(plan.recompute, plan.recompute_share) for plan in found} == {("selective", 0.5)}
    assert {plan.pp for plan in found} == {1}  # zbv excludes recompute
    assert {plan.micro_batch for plan in found} > {1, 2, 4}
    assert {plan.shard for plan in found} == {"none", "optimizer", "gradients", "parameters"}


def test_a_model_that_is_no_decoder_is_split_over_samples_only() -> None:
    found = listed(SearchSpace.from_job(job(), cluster(8), None, world_sizes=(8,)))
    assert {(plan.pp, plan.cp, plan.tp, plan.ep) for plan in found} == {(1, 1, 1, 1)}
    assert {plan.data_parallel_size for plan in found} == {8}


def test_experts_are_spread_over_every_size_that_divides_them_and_the_ranks() -> None:
    found = listed(SearchSpace.from_job(job(), cluster(8), MIXTURE, world_sizes=(8,)))
    assert {plan.ep for plan in found} == {1, 2, 4, 8}
    assert all(plan.ep in plan.valid_ep_sizes() for plan in found)


@given(st.integers(1, 500))
def test_micro_batches_cut_a_ranks_samples_evenly_and_come_near_every_power_of_two(rows: int) -> None:
    sizes = candidate_micro_batch_sizes(rows)
    assert {size for size in range(1, rows + 1) if rows % size == 0} <= set(sizes)
    counts = [-(-rows // size) for size in sizes]
    assert len(set(counts)) == len(counts)
    assert all(size == 1 or -(-rows // (size - 1)) > count for size, count in zip(sizes, counts, strict=True))
    for power in range(rows.bit_length()):
        assert any(2**power / 2 < size < 2**power * 2 for size in sizes)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(8, (8, 4, 2, 1)), (24, (24, 16, 8, 4, 2, 1)), (80, (80, 72, 64, 48, 32, 16, 8, 4, 2, 1))],
)
def test_all_devices_are_tried_then_numbers_that_many_sizes_divide(
    devices: int, expected: tuple[int, ...]
) -> None:
    assert candidate_world_sizes(cluster(devices)) == expected


def test_absurdly_long_sequences_and_batches_are_planned_for_in_a_moment() -> None:
    asked = job({"auto": True, "pp": 1}, global_batch=10**9)
    data = asked.data.model_copy(update={"sequence_length": 10**9})
    long = SearchSpace.from_job(asked.model_copy(update={"data": data}), cluster(8), SMALL)
    assert {grid.cp for grid in enumerate_mesh_shapes(long)} == {1, 2, 4, 8}
    assert mesh_micro_batch_sizes(long, MeshShape(1, 1, 1, 1, 8))[-1] == 10**9 // 8


@given(st.integers(1, 5000))
def test_divisors_divide(number: int) -> None:
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


def test_stages_are_cut_by_what_the_jobs_recompute_runs_again() -> None:
    dimensions = replace(SMALL, layers=8, vocabulary=46_000)
    workload = compute_decoder_workload(dimensions, 512)
    found: dict[str, set[tuple[int, ...]]] = {}
    for recompute in ("none", "selective"):
        one = job({"pp": 2, "schedule": "1f1b", "recompute": recompute, "tp": 1, "cp": 1})
        listed_ = list(
            enumerate_plans(SearchSpace.from_job(one, cluster(2), dimensions, world_sizes=(2,)), workload)
        )
        assert {plan.stage_cuts for plan in listed_} == {plan_stage_cuts(workload, listed_[0], 8)}
        found[recompute] = {plan.stage_cuts for plan in listed_}
    assert found["none"] != found["selective"]
