"""Plans for heterogeneous clusters: their parts by hand, and whole steps beside an event simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner.step_simulation import simulate_step
from benchmarks.planner.step_times import decoder_step_time
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fleets import START, costs, fleet
from support.problems import SEQUENCE, SMALL
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.planner.cost.decoder import decoder_stage_send_seconds
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.model import LinkLevel
from wanma.planner.heterogeneous.costs import cross_group_reduce_seconds, placed_step_time
from wanma.planner.heterogeneous.replica_pipeline import ReplicaPipeline, StageTime, replica_pipeline_seconds
from wanma.planner.memory.peak import pipeline_rank_memory
from wanma.planner.pipeline.simulation import StageCost, simulate_pipeline

FAST, SLOW = 0, 1
seconds = st.floats(0.5, 3.0)


def placed(*groups: tuple[ReplicaPlacement, int], shard: Shard = "none") -> Plan:
    """Replicas, each with the samples of one of them."""
    placement = tuple(replicas for replicas, _ in groups)
    return replace(
        START,
        pp=max(len(one.places) for one in placement),
        dp_replicate=sum(one.count for one in placement),
        tp=max(place.tp for one in placement for place in one.places),
        shard=shard,
        batch_shares=tuple(samples for one, samples in groups for _ in range(one.count)),
        placement=placement,
    )


# ------------------------------------------------------------------ one replica


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 60), st.floats(0, 0.5))
def test_a_replica_takes_what_the_schedule_takes_that_is_played_elsewhere(
    stages: list[tuple[float, float]], micro_batches: int, send: float
) -> None:
    pipeline = ReplicaPipeline(
        tuple(StageTime(forward, backward, {}, 0.0) for forward, backward in stages),
        (send,) * (len(stages) - 1),
    )
    equal = [StageCost(forward, backward) for forward, backward in stages]
    played = simulate_pipeline("1f1b", equal, len(stages), micro_batches, send).seconds
    assert replica_pipeline_seconds(pipeline, micro_batches) == pytest.approx(played, rel=1e-9)


def test_each_boundary_between_stages_takes_its_own_time() -> None:
    """One micro-batch waits at every boundary twice; a slow one is worth as much as two that add up to it."""
    stages = (StageTime(1.0, 2.0, {}, 0.0),) * 3
    assert replica_pipeline_seconds(ReplicaPipeline(stages, (0.5, 0.1)), 1) == pytest.approx(9.0 + 2 * 0.6)
    assert replica_pipeline_seconds(ReplicaPipeline(stages, (0.1, 0.5)), 1) == pytest.approx(9.0 + 2 * 0.6)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_boundary_on_one_kind_carries_elements_of_the_precision(precision: str) -> None:
    parts = costs(start=replace(START, precision=precision))
    equal = replace(START, pp=2, dp_replicate=2, precision=precision)
    one, other = StagePlacement(FAST, 2), StagePlacement(FAST, 2)
    seconds = parts._send_seconds(ReplicaPlacement(2, (one, other)), one, other)
    expected = decoder_stage_send_seconds(SMALL, SEQUENCE, equal, parts.hardware.pools[FAST].hardware)
    assert seconds == pytest.approx(expected, rel=1e-9)


def test_a_stage_costs_what_its_blocks_cost_on_its_own_device() -> None:
    parts = costs()
    on = {
        node: parts.stage_times(ReplicaPlacement(1, (StagePlacement(node, 4),)), "none")[0]
        for node in (FAST, SLOW)
    }
    assert on[SLOW].seconds > 1.5 * on[FAST].seconds
    first, second = parts.stage_times(
        ReplicaPlacement(1, (StagePlacement(FAST, 3), StagePlacement(SLOW, 1))), "none"
    )
    unit = parts.layer_times(SLOW, 1, 1, "none", pipelined=True, accumulates_gradients=True, sharded=False)
    assert second.forward == pytest.approx(unit.blocks[0].forward + unit.post_block.forward)
    assert first.parameters + second.parameters == pytest.approx(on[FAST].parameters)


# ------------------------------------------------------------------ whole steps


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_equal_replicas_on_one_kind_take_what_the_plan_of_equal_ranks_takes(shard: Shard) -> None:
    parts = costs()
    same = Plan(precision="bf16", device="cuda", micro_batch=2, recompute="selective")
    equal = {
        "none": replace(same, dp_replicate=4),
        "optimizer": replace(same, dp_shard=4, shard="optimizer"),
    }[shard]
    machine = parts.hardware.pools[FAST].hardware
    expected = decoder_step_time(SMALL, SEQUENCE, equal, 8, machine, FrameworkTraits())
    plan = placed((ReplicaPlacement(4, (StagePlacement(FAST, 4),), 2, "selective"), 2), shard=shard)
    assert placed_step_time(parts, plan, 8).seconds == pytest.approx(expected.seconds, rel=1e-9)


@pytest.mark.parametrize("batch", [16, 64])
def test_equal_pipelines_on_one_kind_take_nearly_what_the_plan_of_equal_ranks_takes(batch: int) -> None:
    """The stage whose gradients count is told apart more finely here."""
    parts = costs(fleet(8, 4))
    equal = replace(START, pp=2, dp_replicate=2, tp=2, stage_cuts=(2,))
    expected = decoder_step_time(
        SMALL, SEQUENCE, equal, batch, parts.hardware.pools[FAST].hardware, FrameworkTraits()
    )
    plan = placed((ReplicaPlacement(2, (StagePlacement(FAST, 2, 2), StagePlacement(FAST, 2, 2))), batch // 2))
    found = placed_step_time(parts, plan, batch)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.03)
    assert found.uncertainty == expected.uncertainty > 0.12


CASES = {
    "replicas of two kinds": placed(
        (ReplicaPlacement(4, (StagePlacement(FAST, 4),), 2), 24),
        (ReplicaPlacement(4, (StagePlacement(SLOW, 4),), 1), 8),
    ),
    "with the optimizer sharded": placed(
        (ReplicaPlacement(4, (StagePlacement(FAST, 4),), 2), 24),
        (ReplicaPlacement(4, (StagePlacement(SLOW, 4),), 1), 8),
        shard="optimizer",
    ),
    "recomputing on one kind": placed(
        (ReplicaPlacement(4, (StagePlacement(FAST, 4),), 4), 24),
        (ReplicaPlacement(4, (StagePlacement(SLOW, 4),), 2, "full"), 8),
    ),
    "pipelines over both kinds": placed(
        (ReplicaPlacement(4, (StagePlacement(FAST, 3), StagePlacement(SLOW, 1))), 32)
    ),
    "the slower kind first": placed(
        (ReplicaPlacement(4, (StagePlacement(SLOW, 1), StagePlacement(FAST, 3))), 32)
    ),
    "wider stages on one kind": placed(
        (ReplicaPlacement(2, (StagePlacement(FAST, 2, 2), StagePlacement(SLOW, 2, 2))), 64)
    ),
    "pipelines and single devices": placed(
        (ReplicaPlacement(2, (StagePlacement(FAST, 2), StagePlacement(FAST, 2))), 32),
        (ReplicaPlacement(2, (StagePlacement(SLOW, 2), StagePlacement(SLOW, 2))), 14),
    ),
    "over both, and the rest": placed(
        (ReplicaPlacement(2, (StagePlacement(FAST, 3), StagePlacement(SLOW, 1))), 22),
        (ReplicaPlacement(2, (StagePlacement(FAST, 4),)), 20),
    ),
    "unlike numbers of samples in a group": placed(
        (ReplicaPlacement(4, (StagePlacement(FAST, 4),), 2), 21),
        (ReplicaPlacement(2, (StagePlacement(SLOW, 2), StagePlacement(SLOW, 2))), 13),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_is_what_playing_every_event_takes(name: str) -> None:
    """Within 2 %: it says nothing of how exchanges are cut into buckets, and takes all micro-batches to be
    as large as the largest."""
    parts, plan = costs(fleet(outer=20e9, across=20e9)), CASES[name]
    batch = sum(plan.batch_shares)
    forecast = placed_step_time(parts, plan, batch)
    assert forecast.seconds == pytest.approx(simulate_step(parts, plan, batch), rel=0.02)
    kinds = ("compute", "tensor", "expert", "data", "bubble", "optimizer")
    assert sum(getattr(forecast, kind) for kind in kinds) == pytest.approx(forecast.seconds)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 2]), st.integers(8, 40), st.integers(8, 40))
def test_the_forecast_is_near_the_simulation_for_any_cuts_and_shares(
    cut: int, other: int, micro_batch: int, one: int, two: int
) -> None:
    plan = placed(
        (ReplicaPlacement(2, (StagePlacement(FAST, cut), StagePlacement(SLOW, 4 - cut)), micro_batch), one),
        (
            ReplicaPlacement(1, (StagePlacement(SLOW, other), StagePlacement(FAST, 4 - other)), micro_batch),
            two,
        ),
    )
    parts = costs(fleet(outer=20e9, across=20e9))
    batch = 2 * one + two
    # The forecast takes all micro-batches to be as large as the largest. With few of them, which stages wait
    # for which at the end counts; over many it is off by 0.6 % in the mean.
    filled = max(-(-rows // micro_batch) * micro_batch / rows for rows in (one, two))
    share = placed_step_time(parts, plan, batch).seconds / simulate_step(parts, plan, batch)
    assert 0.96 <= share <= 1.04 * filled


def test_a_simulated_replica_alone_takes_its_work_and_nothing_else() -> None:
    parts = costs()
    plan = placed((ReplicaPlacement(1, (StagePlacement(SLOW, 4),)), 6))
    (stage,) = parts.stage_times(plan.placement[0], "none")
    update = parts.reduction_times(plan.placement[0].places[0], stage, 1, 1, "none").optimizer
    assert simulate_step(parts, plan, 6) == pytest.approx(6 * stage.seconds + update, rel=1e-9)


# ------------------------------------------------------------------ exchanges


def test_unlike_groups_sum_their_gradients_in_a_ring_over_the_joining_link() -> None:
    """Two groups: each device sends its part once, half at a time, there and back."""
    link = LinkLevel(8, 1e-3, 1e9)
    assert cross_group_reduce_seconds(link, 2, 4e9) == pytest.approx(2 * 1e-3 + 4.0)
    assert cross_group_reduce_seconds(link, 4, 4e9) == pytest.approx(6 * 1e-3 + 6.0)
    assert cross_group_reduce_seconds(link, 1, 4e9) == 0.0


def test_a_slower_joining_link_makes_mixed_plans_slower_and_no_others() -> None:
    mixed = CASES["replicas of two kinds"]
    alone = placed((ReplicaPlacement(4, (StagePlacement(FAST, 4),), 2), 24))
    taken = {
        rate: [
            placed_step_time(costs(fleet(across=rate)), plan, sum(plan.batch_shares)).seconds
            for plan in (mixed, alone)
        ]
        for rate in (20e9, 0.1e9)
    }
    assert taken[0.1e9][0] > 1.2 * taken[20e9][0]
    assert taken[0.1e9][1] == taken[20e9][1]


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_placed_stage_needs_what_the_same_stage_of_equal_ranks_needs(shard: Shard) -> None:
    parts = costs()
    replicas = ReplicaPlacement(4, (StagePlacement(FAST, 3), StagePlacement(SLOW, 1)), 2, "selective")
    view = Plan(pp=2, stage_cuts=(3,), micro_batch=2, recompute="selective", precision="bf16", device="cuda")
    view = replace(view, **({"dp_shard": 4, "shard": shard} if shard == "optimizer" else {"dp_replicate": 4}))
    expected = pipeline_rank_memory(
        parts.problem.workload, view, "adamw", micro_batches=4, dimensions=SMALL, framework=FrameworkTraits()
    )
    found = parts.memory(replicas, shard, 4)
    assert found == [one.forecast for one in expected]
    assert found[0].memory_bytes > found[1].memory_bytes


def test_a_stage_must_fit_into_its_own_kind_of_device() -> None:
    replicas = ReplicaPlacement(4, (StagePlacement(FAST, 3), StagePlacement(SLOW, 1)))
    needed = [one.memory_bytes for one in costs().memory(replicas, "none", 4)]
    assert costs(fleet(fast_bytes=needed[0], slow_bytes=needed[1])).fits(replicas, "none", 4)
    assert not costs(fleet(fast_bytes=needed[0] - 1, slow_bytes=needed[1])).fits(replicas, "none", 4)
    assert not costs(fleet(fast_bytes=needed[0], slow_bytes=needed[1] - 1)).fits(replicas, "none", 4)
