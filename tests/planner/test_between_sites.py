"""Sites in a job: what they mean and cannot be combined with, what they cost, and who comes and goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.problems import SMALL, problem
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.observe.units import bytes_text
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.explain.plan_changes import change_families
from wanma.planner.explain.rank_layout import ranks_of_group, stage_layouts
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningInputs, build_problem
from wanma.planner.job_planner import build_layout, plan_for_job
from wanma.planner.memory.model_states import MemoryInputs, ModelStates, model_states_of
from wanma.planner.memory.rank_parameters import RankParameters
from wanma.planner.replan import replan
from wanma.planner.rules.capabilities import unsupported_reason

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))


def job(train: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"preset": "gpt-1m"},
            "data": {"text": "stdlib", "sequence_length": 128},
            "train": {"global_batch": 16, **(train or {})},
            "cluster": cluster or {},
            "parallel": {"dp_replicate": 2, **parallel},
        }
    )


# ------------------------------------------------------------------ what a job means


def test_diloco_has_the_papers_numbers_where_a_job_does_not_say() -> None:
    plan = build_layout(job(synchronize="diloco"), LAPTOP)
    assert plan.synchronization == Synchronization("diloco", 2, 100, outer_learning_rate=0.7, momentum=0.9)
    assert plan.approximate == ("diloco",)
    assert unsupported_reason(job(synchronize="diloco"), plan, LAPTOP, (2, 13)) is None


def test_local_sgd_takes_the_mean() -> None:
    plan = build_layout(job(synchronize="local_sgd", synchronize_every=8, synchronous_steps=3), LAPTOP)
    assert plan.synchronization == Synchronization(
        "local_sgd", 2, 8, 3, outer_learning_rate=1.0, momentum=0.0
    )


def test_fragments_are_mixed_in_half_and_half() -> None:
    plan = build_layout(job(synchronize="diloco", fragments=4, overlap_steps=5), LAPTOP)
    assert (plan.synchronization.fragments, plan.synchronization.overlap_steps) == (4, 5)
    assert plan.synchronization.overlap_mixing_factor == 0.5


def test_gradients_are_one_step_late() -> None:
    plan = build_layout(job(synchronize="delayed", dp_replicate=4, sites=2), LAPTOP)
    assert plan.synchronization == Synchronization("delayed", 2, staleness=1)


def test_without_sites_a_plan_is_exact() -> None:
    plan = build_layout(job(), LAPTOP)
    assert plan.synchronization is None
    assert plan.approximate == ()


def test_a_plan_with_sites_is_not_run_by_a_job_that_does_not_ask_for_it() -> None:
    plan = build_layout(job(synchronize="diloco"), LAPTOP)
    reason = unsupported_reason(job(), plan, LAPTOP, (2, 13))
    assert "diloco trains each site independently" in reason


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("keys", "message", "way_out"),
    [
        ({"synchronize_every": 5}, "synchronize_every = 5 has no effect", "'local_sgd' or 'diloco'"),
        (
            {"synchronize": "local_sgd", "outer_learning_rate": 0.5},
            "outer_learning_rate = 0.5 has no effect",
            "'diloco'",
        ),
        (
            {"synchronize": "delayed", "fragments": 2},
            "fragments = 2 has no effect",
            "'local_sgd' or 'diloco'",
        ),
        ({"synchronize": "diloco", "staleness": 2}, "staleness = 2 has no effect", "'delayed'"),
        (
            {"synchronize": "diloco", "overlap_mixing_factor": 0.1},
            "overlap_mixing_factor = 0.1",
            "overlap_steps",
        ),
        ({"synchronize": "diloco", "sites": 3}, "sites = 3 does not divide", "multiple of 3"),
        ({"synchronize": "diloco", "fragments": 101}, "fragments = 101", "at most 100"),
        ({"synchronize": "diloco", "overlap_steps": 100}, "overlap_steps = 100", "below 100"),
        ({"synchronize": "diloco", "auto": True}, "parallel = 'auto'", "mesh dimensions"),
        ({"synchronize": "diloco", "outer_offload": "host"}, "outer_offload = 'host'", "unset"),
        ({"synchronize": "delayed", "offload_parameters": "disk"}, "offload_parameters = 'disk'", "dp_shard"),
        ({"synchronize": "diloco", "offload_optimizer": "disk"}, "offload_optimizer = 'disk'", "dp_shard"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_with_its_keys(keys: dict[str, Any], message: str, way_out: str) -> None:
    with pytest.raises(JobError) as error:
        build_layout(job(**keys), LAPTOP)
    assert message in error.value.message
    assert way_out in error.value.hint


def test_an_average_of_an_average_is_refused() -> None:
    with pytest.raises(JobError, match=r"train.weight_average = 0.9"):
        build_layout(job({"weight_average": 0.9}, synchronize="diloco"), LAPTOP)
    build_layout(job({"weight_average": 0.9}, synchronize="delayed"), LAPTOP)


def test_sites_lie_on_whole_machines_or_machines_in_whole_sites() -> None:
    two = {"nodes": 2, "rendezvous": "a:1"}
    build_layout(job(cluster=two, dp_replicate=4, synchronize="diloco"), LAPTOP)
    with pytest.raises(JobError, match=r"parallel.sites = 3 on cluster.nodes = 2"):
        build_layout(job(cluster=two, dp_replicate=6, sites=3, synchronize="diloco"), LAPTOP)


# ------------------------------------------------------------------ what it costs


FAR = Plan(dp_replicate=16, micro_batch=1, precision="bf16", device="cuda", compile=False)
EVERY_100 = Synchronization("diloco", 2, 100, outer_learning_rate=0.7, momentum=0.9)


def step_seconds(plan: Plan) -> float:
    found = forecast_plan(problem(devices=16), plan).step
    return found.seconds


def data_seconds(plan: Plan) -> float:
    found = forecast_plan(problem(devices=16), plan).step
    return found.data


def test_what_goes_between_sites_is_forecast_as_often_as_it_goes() -> None:
    often, seldom = (replace(EVERY_100, every=every) for every in (10, 1000))
    within = data_seconds(replace(FAR, synchronization=replace(EVERY_100, every=10**9)))
    added = [data_seconds(replace(FAR, synchronization=one)) - within for one in (often, seldom)]
    assert added[0] == pytest.approx(100 * added[1], rel=1e-3)
    assert step_seconds(replace(FAR, synchronization=seldom)) < step_seconds(FAR)


def test_what_runs_beside_steps_is_not_waited_for_and_small_numbers_travel_faster() -> None:
    plain = replace(EVERY_100, every=2)
    beside = replace(plain, overlap_steps=1, overlap_mixing_factor=0.5)
    rounded = replace(plain, compression="int8")
    seconds = [data_seconds(replace(FAR, synchronization=one)) for one in (plain, beside, rounded)]
    assert seconds[1] < seconds[0]
    assert seconds[2] < seconds[0]


def test_the_forecast_tells_what_is_sent_and_waited_for() -> None:
    told = forecast_plan(problem(devices=16), replace(FAR, synchronization=EVERY_100)).reasons
    (line,) = [reason for reason in told if reason.startswith("synchronization of 2 sites")]
    assert "every 100 steps instead of gradients" in line
    assert "exposed time" in line


def test_on_machines_of_unknown_speed_it_tells_what_is_sent() -> None:
    workload = compute_decoder_workload(SMALL, 512)
    text = job(synchronize="diloco", fragments=4)
    told = plan_for_job(PlanningInputs(text, LAPTOP, workload, SMALL)).forecast
    (line,) = [reason for reason in told.reasons if reason.startswith("synchronization of 2 sites")]
    assert line == (
        f"synchronization of 2 sites: each rank sends about {bytes_text(workload.parameters)} every 25 steps "
        "instead of gradients at every step"
    )


def state(plan: Plan) -> ModelStates:
    return model_states_of(
        RankParameters(dense_blocks=1e6, experts=0.0, end_layers=0.0, largest_block=1e5),
        plan,
        MemoryInputs("adamw", 1, False, FrameworkTraits()),
    )


@pytest.mark.parametrize(
    ("seldom", "copies", "at_host"),
    [
        (EVERY_100, 2.0, 0.0),
        (Synchronization("local_sgd", 2, 100), 1.0, 0.0),
        (replace(EVERY_100, fragments=4, overlap_steps=5), 2.25, 0.0),
        (replace(EVERY_100, offload="host"), 0.0, 2.0),
        (Synchronization("delayed", 2, staleness=2), 3.0, 0.0),
    ],
    ids=str,
)
def test_memory_counts_what_sites_keep(seldom: Synchronization, copies: float, at_host: float) -> None:
    plain = Plan(dp_replicate=2, precision="bf16", device="cuda")
    exact, found = state(plain), state(replace(plain, synchronization=seldom))
    assert found.optimizer - exact.optimizer == pytest.approx(copies * 4e6)
    assert found.host - exact.host == pytest.approx(at_host * 4e6)


# ------------------------------------------------------------------ who comes and goes


MODEL = DecoderConfig(4, 2048, 16, 16, 8192, 32000)
FOUR, TWO = parse_shorthand("4x8 H100, 8x400G"), parse_shorthand("2x8 H100, 8x400G")


def of_machines(nodes: int, **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": 1024},
            "train": {"global_batch": 128, "precision": "bf16"},
            "parallel": {"dp_replicate": 4, "dp_shard": 8, "shard": "optimizer", **parallel},
            "cluster": {"nodes": nodes, "rendezvous": "a:1"},
        }
    )


@pytest.mark.parametrize(("keys", "left"), [({}, 2), ({"sites": 2}, 1)], ids=["each", "two"])
def test_machines_that_are_lost_take_their_sites_with_them(keys: dict[str, Any], left: int) -> None:
    workload = compute_decoder_workload(MODEL, 1024)
    text = of_machines(4, synchronize="diloco", **keys)
    running = plan_for_job(PlanningInputs(text, FOUR, workload, MODEL)).plan
    decision = replan(build_problem(text, FOUR, workload, MODEL), running, TWO, 1000)
    assert decision.is_change
    assert (decision.plan.world_size, decision.plan.sites) == (16, left)
    assert decision.plan.ranks_per_site == running.ranks_per_site
    assert decision.plan.synchronization == replace(running.synchronization, sites=left)  # type: ignore[type-var]


def test_half_a_site_cannot_go_on() -> None:
    workload = compute_decoder_workload(MODEL, 1024)
    text = of_machines(4, synchronize="diloco", sites=2)
    running = plan_for_job(PlanningInputs(text, FOUR, workload, MODEL)).plan
    three = parse_shorthand("3x8 H100, 8x400G")
    with pytest.raises(JobError, match=r"24 data ranks .* 16 data ranks"):
        replan(build_problem(text, FOUR, workload, MODEL), running, three, 1000)


# ------------------------------------------------------------------ who is who


def test_ranks_that_share_an_axis_are_named_across_sites() -> None:
    plan = Plan(pp=2, dp_replicate=4, tp=2, synchronization=Synchronization("diloco", 2, 10))
    assert ranks_of_group(plan, "dp_replicate", 11) == (1, 3, 9, 11)
    assert ranks_of_group(plan, "pp", 9) == (9, 13)
    assert ranks_of_group(plan, "tp", 13) == (12, 13)
    assert stage_layouts(replace(plan, stage_cuts=(1,)), 2)[1].ranks == (4, 5, 6, 7, 12, 13, 14, 15)


def test_lighter_plans_keep_their_sites() -> None:
    posed = replace(problem(devices=16), dimensions=SMALL)
    plan = replace(FAR, synchronization=EVERY_100)
    lighter = [one for family in change_families(posed).values() for one in family(plan)]
    assert lighter
    assert {one.sites for one in lighter} == {2}
    assert {one.world_size for one in lighter} == {16}
