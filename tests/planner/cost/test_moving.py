"""Copies of offloaded tensors: hidden where the runtime hides them, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.problems import SMALL, job, problem
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.models.workload.model_workload import trace_module_workload
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN
from wanma.planner.cost.step import OPTIMIZER_KERNELS
from wanma.planner.forecast.plan_forecast import forecast_plan, model_cost_of
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.hardware_model.model import HostModel
from wanma.planner.memory.memory_table import build_memory_table
from wanma.planner.memory.peak import pipeline_rank_memory

HOST = HostModel(
    link_bytes_per_second=20e9,
    memory_bytes_per_second=10e9,
    file_read_bytes_per_second=4e9,
    file_write_bytes_per_second=2e9,
    fresh_bytes_per_second=1e18,
    disk_bytes_per_second=1e9,
)
GPU = Plan(precision="bf16", device="cuda", micro_batch=4)
CPU = replace(GPU, device="cpu")


def given_problem(batch: int = 16, **host: Any) -> PlanningProblem:
    of = problem(job(global_batch=batch))
    return replace(of, hardware=replace(of.hardware, host=replace(HOST, **host)))


def step(plan: Plan, of: PlanningProblem | None = None) -> StepTime:
    found = forecast_plan(of or given_problem(), plan).step
    assert found is not None
    return found


def parameters(of: PlanningProblem) -> float:
    """As forecasts of time count them: those of matrices."""
    pieces = model_cost_of(of, GPU)
    ends = sum(end.parameters for end in (*pieces.pre_block, *pieces.post_block))
    return ends + sum(kind.block_count * kind.parameters for kind in pieces.blocks)


def test_nothing_that_waits_elsewhere_costs_nothing() -> None:
    assert step(GPU).moving == step(CPU).moving == 0.0
    assert step(GPU).optimizer == step(GPU, given_problem(link_bytes_per_second=1.0)).optimizer


def test_optimizer_state_on_the_host_comes_and_goes_over_the_link_before_and_after_the_update() -> None:
    of = given_problem()
    here, away = step(GPU, of), step(replace(GPU, offload_optimizer="host"), of)
    # Two moments in 32 bits, both ways: nothing of it beside anything.
    assert away.optimizer - here.optimizer == pytest.approx(2 * 8 * parameters(of) / 20e9)
    assert (away.moving, away.compute) == (here.moving, here.compute)


def test_optimizer_state_in_files_goes_through_the_host() -> None:
    of = given_problem()
    more = step(replace(GPU, offload_optimizer="disk"), of).optimizer - step(GPU, of).optimizer
    assert more == pytest.approx(8 * parameters(of) * (2 / 20e9 + 1 / 4e9 + 1 / 2e9))
    # On a CPU it is updated where it is: pages come and go.
    more = step(replace(CPU, offload_optimizer="disk"), of).optimizer - step(CPU, of).optimizer
    assert more == pytest.approx(8 * parameters(of) * (1 / 4e9 + 1 / 2e9))


def test_sharded_state_moves_in_shards() -> None:
    of = given_problem()
    shared = replace(GPU, dp_shard=4, shard="optimizer", micro_batch=2)
    more = step(replace(shared, offload_optimizer="host"), of).optimizer - step(shared, of).optimizer
    assert more == pytest.approx(2 * 8 * parameters(of) / 4 / 20e9)


def test_with_weights_on_the_host_its_processors_update_them() -> None:
    of = given_problem()
    found = step(replace(GPU, offload_parameters="host"), of)
    assert found.optimizer == pytest.approx(42 * parameters(of) / 10e9)
    at_disk = step(replace(GPU, offload_parameters="disk", offload_optimizer="disk"), of)
    assert at_disk.optimizer == pytest.approx((42 / 10e9 + 12 / 4e9 + 12 / 2e9) * parameters(of))


def test_weights_come_for_each_forward_and_backward_beside_computing() -> None:
    quick, slow = given_problem(link_bytes_per_second=1e15), given_problem(link_bytes_per_second=1e7)
    plan = replace(GPU, offload_parameters="host")
    assert step(plan, quick).moving < 1e-3 * step(plan, quick).compute
    found = step(plan, slow)
    each = 4 * parameters(slow) / 1e7
    # Four micro-batches; of what computes beside a copy, that loses a little and hides the rest.
    assert found.moving == pytest.approx(4 * 2 * each - (1 - OVERLAP_SLOWDOWN) * found.compute, rel=1e-3)
    # Gradients go once: beside the last backward.
    last = (1 - OVERLAP_SLOWDOWN) * (found.compute + found.moving) / 4
    assert max(0.0, each - last) < found.data < each


def test_gradients_of_each_micro_batch_are_added_on_the_host() -> None:
    shared = replace(GPU, dp_shard=2, shard="parameters", micro_batch=2, offload_parameters="host")
    of, slower = given_problem(), given_problem(memory_bytes_per_second=5e9)
    # Of four micro-batches three are added: two numbers read, one written.
    adding = 3 * 12 * parameters(of) / 2 / 10e9
    more = step(shared, slower).compute - step(shared, of).compute
    assert more == pytest.approx(adding, rel=1e-6)


def test_a_pipeline_brings_weights_once_a_step() -> None:
    plan = replace(GPU, pp=2, micro_batch=2, stage_cuts=(2,), offload_parameters="host")
    of = given_problem(link_bytes_per_second=1e6)
    found = step(plan, of)
    assert found.moving == 0.0
    # Half of the weights come, half of their gradients go: nearly nothing of it is hidden.
    assert found.data == pytest.approx(2 * 4 * parameters(of) / 2 / 1e6, rel=0.01)


def kept_bytes(plan: Plan, of: PlanningProblem) -> float:
    (rank,) = pipeline_rank_memory(of.workload, plan, "adamw", dimensions=SMALL)
    return rank.offloaded_activations


def test_activations_in_files_are_waited_for_on_both_ways() -> None:
    of = given_problem()
    plan = replace(CPU, offload_activations="disk")
    kept = 4 * kept_bytes(plan, of)
    assert step(plan, of).moving == pytest.approx(kept * (1 / 2e9 + 1 / 4e9))
    on_gpu = replace(plan, device="cuda")
    assert step(on_gpu, of).moving == pytest.approx(kept * (1 / 2e9 + 1 / 4e9 + 2 / 20e9))


def test_activations_on_the_host_are_waited_for_where_computing_is_shorter() -> None:
    plan = replace(GPU, offload_activations="host")
    slow = given_problem(link_bytes_per_second=1e7)
    found, blocks = step(plan, slow), 4 * 2 * kept_bytes(plan, slow) / 1e7
    assert blocks - found.compute < found.moving < blocks
    quick = given_problem(link_bytes_per_second=1e15)
    assert step(plan, quick).moving < 1e-3 * found.compute


def test_a_block_that_recomputes_sends_its_input_alone() -> None:
    of = given_problem()
    plan = replace(CPU, offload_activations="disk", recompute="full")
    assert kept_bytes(plan, of) < 0.2 * kept_bytes(replace(plan, recompute="none"), of)
    kept = 4 * kept_bytes(plan, of)
    assert step(plan, of).moving == pytest.approx(kept * (1 / 2e9 + 1 / 4e9))


def test_memory_that_files_have_given_back_is_asked_for_again() -> None:
    of, slow = given_problem(), given_problem(fresh_bytes_per_second=3e9)

    def more(key: str) -> tuple[float, float]:
        plan = replace(CPU, **{key: "disk"})
        before, after = step(plan, of), step(plan, slow)
        return after.moving - before.moving, after.optimizer - before.optimizer

    table = build_memory_table(of.workload, CPU, SMALL, of.framework)
    logits = of.framework.logits_copies * table.logits_bytes + table.head_saved_bytes
    kept = kept_bytes(replace(CPU, offload_activations="disk"), of)
    gradients = 4 * parameters(of) / 3e9
    # After the update alone: what one micro-batch keeps, once a step.
    assert more("offload_optimizer") == pytest.approx(((kept + logits) / 3e9, gradients))
    # After every block: what it makes, what is brought back, and what that makes; the logits once.
    assert more("offload_activations") == pytest.approx((4 * (3 * kept + logits) / 3e9, gradients))
    # Likewise gathered weights, in 16 bits, forward and backward, and their gradients; activations stay.
    gathered = 5 * 2 * parameters(of)
    assert more("offload_parameters") == pytest.approx((4 * (kept + logits + gathered) / 3e9, gradients))


@pytest.mark.parametrize("repeats", [True, False])
def test_a_module_of_ones_own_sends_what_its_repeated_blocks_keep(repeats: bool) -> None:
    def made() -> nn.Module:
        halves = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4 if repeats else 1)]
        return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*halves), nn.Linear(64, 4))

    workload = trace_module_workload(made, [torch.zeros(1, 16)])
    assert any(layer.is_block for layer in workload.layers) == repeats
    of = replace(given_problem(), workload=workload, dimensions=None)
    plan = replace(CPU, offload_activations="disk")
    (rank,) = pipeline_rank_memory(workload, plan, "adamw")
    kept = 4 * rank.offloaded_activations if repeats else 0.0
    assert step(plan, of).moving == pytest.approx(kept * (1 / 2e9 + 1 / 4e9))


def test_files_that_memory_cannot_hold_are_as_slow_as_the_disk() -> None:
    plan = replace(CPU, offload_optimizer="disk")
    kept, lost = given_problem(), given_problem(keeps_files=False)
    more = step(plan, lost).optimizer - step(plan, kept).optimizer
    assert more == pytest.approx(8 * parameters(kept) * (2 / 1e9 - 1 / 4e9 - 1 / 2e9))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["none", "host", "disk"]),
    st.sampled_from(["none", "host", "disk"]),
    st.sampled_from(["none", "host", "disk"]),
    st.sampled_from(
        [
            GPU,
            replace(GPU, recompute="full", recompute_share=0.5),
            replace(GPU, dp_shard=4, shard="parameters", micro_batch=1),
            replace(GPU, dp_shard=2, dp_replicate=2, shard="gradients", micro_batch=2),
            replace(GPU, pp=2, micro_batch=2, stage_cuts=(2,)),
        ]
    ),
    st.floats(1e8, 1e12),
)
def test_nothing_is_faster_for_being_elsewhere_and_a_faster_link_never_hurts(
    weights: Any, state: Any, activations: Any, plan: Plan, rate: float
) -> None:
    of, faster = (given_problem(link_bytes_per_second=factor * rate) for factor in (1, 2))
    away = replace(plan, offload_parameters=weights, offload_optimizer=state, offload_activations=activations)
    found = step(away, of)
    kinds = [getattr(found, name) for name in ("compute", "tensor", "data", "moving", "bubble", "optimizer")]
    assert sum(kinds) + found.loading + found.checkpoint == pytest.approx(found.seconds)
    assert step(away, faster).seconds <= found.seconds * (1 + 1e-9)
    launches = OPTIMIZER_KERNELS * of.hardware.chip.launch_seconds
    on_host = weights != "none"  # whose processors start no kernels
    least = step(plan, of)
    assert found.seconds >= (least.seconds - least.checkpoint - launches * on_host) * (1 - 1e-9)
