"""Cost of a run: seconds of all its steps, joules at the wall, money."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner.step_times import decoder_step_time
from hypothesis import given
from hypothesis import strategies as st

from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.forecast.forecast import LayerWorkload, RunCost, StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.train import TrainSection
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.run_cost import (
    DeviceActivity,
    device_activity,
    node_watts,
    price_run,
    run_cost,
    run_seconds,
)
from wanma.planner.hardware_model.builder import build_hardware_model

STEP = StepTime(10.0, compute=6.0, tensor=1.0, data=0.5, bubble=2.0, optimizer=0.5)
IDLE = DeviceActivity(0.0, 0.0, 0.0, 1.0)
KILOWATT_HOUR = 3.6e6


def train(**keys: object) -> TrainSection:
    return TrainSection.model_validate(
        {"steps": 100, "global_batch": 32, "validate_every_steps": 0, "validation_samples": 32, **keys}
    )


def problem(cluster: Cluster, flops_per_sample: float, **keys: object) -> PlanningProblem:
    layer = LayerWorkload("all", 1, 10**9, flops_per_sample, 0.0)
    return PlanningProblem(
        Job.model_validate({"model": {"preset": "gpt-10m"}, "train": train(**keys).model_dump()}),
        cluster,
        Workload((layer,), 2048),
        build_hardware_model(cluster),
        64e9,
    )


def test_mlperf_s_gpt_3_on_512_h100_used_415_kilowatt_hours() -> None:
    """Measured at the wall in 56.9 minutes. Assumed: DGX H100 with what its maker states; tensor 4, pipeline
    8 in six parts, 16 replicas of 64 micro-batches of two, in FP8 by Transformer Engine."""
    cluster = read_cluster("64x8 H100 SXM, 8x400G")
    gpt3 = DecoderConfig(96, 12288, 96, 96, 49152, 51200, activation_function="gelu")
    plan = Plan(
        pp=8, dp_shard=16, tp=4, shard="optimizer", sequence_parallel=True, micro_batch=2,
        schedule="interleaved_1f1b", virtual_stages=6, precision="bf16", fp8=True, device="cuda",
    )  # fmt: skip
    habits = FrameworkTraits(
        architecture="gpt",
        fuses_pointwise=True,
        selective_recompute="attention",
        tensor_overlap=0.7,
        weight_storage="copies",
        fuses_gradient_accumulation=True,
    )
    step = decoder_step_time(gpt3, 2048, plan, 2048, build_hardware_model(cluster), habits)
    given = replace(problem(cluster, 2 * 175e9 * 2048, global_batch=2048), framework=habits)
    cost = price_run(56.9 * 60, [(cluster.nodes[0], 64)], device_activity(given, plan, step))
    assert cost.energy_joules == pytest.approx(415 * KILOWATT_HOUR, rel=0.1)


def test_shares_of_a_step_add_up_to_one() -> None:
    cluster = read_cluster("1x8 A100")
    rate = 312e12 * 0.9 * 0.9
    # Four seconds of products on each of eight devices.
    given = problem(cluster, 4 * 8 * rate / 32 / 3)
    doing = device_activity(given, Plan(dp_shard=8, precision="bf16"), STEP)
    shares = (doing.matmul, doing.memory_bound, doing.communication, doing.idle)
    assert shares == pytest.approx((0.4, 0.25, 0.15, 0.2))
    again = device_activity(given, Plan(dp_shard=8, precision="bf16", recompute="full"), STEP)
    assert again.matmul == pytest.approx(0.4 * 4 / 3)


def test_a_machine_draws_what_its_devices_do_and_half_of_the_rest() -> None:
    (node,) = read_cluster("1x8 H100").nodes
    assert node_watts(node, DeviceActivity(1.0, 0.0, 0.0, 0.0)) == pytest.approx(5600 + 0.5 * 4600)
    assert node_watts(node, IDLE) == pytest.approx(0.3 * 5600 + 0.5 * 4600)
    # Where nobody states the whole, the rest is taken to be as large as in other servers.
    assert node_watts(replace(node, power_watts=None), IDLE) == pytest.approx(0.3 * 5600 + 0.5 * 0.8 * 5600)


def test_processors_draw_as_devices_do_and_nobody_s_figure_is_made_up() -> None:
    (node,) = read_cluster("1x2 EPYC 9654").nodes
    assert node_watts(node, IDLE) == pytest.approx(720 * (0.3 + 0.5 * 0.8))
    (other,) = read_cluster("1x4 TPU v5p").nodes
    assert node_watts(other, IDLE) is None
    assert node_watts(NodeGroup("laptop", 8, 10**10, ()), IDLE) is None


@given(st.tuples(*[st.floats(0, 1)] * 4).filter(lambda shares: sum(shares) > 0))
def test_no_machine_draws_more_than_its_limit(shares: tuple[float, float, float, float]) -> None:
    doing = DeviceActivity(*(share / sum(shares) for share in shares))
    (node,) = read_cluster("1x8 H100").nodes
    watts = node_watts(node, doing)
    assert 0.3 * 5600 < watts < 10200


def test_a_run_is_its_steps_and_one_validation() -> None:
    # Seven seconds are of micro-batches; a forward is a third of them and of the bubble.
    plan = Plan(dp_shard=8)
    assert run_seconds(train(), 32, plan, STEP) == pytest.approx(100 * 10.0 + (7.0 + 2.0) / 3)
    often = run_seconds(train(validate_every_steps=10, validation_samples=64), 32, plan, STEP)
    assert often == pytest.approx(100 * 10.0 + 10 * (14.0 + 2.0) / 3)
    again = run_seconds(train(), 32, replace(plan, recompute="full"), STEP)
    assert again == pytest.approx(100 * 10.0 + (7.0 + 2.0) / 4)


def test_a_ramp_begins_with_shorter_steps() -> None:
    ramp = train(global_batch=8, batch_ramp=[(40, 16), (50, 32), (200, 64)])
    seconds = run_seconds(ramp, 32, Plan(dp_shard=8), STEP)
    steps = 40 * (3.0 + 7.0 / 4) + 10 * (3.0 + 7.0 / 2) + 50 * 10.0
    assert seconds == pytest.approx(steps + (7.0 + 2.0) / 3)


def test_price_and_energy_count_the_machines_that_the_plan_fills() -> None:
    cluster = read_cluster("4x8 H100, 8x400G")
    priced = Cluster((replace(cluster.nodes[0], price_per_hour=30.0),))
    plan = Plan(dp_shard=12, precision="bf16")
    cost = run_cost(problem(priced, 1e15), plan, STEP)
    assert cost.price == pytest.approx(2 * 30.0 * cost.seconds / 3600)
    four = run_cost(problem(priced, 1e15), replace(plan, dp_shard=32), STEP)
    assert four.price == pytest.approx(2 * (cost.price or 0.0), rel=0.01)
    assert run_cost(problem(cluster, 1e15), plan, STEP).price is None


def test_energy_of_unlike_machines_is_known_only_if_all_of_them_are() -> None:
    (h100,), (tpu,) = read_cluster("1x8 H100").nodes, read_cluster("1x4 TPU v5p").nodes
    watts = node_watts(h100, IDLE)
    assert price_run(60.0, [(h100, 2)], IDLE) == RunCost(60.0, 120.0 * watts, None)
    assert price_run(60.0, [(h100, 2), (tpu, 1)], IDLE).energy_joules is None
