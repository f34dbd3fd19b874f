"""Amounts of a step: bytes of memory and network, FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.problems import SMALL, job, problem
from wanma.job.plan.plan import Plan
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.plan_forecast import forecast_step_time
from wanma.planner.forecast.step_traffic import forecast_step_traffic

GIVEN = problem(job(global_batch=16, precision="bf16"))
PARAMETERS = GIVEN.workload.parameters
REPLICAS = Plan(dp_replicate=4, micro_batch=1, precision="bf16", device="cuda")


def traffic(plan: Plan):  # inferred
    found = forecast_step_traffic(GIVEN, plan)
    assert found is not None
    return found


def test_replicas_send_their_gradients_once_around() -> None:
    """An all-reduce of n ranks sends 2 (n − 1) / n of the buffer from each, here in fp32."""
    found = traffic(REPLICAS)
    assert found.network_bytes == pytest.approx(4 * PARAMETERS * 2 * 3 / 4, rel=0.02)


def test_a_single_rank_sends_nothing_and_has_all_flops() -> None:
    one = traffic(Plan(micro_batch=1, precision="bf16", device="cuda"))
    assert one.network_bytes < 1
    assert one.flops == pytest.approx(GIVEN.workload.flops_per_sample * 16)
    assert traffic(REPLICAS).flops == pytest.approx(one.flops / 4)


def test_sharded_parameters_are_gathered_twice_for_each_micro_batch() -> None:
    """ZeRO-3: two all-gathers in bf16 and a reduce-scatter, of (n − 1) / n of the parameters each."""
    plan = Plan(dp_shard=4, shard="parameters", micro_batch=4, precision="bf16", device="cuda")
    gathered = 2 * 2 * PARAMETERS * 3 / 4
    found = traffic(plan).network_bytes
    assert gathered < found < gathered + 4 * PARAMETERS * 3 / 4 * 1.05
    assert traffic(replace(plan, micro_batch=1)).network_bytes == pytest.approx(4 * found, rel=0.1)


def test_recompute_moves_more_through_memory_for_the_same_flops() -> None:
    plain, again = traffic(REPLICAS), traffic(replace(REPLICAS, recompute="full"))
    assert 1.05 < again.memory_bytes / plain.memory_bytes < 1.5, "a second forward"
    assert again.flops == plain.flops


def test_memory_bytes_are_at_least_those_of_weights_and_their_update() -> None:
    """Per micro-batch weights are read twice in bf16; the update reads and writes weights and two states."""
    found = traffic(REPLICAS)
    least = 4 * 2 * 2 * PARAMETERS + 6 * 4 * PARAMETERS
    assert least < found.memory_bytes < 100 * least


def test_amounts_do_not_depend_on_the_rates_of_the_machine() -> None:
    slow = replace(
        GIVEN, hardware=replace(GIVEN.hardware, chip=replace(GIVEN.hardware.chip, launch_seconds=1.0))
    )
    assert forecast_step_traffic(slow, REPLICAS) == forecast_step_traffic(GIVEN, REPLICAS)


def test_no_device_can_be_faster_than_its_traffic() -> None:
    step = forecast_step_time(GIVEN, REPLICAS)
    chip = GIVEN.hardware.chip
    rate = chip.bandwidth_bytes_per_second * chip.bandwidth_share
    assert traffic(REPLICAS).memory_bytes / rate <= step.compute + step.optimizer


def test_a_model_without_operators_has_none() -> None:
    bare = replace(GIVEN, dimensions=None, workload=compute_decoder_workload(SMALL, 512))
    assert forecast_step_traffic(bare, REPLICAS) is None
