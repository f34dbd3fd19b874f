"""Parameters, gradients and optimizer state of a rank, against published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.model_states import MemoryInputs, ModelStates, model_states_of
from wanma.planner.memory.rank_parameters import RankParameters

PSI = 1_000_000.0
MEGATRON = FrameworkTraits(weight_storage="copies")
GLOO = FrameworkTraits(shared_memory_nodes=0)


def state(plan: Plan, software: FrameworkTraits | None = None, micro_batches: int = 1) -> ModelStates:
    return model_states_of(
        RankParameters(
            dense_blocks=PSI, experts=0.0, end_layers=0.0, largest_block=PSI / 10, distinct_matrices=PSI / 10
        ),
        plan,
        MemoryInputs("adamw", micro_batches, False, software or FrameworkTraits()),
    )


@given(n=st.sampled_from([1, 2, 8, 64]))
def test_whole_copies_take_what_zero_says_of_its_first_stage(n: int) -> None:
    # Rajbhandari et al. 2020, section 3.1 and 5.1: 2Ψ + 2Ψ + KΨ / N with K = 12, gradients in 16 bits.
    found = state(
        Plan(dp_shard=n, shard="optimizer"), FrameworkTraits(weight_storage="copies", accumulation_bytes=2)
    )
    assert found.parameters + found.accumulated_gradients + found.optimizer == pytest.approx(
        PSI * (2 + 2 + 12 / n)
    )


def test_without_sharding_megatron_holds_18_bytes_per_parameter() -> None:
    found = state(Plan(), MEGATRON)
    assert found.parameters + found.accumulated_gradients + found.optimizer == PSI * 18


def test_empty_gradients_are_one_of_every_shape() -> None:
    more = state(Plan(), FrameworkTraits(weight_storage="copies", dummy_weight_gradients=True))
    assert more.accumulated_gradients - state(Plan(), MEGATRON).accumulated_gradients == 2 * PSI / 10


@given(n=st.sampled_from([2, 8, 64]), micro_batches=st.sampled_from([1, 4]))
def test_shards_take_what_zero_says_of_its_third_stage_beside_the_blocks_that_are_gathered(
    n: int, micro_batches: int
) -> None:
    # Weights, gradients and moments in fp32: 16Ψ / N (section 5.3, for K = 12 and fp32 gradients).
    plan = Plan(dp_shard=n, shard="parameters", precision="bf16", device="cuda")
    found = state(plan, micro_batches=micro_batches)
    assert found.parameters - found.gathered_parameters == 4 * PSI / n
    assert found.gathered_parameters == 2 * 2 * PSI / 10  # one block computes, the next one comes
    assert found.optimizer == 8 * PSI / n
    # The sum for a unit's shard is made beside those of earlier micro-batches.
    beside = 4 * PSI / 10 / n if micro_batches > 1 else 0
    assert found.all_gradients == pytest.approx(4 * PSI / n + 6 * PSI / 10 + beside)
    assert found.accumulated_gradients == (4 * PSI / n if micro_batches > 1 else 0)


@pytest.mark.parametrize(
    ("shard", "accumulated"), [("none", 4 * PSI), ("optimizer", 4 * PSI), ("gradients", 4 * PSI / 4)]
)
def test_gradients_wait_whole_or_sharded_between_micro_batches(shard: Shard, accumulated: float) -> None:
    replicas = 4 if shard == "none" else 1
    plan = Plan(dp_replicate=replicas, dp_shard=4 // replicas, shard=shard, precision="bf16")
    assert state(plan, micro_batches=2).accumulated_gradients == accumulated
    assert state(plan, micro_batches=1).accumulated_gradients == 0


def test_what_rounding_to_8_bits_lost_is_kept_for_every_gradient() -> None:
    plan = Plan(dp_shard=4, shard="parameters", precision="bf16", device="cuda")
    exact, rounded = state(plan), state(replace(plan, compression="int8"))
    assert rounded.optimizer - exact.optimizer == pytest.approx(4 * PSI)
    assert state(replace(plan, compression="bf16")).optimizer == exact.optimizer


def test_parts_of_a_sum_over_gloo_come_from_all_others_at_once() -> None:
    plan = Plan(dp_shard=4, shard="parameters")
    assert state(plan, GLOO).receive_buffers == pytest.approx(4 * PSI / 10 * 3 / 4)
    assert state(plan).receive_buffers == 0  # they are read where they are
    assert state(Plan(dp_shard=4, shard="parameters", device="cuda"), GLOO).receive_buffers == 0


def test_units_are_exchanged_in_memory_that_ranks_share_and_that_stays() -> None:
    def of(ends: float, share: float = 1.0, **more: Any) -> ModelStates:
        parameters = RankParameters(
            dense_blocks=PSI, experts=0.0, end_layers=ends, largest_block=PSI / 10, trainable_share=share
        )
        plan = Plan(dp_shard=2, **more)
        return model_states_of(parameters, plan, MemoryInputs("adamw", 1, False, FrameworkTraits()))

    # Nothing is gathered; gradients of the largest unit are reduced.
    found = of(2 * PSI, shard="parameters")
    assert (found.buffers, found.gathered_parameters) == (4 * 2 * PSI, 0)
    assert found.parameters == 4 * 3 * PSI / 2
    # In 16 bits there is one copy of the weights beside the shards.
    assert of(2 * PSI, shard="gradients", precision="bf16").buffers == 4 * 2 * PSI + 2 * 3 * PSI / 2
    # All parameters are one unit.
    assert of(2 * PSI, shard="optimizer").buffers == 4 * 3 * PSI
    assert of(2 * PSI, shard="parameters", device="cuda").buffers == 0
    # What is not trained is not reduced.
    assert of(2 * PSI, shard="parameters", share=0.01).buffers == pytest.approx(4 * 2 * PSI * 0.01)
    # Offloaded parameters are gathered, ends and the first block before the ends' place is free again.
    away = {"shard": "parameters", "offload_parameters": "disk"}
    assert of(2 * PSI, **away).buffers == 4 * (2 * PSI + PSI / 10)
    assert of(2 * PSI, share=0.01, **away).buffers == 4 * (2 * PSI + PSI / 10)
    # A small embedding leaves no room for the second block.
    assert of(PSI / 100, **away).buffers == pytest.approx(4 * (PSI / 100 + 2 * PSI / 10))
    # Experts of which no other rank has a part are not exchanged, and computed with in a copy.
    experts = RankParameters(
        dense_blocks=PSI,
        experts=PSI,
        end_layers=2 * PSI,
        largest_block=PSI / 5,
        largest_block_experts=PSI / 10,
    )
    plan = Plan(dp_shard=2, ep=2, shard="parameters")
    found = model_states_of(experts, plan, MemoryInputs("adamw", 1, False, FrameworkTraits()))
    assert (found.buffers, found.gathered_parameters) == (4 * 2 * PSI, 4 * PSI / 10)


def test_ranks_of_several_machines_share_memory_within_each() -> None:
    plan = Plan(dp_replicate=2, dp_shard=2, shard="parameters")
    assert state(plan, FrameworkTraits(shared_memory_nodes=2)).buffers == state(plan).buffers > 0
    across = Plan(dp_shard=4, shard="parameters")
    assert state(across, FrameworkTraits(shared_memory_nodes=2)).buffers == 0
    assert (
        state(across, FrameworkTraits(shared_memory_nodes=2)).receive_buffers
        == state(across, GLOO).receive_buffers
    )


def test_replicas_sum_small_gradients_in_memory_that_they_share() -> None:
    # Three quarters are tensors larger than a bucket; one quarter nobody knows.
    tensors = ((100.0, 7.0), (PSI / 8, 6.0))
    parameters = RankParameters(
        dense_blocks=PSI, experts=0.0, end_layers=0.0, largest_block=PSI / 10, tensors=tensors
    )

    def of(software: FrameworkTraits, **more: Any) -> ModelStates:
        plan = Plan(dp_replicate=2, bucket_bytes=1000, **more)
        return model_states_of(parameters, plan, MemoryInputs("adamw", 1, False, software))

    shared, gloo = of(FrameworkTraits()), of(GLOO)
    assert shared.buffers == 4 * PSI / 4
    assert shared.all_gradients == 4 * PSI * 3 / 4
    assert gloo.buffers == 0
    assert gloo.all_gradients == 4 * PSI + 1000  # one bucket is copied at a time
    assert of(FrameworkTraits(), compression="int8").buffers == 0


def test_experts_are_shared_by_the_ranks_that_have_the_same() -> None:
    half = {"trainable_share": 0.5, "trainable_block_share": 0.5}
    parameters = RankParameters(dense_blocks=0.0, experts=PSI, end_layers=0.0, largest_block=PSI, **half)
    plan = Plan(dp_shard=8, ep=4, shard="optimizer")
    found = model_states_of(parameters, plan, MemoryInputs("sgd", 1, True, FrameworkTraits()))
    # 8 / 4 ranks share them; momentum and an average of half of them.
    assert found.optimizer == 2 * 4 * PSI / 2 * 0.5
