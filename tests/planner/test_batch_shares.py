"""Unlike shares of the batch, as a job gives them, and when they may move."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import rank_timing_obstacle
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.batch_share_rules import invalid_shares_reason
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.rules.capabilities import unsupported_reason

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))


def job(shares: list[int], model: dict[str, Any] | None = None, batch: int = 8, **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": model or {"preset": "gpt-1m"},
            "train": {"global_batch": batch},
            "parallel": {"dp_replicate": 2, "batch_shares": shares, **parallel},
        }
    )


def test_the_planned_micro_batch_holds_the_largest_share() -> None:
    dimensions = DecoderConfig(4, 128, 4, 4, 384, 320)
    asked = job([3, 1])
    plan = complete_plan(
        asked, build_layout(asked, LAPTOP), LAPTOP, compute_decoder_workload(dimensions, 64), dimensions
    ).plan
    assert plan.batch_shares == (3, 1)
    assert (plan.micro_batch, plan.gradient_accumulation_steps(8)) == (6, 1)
    assert [len(plan.batch_rows(8, rank)) for rank in (0, 1)] == [6, 2]


def planned(asked: Job) -> Plan:
    dimensions = DecoderConfig(4, 128, 4, 4, 384, 320)
    return complete_plan(
        asked, build_layout(asked, LAPTOP), LAPTOP, compute_decoder_workload(dimensions, 64), dimensions
    ).plan


@pytest.mark.parametrize(
    ("shares", "parallel", "message"),
    [
        ([1, 2, 3], {}, r"\[1, 2, 3\] has 3 numbers for 2 data"),
        ([1, 2], {"auto": True}, r"with parallel = 'auto'"),
        ([1, 9], {}, r"shares \[1, 9\] of train.global_batch = 8"),
        ([1, 3], {"pp": 2, "micro_batch": 2}, r"gives data rank 0 2 samples, which are 1"),
        ([], {"batch_share_schedule": [[2, [1, 2, 5]]]}, r"\[\[2, \[1, 2, 5\]\]\] has 3 numbers"),
        ([], {"batch_share_schedule": [[2, [1, 99]]]}, r"shares \[1, 99\] .* give data rank 0 no sample"),
        ([], {"batch_share_schedule": [[0, [1, 3]]]}, r"from 1 on \(given: \[0\]\)"),
        (
            [],
            {"batch_share_schedule": [[3, [1, 3]], [3, [1, 1]]]},
            r"from 1 on \(given: \[3, 3\]\)",
        ),
        (
            [],
            {"batch_share_schedule": [[3, [1, 3]]], "load_balancing": "on"},
            r"both change the batch shares",
        ),
        ([], {"dp_replicate": 1, "load_balancing": "on"}, r"no other rank can take samples"),
    ],
)
def test_shares_that_fit_no_layout_are_refused(
    shares: list[int], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message) as refusal:
        planned(job(shares, **parallel))
    assert refusal.value.hint


def test_balance_by_times_is_refused_where_runs_are_to_be_equal_bit_for_bit() -> None:
    asked = job([], load_balancing="on")
    fixed = asked.model_copy(update={"train": asked.train.model_copy(update={"deterministic": True})})
    with pytest.raises(JobError) as refusal:
        build_layout(fixed, LAPTOP)
    assert "parallel.batch_share_schedule repeats" in refusal.value.hint


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(dp_shard=2, shard="parameters"), None),
        (Plan(dp_replicate=2, ep=2), None),
        (Plan(dp_replicate=2, device="cuda"), None),
        (Plan(dp_replicate=2, tp=2, device="cuda"), None),
        (Plan(pp=2, dp_shard=2, shard="parameters", device="cuda"), None),
        (Plan(dp_shard=2, shard="parameters", device="cuda"), "gathered around each block"),
        (Plan(dp_replicate=2, ep=2, device="cuda"), "experts that data ranks share"),
    ],
    ids=str,
)
def test_balance_needs_times_without_waiting(plan: Plan, reason: str | None) -> None:
    told = rank_timing_obstacle(plan)
    assert told is None if reason is None else told is not None and reason in told
    refused = unsupported_reason(job([], load_balancing="on"), plan, LAPTOP)
    assert (refused is None) == (reason is None)
    assert unsupported_reason(job([]), plan, LAPTOP) is None


def test_a_pipeline_takes_shares_that_leave_each_replica_enough_micro_batches() -> None:
    plan = planned(job([1, 3], pp=2, micro_batch=1))
    assert plan.micro_batch_counts(8) == [2, 6]
    assert planned(job([1, 3], pp=2, micro_batch=3, schedule="gpipe")).micro_batch_counts(8) == [1, 2]


@pytest.mark.parametrize(
    ("plan", "shares", "group", "reason"),
    [
        (Plan(dp_replicate=2, micro_batch=2), (7, 1), 1, None),
        (Plan(dp_replicate=2, micro_batch=2), (6, 2), 2, None),
        (
            Plan(dp_replicate=2, micro_batch=2),
            (5, 3),
            2,
            "does not divide into micro-batches of complete sample groups",
        ),
        (Plan(pp=2, dp_replicate=2, micro_batch=2), (6, 2), 1, "the number of stages"),
        (Plan(pp=2, dp_replicate=2, micro_batch=2), (5, 3), 1, None),
    ],
)
def test_a_run_asks_whether_it_can_go_on_with_other_shares(
    plan: Plan, shares: tuple[int, ...], group: int, reason: str | None
) -> None:
    told = invalid_shares_reason(job([]), plan, shares, group, step=3)
    assert told is None if reason is None else told is not None and reason in told


def test_samples_that_share_a_statistic_stay_together_on_every_rank() -> None:
    """Shares of 3 to 1 give the ranks 12 and 4 of 16 samples, which are whole groups of 4."""
    model = {"preset": "resnet18", "batch_norm_group": 4}
    workload = Workload((LayerWorkload("all", 1, 1, 1.0, 1.0),), 1)
    plans = {}
    for one in ((3, 1), (5, 3)):
        asked = job(list(one), model, batch=16, micro_batch=12)
        plans[one] = lambda asked=asked: (
            complete_plan(asked, build_layout(asked, LAPTOP), LAPTOP, workload).plan
        )
    assert plans[3, 1]().gradient_accumulation_steps(16) == 1
    with pytest.raises(JobError, match="complete sample groups"):
        plans[5, 3]()


def test_shares_that_may_move_are_forecast_to_add_up_gradients() -> None:
    """One micro-batch each, as it begins; a rank that gets more samples will have two."""
    needed = {}
    for balance in ("off", "on"):
        asked = job([], dp_replicate=1, dp_shard=2, shard="optimizer", micro_batch=4, load_balancing=balance)
        dimensions = DecoderConfig(4, 128, 4, 4, 384, 320)
        workload = compute_decoder_workload(dimensions, 64)
        found = complete_plan(asked, build_layout(asked, LAPTOP), LAPTOP, workload, dimensions)
        assert found.plan.gradient_accumulation_steps(8) == 1
        needed[balance] = found.forecast.memory_bytes
    assert needed["on"] > needed["off"]
