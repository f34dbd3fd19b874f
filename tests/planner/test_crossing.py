"""Tensor groups that cross machines: told with what they cost, and never refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.problems import job, problem
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.node_crossing import NODE_CROSSING_PREFIX, node_crossing_reason
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.hardware_model.model import LinkLevel


@pytest.mark.parametrize(
    ("plan", "machines", "told"),
    [
        (
            Plan(tp=4, dp_replicate=3),
            2,
            "parallel.tp = 4 does not divide the 6 ranks of each node (2 or 3 would)",
        ),
        (Plan(tp=4, dp_replicate=2), 4, "parallel.tp = 4 does not divide the 2 ranks of each node (2 would)"),
        (Plan(tp=2, dp_replicate=1), 2, "parallel.tp = 2 does not divide the 1 ranks of each node"),
        (Plan(tp=3, dp_replicate=10), 6, "parallel.tp = 3 does not divide the 5 ranks of each node"),
    ],
)
def test_a_group_that_crosses_machines_is_told_with_the_sizes_that_would_not(
    plan: Plan, machines: int, told: str
) -> None:
    assert node_crossing_reason(plan, machines) == NODE_CROSSING_PREFIX + told


@pytest.mark.parametrize(
    ("plan", "machines"),
    [(Plan(tp=4, dp_replicate=2), 2), (Plan(tp=8), 1), (Plan(dp_replicate=6), 3), (Plan(tp=2, cp=3), 1)],
)
def test_groups_that_stay_inside_are_not(plan: Plan, machines: int) -> None:
    assert node_crossing_reason(plan, machines) is None


def six_each() -> PlanningProblem:
    """Four machines of six devices, with links like those of eight."""
    on_four = job().model_copy(update={"cluster": job().cluster.model_copy(update={"nodes": 4})})
    given = problem(on_four, devices=32)
    inner, outer = given.hardware.links
    links = (replace(inner, devices=6), replace(outer, devices=24))
    return replace(given, hardware=replace(given.hardware, links=links))


def test_the_forecast_counts_the_crossing_and_says_what_it_costs() -> None:
    given = six_each()
    crosses = Plan(tp=4, dp_replicate=6, precision="bf16", device="cuda")
    found = forecast_plan(given, crosses)
    (told,) = (reason for reason in found.reasons if reason.startswith(NODE_CROSSING_PREFIX))
    assert "(2 or 3 would)" in told
    of_eight = replace(
        given.hardware,
        links=(LinkLevel(8, 1e-6, 100e9), replace(given.hardware.links[1], devices=24)),
    )
    inside = forecast_plan(replace(given, hardware=of_eight), crosses).step
    assert found.step.tensor > 3 * inside.tensor, "over links of a tenth of the rate"
    stays = forecast_plan(given, replace(crosses, tp=3, dp_replicate=8))
    assert not any(reason.startswith(NODE_CROSSING_PREFIX) for reason in stays.reasons)
