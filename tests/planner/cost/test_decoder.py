"""Step time put together: what adds up, what helps, what hurts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner.step_times import decoder_step_time
from hypothesis import given, settings
from hypothesis import strategies as st

from support.machines import CHIP, machine
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN
from wanma.planner.cost.decoder_layers import CPU_LOSS_16_BITS, FrameworkTraits
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    deduplicated_dispatch_seconds,
    reduce_scatter_seconds,
)
from wanma.planner.hardware_model.model import FrameworkOverhead, HardwareModel, LinkLevel

MODEL = DecoderConfig(16, 4096, 32, 8, 14336, 32000)
MIXTURE = replace(MODEL, experts=16, experts_per_token=2, expert_feed_forward=2048)
PLAN = Plan(precision="bf16", device="cuda")
PARAMETERS = 16 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096) + 2 * 32000 * 4096

plans = st.builds(
    lambda pp, dp, tp, full: replace(
        PLAN,
        pp=pp,
        dp_shard=dp,
        tp=tp,
        sequence_parallel=tp > 1,
        shard="parameters" if dp > 1 else "none",
        recompute="full" if full else "none",
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.booleans(),
)


def forecast(plan: Plan = PLAN, **changes: object) -> StepTime:
    inputs: dict[str, object] = {
        "dimensions": MODEL,
        "sequence_length": 4096,
        "plan": plan,
        "global_batch": 32,
        "hardware": machine(32),
    }
    return decoder_step_time(**{**inputs, **changes})  # type: ignore[arg-type]


def added(found: StepTime) -> float:
    exposed = found.tensor + found.context + found.expert + found.data
    return found.compute + exposed + found.bubble + found.optimizer


@settings(max_examples=25, deadline=None)
@given(plans, st.booleans())
def test_kinds_add_up_to_the_step(plan: Plan, mixture: bool) -> None:
    found = forecast(plan, dimensions=MIXTURE if mixture else MODEL)
    assert added(found) == pytest.approx(found.seconds)


@settings(max_examples=25, deadline=None)
@given(plans, st.floats(1.0, 8.0), st.booleans())
def test_a_faster_link_never_slows_a_step(plan: Plan, factor: float, inner: bool) -> None:
    fast = machine(32, inner=100e9 * factor) if inner else machine(32, outer=10e9 * factor)
    assert forecast(plan, hardware=fast).seconds <= forecast(plan).seconds * (1 + 1e-9)


def test_one_device_computes_its_model_at_its_products_rate() -> None:
    found = forecast(framework=FrameworkTraits(fuses_pointwise=True))
    parameters = 16 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336) + 32000 * 4096
    flops = 6.0 * parameters * 4096 * 32
    share = flops / (found.seconds * 100e12)
    assert 0.5 < share < 0.8  # below what products attain, by attention and what streams
    assert found.tensor == found.data == found.bubble == 0.0


def test_full_recompute_costs_a_forward_of_the_blocks() -> None:
    plain, again = forecast(), forecast(replace(PLAN, recompute="full"))
    assert 1.25 < again.compute / plain.compute < 1.34
    half = forecast(replace(PLAN, recompute="full", recompute_share=0.5))
    assert half.compute == pytest.approx((plain.compute + again.compute) / 2)


def test_tensor_parallel_across_nodes_exchanges_at_the_rate_of_their_links() -> None:
    inside = forecast(replace(PLAN, tp=8, sequence_parallel=True))
    across = forecast(replace(PLAN, tp=16, sequence_parallel=True))
    slower = forecast(replace(PLAN, tp=16, sequence_parallel=True), hardware=machine(32, outer=1e9))
    # Eight links of 10 GB/s are a little slower than the 100 GB/s inside a node, and of 1 GB/s much.
    assert 1.2 < across.tensor / inside.tensor < 1.5
    assert slower.tensor > 5 * inside.tensor


def test_more_micro_batches_shrink_the_bubbles_share() -> None:
    pipeline = replace(PLAN, pp=4)
    few, many = forecast(pipeline, global_batch=8), forecast(pipeline, global_batch=64)
    assert few.bubble / few.seconds > 2 * many.bubble / many.seconds


def test_sharded_parameters_are_gathered_behind_compute() -> None:
    plan = replace(PLAN, dp_shard=8, shard="parameters", micro_batch=4)
    fast, slow = forecast(plan), forecast(plan, hardware=machine(32, inner=2e9))
    assert fast.data < 0.15 * fast.seconds
    assert slow.data > 0.5 * slow.seconds


def test_reduction_that_does_not_overlap_is_exposed_as_a_whole() -> None:
    plan = replace(PLAN, dp_replicate=8)
    hidden, exposed = (
        forecast(plan, framework=FrameworkTraits(data_overlap=overlap)) for overlap in (True, False)
    )
    assert exposed.data == pytest.approx(2 * 4 * PARAMETERS * 7 / 8 / 100e9, rel=0.01)
    assert hidden.data == pytest.approx(OVERLAP_SLOWDOWN * exposed.data)


def test_replicas_of_shards_reduce_their_part_between_nodes() -> None:
    plan = replace(PLAN, dp_replicate=2, dp_shard=8, shard="optimizer")
    found = forecast(plan, framework=FrameworkTraits(data_overlap=False))
    expected = (
        reduce_scatter_seconds(machine(32), RankGroup(8), 4 * PARAMETERS)
        + all_reduce_seconds(machine(32), RankGroup(2, 8), 4 * PARAMETERS / 8)
        + all_gather_seconds(machine(32), RankGroup(8), 2 * PARAMETERS)
    )
    assert found.data == pytest.approx(expected, rel=0.01)


def test_slow_links_are_hidden_as_far_as_one_micro_batch_reaches() -> None:
    plan = replace(PLAN, dp_shard=8, shard="optimizer")
    slow = machine(32, inner=0.5e9)
    hidden, exposed = (
        forecast(plan, hardware=slow, global_batch=8, framework=FrameworkTraits(data_overlap=overlap))
        for overlap in (True, False)
    )
    assert exposed.data - hidden.data == pytest.approx((1 - OVERLAP_SLOWDOWN) * hidden.compute)


def test_a_host_that_is_behind_sets_the_pace_unless_steps_are_replayed() -> None:
    small = replace(MODEL, hidden=256, heads=8, feed_forward=512, vocabulary=1000)
    slow_host = replace(machine(32), dispatch_seconds=1e-3)
    eager = forecast(dimensions=small, sequence_length=128, hardware=slow_host)
    replayed = forecast(
        dimensions=small, sequence_length=128, hardware=slow_host, framework=FrameworkTraits(cuda_graphs=True)
    )
    assert eager.compute > 10 * replayed.compute


def test_gradients_of_micro_batches_are_added_up_in_memory() -> None:
    # One micro-batch has nothing to add to: its gradients are cast to 32 bits only.
    one, two = (forecast(global_batch=batch).compute / batch for batch in (1, 2))
    streamed = 0.8e12
    assert two - one == pytest.approx(1 / 2 * 12 * PARAMETERS / streamed, rel=0.01)
    copies = FrameworkTraits(weight_storage="copies")
    kernel, product = (
        forecast(framework=replace(copies, fuses_gradient_accumulation=fused)).compute
        for fused in (False, True)
    )
    # 10 bytes in a kernel of its own; in the product half of the 6 beyond its own result.
    assert kernel - product == pytest.approx(31 * (10 - 3) * PARAMETERS / streamed, rel=0.01)


def test_master_weights_are_cast_in_every_forward_unless_sharded_ones_are_gathered() -> None:
    own, copies = (
        forecast(framework=FrameworkTraits(weight_storage=weights)) for weights in ("shards", "copies")
    )
    cast, added = 32 * 6 * PARAMETERS, (32 * 6 + 31 * 12 - 31 * 10) * PARAMETERS
    assert own.compute - copies.compute == pytest.approx((cast + added) / 0.8e12, rel=0.01)


def test_ranks_of_several_stages_that_wait_for_sends_wait_in_every_turn() -> None:
    plan = replace(PLAN, pp=4, schedule="interleaved_1f1b", virtual_stages=2)
    beside, waiting = (
        forecast(plan, framework=FrameworkTraits(blocking_sends=waits), hardware=machine(32, inner=1e9))
        for waits in (False, True)
    )
    send = 4096 * 4096 * 2 / 1e9
    # 32 micro-batches pass two stages of each rank, forward and backward; a few more fill the pipeline.
    assert waiting.bubble - beside.bubble > 0.9 * 2 * 2 * 32 * send
    assert waiting.compute == beside.compute
    assert added(waiting) == pytest.approx(waiting.seconds)


def test_frozen_matrices_save_a_third_of_the_products() -> None:
    trained, frozen = (
        forecast(
            framework=FrameworkTraits(
                fuses_pointwise=True, frozen_base_weights=frozen, weight_storage="copies"
            ),
            sequence_length=2048,
        )
        for frozen in (False, True)
    )
    assert 0.66 < frozen.compute / trained.compute < 0.78
    assert frozen.optimizer < 1e-3 < trained.optimizer
    replicas = replace(PLAN, dp_replicate=8)
    assert forecast(replicas, framework=FrameworkTraits(frozen_base_weights=True)).data == 0.0


@pytest.mark.parametrize("routes_once", [True, False])
def test_experts_exchange_tokens_there_and_back_in_both_passes(routes_once: bool) -> None:
    plan = replace(PLAN, dp_replicate=8, ep=8)
    found = forecast(plan, dimensions=MIXTURE, framework=FrameworkTraits(deduplicates_dispatch=routes_once))
    tokens_bytes = 4096 * 4096 * 2.0
    once = (
        deduplicated_dispatch_seconds(machine(32), RankGroup(8), tokens_bytes, experts_per_token=2)
        if routes_once
        else all_to_all_seconds(machine(32), RankGroup(8), 2 * tokens_bytes)
    )
    assert found.expert == pytest.approx(16 * 4 * 2 * 2 * once)  # layers, micro-batches


def test_experts_that_tensor_parallel_leaves_whole_go_over_its_ranks_too() -> None:
    """Four of 8 ranks with tp = 2 are data ranks; ep = 8 needs whole experts on each of the eight."""
    plan = replace(PLAN, dp_replicate=4, tp=2, ep=8, sequence_parallel=True)
    eight = HardwareModel(CHIP, (LinkLevel(8, 1e-6, 100e9),), start_seconds=0.0)
    with pytest.raises(ValueError, match="spans 15 ranks, and there are 8"):
        forecast(plan, dimensions=MIXTURE, hardware=eight)
    whole = forecast(
        plan, dimensions=MIXTURE, hardware=eight, framework=FrameworkTraits(splits_experts=False)
    )
    parts = forecast(replace(plan, ep=4), dimensions=MIXTURE, hardware=eight)
    tokens = 4096 / 2 * MIXTURE.experts_per_token
    once = all_to_all_seconds(eight, RankGroup(8), tokens * 4096 * 2)
    assert whole.expert == pytest.approx(16 * 8 * 2 * 2 * once)  # layers, micro-batches
    assert whole.compute == pytest.approx(parts.compute, rel=0.05)
    assert whole.optimizer == pytest.approx(parts.optimizer, rel=0.01)


def test_experts_far_apart_exchange_over_slow_links() -> None:
    near = forecast(replace(PLAN, dp_replicate=8, ep=8), dimensions=MIXTURE)
    far = forecast(replace(PLAN, dp_replicate=16, ep=16), dimensions=MIXTURE)
    assert far.expert > 2 * near.expert


def test_an_exchange_beside_compute_costs_only_what_it_takes_from_it() -> None:
    plan = replace(PLAN, dp_replicate=8, ep=8)
    waits, hidden = (
        forecast(plan, dimensions=MIXTURE, framework=FrameworkTraits(expert_overlap=overlap))
        for overlap in (False, True)
    )
    assert hidden.expert == pytest.approx(OVERLAP_SLOWDOWN * waits.expert)


def test_recompute_exchanges_activations_again() -> None:
    plain, again = (forecast(replace(PLAN, tp=4, recompute=recompute)) for recompute in ("none", "full"))
    assert again.tensor / plain.tensor == pytest.approx(1.5, abs=0.05)


def test_a_split_sequence_streams_each_token_on_one_rank() -> None:
    whole, split = (forecast(replace(PLAN, tp=4, sequence_parallel=sequence)) for sequence in (False, True))
    saved = 4096 * 4096 * 3 / 4 * 16 * 32 * 2 * (14 + 24 + 6 + 4) / 0.8e12
    assert whole.compute - split.compute == pytest.approx(saved, rel=0.01)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="64 ranks on 32 devices"):
        forecast(replace(PLAN, dp_replicate=64))


def test_a_ring_of_keys_hides_behind_attention_and_an_exchange_of_heads_does_not() -> None:
    ring = replace(PLAN, cp=4, cp_method="ring")
    assert forecast(ring, sequence_length=32768).context == 0.0
    found = forecast(ring, sequence_length=32768, hardware=machine(32, inner=1e6))
    step = 32768 / 4 * 8 * 128 * 2 * 2 / 1e6  # keys and values of 8 heads
    assert found.context == pytest.approx(3 * 16 * 32 * 3 * step, rel=0.01)
    assert forecast(replace(ring, cp_method="all_to_all"), sequence_length=32768).context > 0.0


def test_ranks_that_wait_leave_their_cores_to_the_others() -> None:
    """Four stages on half as many cores: as fast as the work of all of them on these, not as the schedule
    with as many cores as ranks."""
    plan = replace(PLAN, pp=4, micro_batch=1)
    alone, shared = (forecast(plan, hardware=replace(machine(32), shared=shared)) for shared in (1.0, 2.0))
    assert alone.bubble > 0.05 * alone.seconds
    assert shared.bubble == pytest.approx(0.0, abs=1e-9)
    assert shared.seconds < alone.seconds
    assert added(shared) == pytest.approx(shared.seconds)
    # Of one micro-batch, stages follow each other: each has a core to itself.
    one = {"plan": plan, "global_batch": 1}
    alone, shared = (forecast(**one, hardware=replace(machine(32), shared=shared)) for shared in (1.0, 2.0))
    outside = alone.data + alone.optimizer
    assert shared.seconds - outside == pytest.approx((alone.seconds - outside) / 2)


def test_sharded_gradients_are_reduced_in_every_micro_batch() -> None:
    """ZeRO-2 (Rajbhandari et al. 2020): its parts of the sum are added up, not whole gradients."""
    on_cpu = replace(PLAN, dp_shard=4, device="cpu")
    machine_of_four = machine(8)
    group, reduced = RankGroup(4), PARAMETERS * 4.0

    def exchanged(shard: Shard, micro_batch: int) -> float:
        plan = replace(on_cpu, shard=shard, micro_batch=micro_batch)
        return forecast(plan, hardware=machine_of_four).data

    once = reduce_scatter_seconds(machine_of_four, group, reduced)
    more = exchanged("gradients", 2) - exchanged("gradients", 8)
    # Three micro-batches more; each block pays its own latency, and copies its gradients to be reduced.
    assert 3 * once < more < 3 * once * 1.3
    assert exchanged("optimizer", 2) == pytest.approx(exchanged("optimizer", 8))


def test_on_a_cpu_exponentials_take_longer_than_their_bytes() -> None:
    """A loss over a large vocabulary: of the same logits, more than on a GPU of the same rates."""
    narrow, wide = replace(MODEL, vocabulary=1000), replace(MODEL, vocabulary=100_000)

    def of_loss(device: str) -> float:
        plan = replace(PLAN, device=device)
        both = [forecast(plan, dimensions=one).compute for one in (narrow, wide)]
        return both[1] - both[0]

    tokens, logits = 32 * 4096, 99_000
    more = (
        (CPU_LOSS_16_BITS[0] + CPU_LOSS_16_BITS[1] - FrameworkTraits().loss_bytes) * tokens * logits / 0.8e12
    )
    assert of_loss("cpu") - of_loss("cuda") == pytest.approx(more, rel=0.01)


def test_a_cpus_program_is_counted_for_each_kernel_block_and_micro_batch() -> None:
    """Beside what kernels and collectives take, and only where a plan has it."""
    plain = replace(PLAN, device="cpu")
    one = machine(8)

    def more(plan: Plan, program: FrameworkOverhead, batch: int = 8) -> float:
        seconds = [
            decoder_step_time(MODEL, 4096, plan, batch, replace(one, program=of)).seconds
            for of in (FrameworkOverhead(), program)
        ]
        return seconds[1] - seconds[0]

    of_kernels = more(plain, FrameworkOverhead(kernel_seconds=1e-3))
    assert of_kernels == pytest.approx(8 * more(plain, FrameworkOverhead(kernel_seconds=1e-3), batch=1))
    assert of_kernels > 8 * MODEL.layers * 50 * 1e-3  # there are more in a block, forward and backward
    again = more(replace(plain, recompute="full"), FrameworkOverhead(kernel_seconds=1e-3))
    assert 1.2 * of_kernels < again < 1.5 * of_kernels

    split = replace(plain, tp=2, sequence_parallel=True)
    tensor = FrameworkOverhead(tensor_seconds=1e-3)
    assert more(plain, tensor) == 0.0
    assert more(split, tensor) == pytest.approx(8 * MODEL.layers * 1e-3)
    assert more(replace(split, recompute="full"), tensor) == pytest.approx(8 * MODEL.layers * 4 / 3 * 1e-3)

    for shard, seconds in (("optimizer", 0.0), ("gradients", 1e-3), ("parameters", 5e-3)):
        sharded = replace(plain, dp_shard=2, shard=shard)
        took = more(sharded, FrameworkOverhead(gradients_seconds=1e-3, parameters_seconds=5e-3))
        assert took == pytest.approx(4 * MODEL.layers * seconds), shard
