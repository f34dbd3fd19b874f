"""Activations that a block keeps, against published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.models.workload.sublayer_cost import attention_cost, feed_forward_cost
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.activations import decoder_block_bytes, saved_tensors
from wanma.planner.memory.peak import pipeline_rank_memory

MEGATRON = FrameworkTraits(
    architecture="gpt", attention="scores", selective_recompute="attention", regathers_sequence=True
)
"""As Korthikanti et al. 2022 count."""
HIDDEN, HEADS, SEQUENCE = 1024, 16, 512
GPT = DecoderConfig(24, HIDDEN, HEADS, HEADS, 4 * HIDDEN, 51200, activation_function="gelu")


def block(plan: Plan, dimensions: DecoderConfig = GPT, software: FrameworkTraits = MEGATRON) -> float:
    """Bytes kept per sample, token and hidden element."""
    plan = replace(plan, precision="fp16")
    parts = decoder_block_bytes(dimensions, SEQUENCE, plan, software, experts=dimensions.experts > 0)
    kept = parts.saved
    if plan.recompute != "none":
        kept = parts.inputs + (parts.selective_saved if plan.recompute == "selective" else 0)
    return kept / (plan.micro_batch * SEQUENCE * dimensions.hidden)


SCORES = 5 * HEADS * SEQUENCE / HIDDEN


@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_block_of_gpt_keeps_what_korthikanti_2022_say(t: int) -> None:
    whole, parts = Plan(tp=t, micro_batch=3), Plan(tp=t, sequence_parallel=True, micro_batch=3)
    assert block(Plan()) == 34 + SCORES  # equation 1
    assert block(whole) == pytest.approx(10 + 24 / t + SCORES / t)  # equation 2
    assert block(parts) == pytest.approx((34 + SCORES) / t)  # equation 4
    assert block(replace(parts, recompute="selective")) == pytest.approx(34 / t)  # table 2
    assert block(replace(whole, recompute="full")) == 2  # section 5: the block's input


@pytest.mark.parametrize(("p", "v"), [(4, 1), (4, 2), (8, 3)])
def test_an_interleaved_pipelines_first_rank_keeps_more_by_korthikantis_factor(p: int, v: int) -> None:
    dimensions = replace(GPT, layers=48)
    schedule = "1f1b" if v == 1 else "interleaved_1f1b"
    plan = Plan(pp=p, virtual_stages=v, schedule=schedule, micro_batch=2, precision="fp16")
    ranks = pipeline_rank_memory(
        compute_decoder_workload(dimensions, SEQUENCE),
        plan,
        "adamw",
        micro_batches=4 * p,
        dimensions=dimensions,
        framework=MEGATRON,
    )
    of_model = 48 * 2 * SEQUENCE * HIDDEN * (34 + SCORES)
    factor = 1 + (p - 1) / (p * v) if v > 1 else 1  # section 4.2.3
    assert ranks[0].saved_activations == pytest.approx(of_model * factor)


def test_a_gpipe_rank_keeps_every_micro_batch() -> None:
    plan = Plan(pp=4, schedule="gpipe", precision="fp16")
    ranks = pipeline_rank_memory(
        compute_decoder_workload(GPT, SEQUENCE),
        plan,
        "adamw",
        micro_batches=10,
        dimensions=GPT,
        framework=MEGATRON,
    )
    of_stage = 6 * SEQUENCE * HIDDEN * (34 + SCORES)
    assert [rank.saved_activations for rank in ranks] == [
        pytest.approx(10 * of_stage)
    ] * 4  # Huang et al. 2019


OURS = {
    "plain": DecoderConfig(3, 64, 4, 2, 192, 320),
    "gelu": DecoderConfig(3, 64, 4, 2, 256, 320, activation_function="gelu"),
    "qwen 3": DecoderConfig(2, 64, 4, 2, 192, 320, explicit_head_dim=32, qk_norm=True),
    "experts": DecoderConfig(
        3, 64, 4, 4, 192, 320, experts=8, experts_per_token=3, shared_experts=2, expert_feed_forward=96
    ),
    "latent": DecoderConfig(
        3,
        64,
        4,
        4,
        192,
        320,
        explicit_head_dim=16,
        query_rank=24,
        key_value_rank=16,
        explicit_rope_head_dim=8,
        explicit_value_head_dim=16,
    ),
}


@pytest.mark.parametrize("dimensions", OURS.values(), ids=OURS)
def test_tensor_by_tensor_a_block_keeps_the_elements_that_autograd_was_seen_to_keep(
    dimensions: DecoderConfig,
) -> None:
    # `models.block_workload` is held against real forwards by the tests of models.
    experts = dimensions.experts > 0
    tensors = saved_tensors(dimensions, 128, Plan(), FrameworkTraits(), experts=experts)
    halves = attention_cost(dimensions), feed_forward_cost(dimensions, has_experts=experts)
    kept = sum(tensor.elements for tensor in tensors if "none" in tensor.recompute_policies)
    assert kept == sum(half.saved_elements for half in halves)
    layer = compute_decoder_workload(dimensions, 128).layers[1]
    costly = sum(tensor.elements for tensor in tensors if "selective" in tensor.recompute_policies)
    assert 128 * (costly - dimensions.hidden) == layer.selective_recompute_elements_per_sample


def test_a_compiled_block_keeps_one_of_its_widest_tensors_less() -> None:
    dimensions = OURS["plain"]
    plain, fused = (
        block(Plan(), dimensions, FrameworkTraits(fuses_pointwise=fused)) for fused in (False, True)
    )
    assert plain - fused == 2 * 192 / 64


def test_an_all_to_all_keeps_what_it_gives_back_and_repeats_keys_that_its_ranks_cannot_share() -> None:
    dimensions = OURS["plain"]
    ring, exchanged = Plan(cp=2), Plan(cp=2, cp_method="all_to_all")
    more = block(exchanged, dimensions, FrameworkTraits()) - block(ring, dimensions, FrameworkTraits())
    assert more == pytest.approx(2 / 2)  # attended: as wide as hidden, in 2 bytes, of half the tokens
    wide = [
        block(replace(plan, cp=4), dimensions, FrameworkTraits()) for plan in (exchanged, ring)
    ]  # 2 key and value heads for 4 ranks: twice as many
    assert wide[0] - wide[1] == pytest.approx((2 + 2 * 2 * 32 / 64) / 4)


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    sequence=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    model=st.sampled_from(list(OURS)),
)
def test_more_ranks_and_more_recompute_never_keep_more(
    tp: int, cp: int, sequence: bool, recompute: Recompute, model: str
) -> None:
    plan = Plan(tp=tp, cp=cp, sequence_parallel=sequence, recompute=recompute)
    here = block(plan, OURS[model], FrameworkTraits())
    assert block(replace(plan, tp=2 * tp), OURS[model], FrameworkTraits()) <= here + 1e-9
    assert block(replace(plan, cp=2 * cp), OURS[model], FrameworkTraits()) <= here
    more: dict[Recompute, Recompute] = {"none": "selective", "selective": "full", "full": "full"}
    assert block(replace(plan, recompute=more[recompute]), OURS[model], FrameworkTraits()) <= here
