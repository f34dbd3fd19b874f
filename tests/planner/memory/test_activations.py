"""Activations that a block keeps, against published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.models.config.dimensions import DecoderDimensions
from wanma.models.workload.model_workload import decoder_workload
from wanma.models.workload.sublayer_cost import attention_half, feed_forward_half
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.memory.activations import decoder_block, kept_tensors
from wanma.planner.memory.peak import memory_of_ranks

MEGATRON = Software(architecture="gpt", attention="scores", selective="attention", regathers=True)
"""As Korthikanti et al. 2022 count."""
HIDDEN, HEADS, SEQUENCE = 1024, 16, 512
GPT = DecoderDimensions(24, HIDDEN, HEADS, HEADS, 4 * HIDDEN, 51200, activation_function="gelu")


def block(plan: Plan, dimensions: DecoderDimensions = GPT, software: Software = MEGATRON) -> float:
    """Bytes kept per sample, token and hidden element."""
    plan = replace(plan, precision="fp16")
    parts = decoder_block(dimensions, SEQUENCE, plan, software, experts=dimensions.experts > 0)
    kept = parts.kept
    if plan.recompute != "none":
        kept = parts.inputs + (parts.costly if plan.recompute == "selective" else 0)
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
    ranks = memory_of_ranks(
        decoder_workload(dimensions, SEQUENCE),
        plan,
        "adamw",
        micro_batches=4 * p,
        dimensions=dimensions,
        software=MEGATRON,
    )
    of_model = 48 * 2 * SEQUENCE * HIDDEN * (34 + SCORES)
    factor = 1 + (p - 1) / (p * v) if v > 1 else 1  # section 4.2.3
    assert ranks[0].kept == pytest.approx(of_model * factor)


def test_a_gpipe_rank_keeps_every_micro_batch() -> None:
    plan = Plan(pp=4, schedule="gpipe", precision="fp16")
    ranks = memory_of_ranks(
        decoder_workload(GPT, SEQUENCE), plan, "adamw", micro_batches=10, dimensions=GPT, software=MEGATRON
    )
    of_stage = 6 * SEQUENCE * HIDDEN * (34 + SCORES)
    assert [rank.kept for rank in ranks] == [pytest.approx(10 * of_stage)] * 4  # Huang et al. 2019


OURS = {
    "plain": DecoderDimensions(3, 64, 4, 2, 192, 320),
    "gelu": DecoderDimensions(3, 64, 4, 2, 256, 320, activation_function="gelu"),
    "qwen 3": DecoderDimensions(2, 64, 4, 2, 192, 320, head_size=32, head_norm=True),
    "experts": DecoderDimensions(
        3, 64, 4, 4, 192, 320, experts=8, experts_per_token=3, shared_experts=2, expert_feed_forward=96
    ),
    "latent": DecoderDimensions(
        3, 64, 4, 4, 192, 320, head_size=16, query_rank=24, key_value_rank=16, rotary_size=8, value_size=16
    ),
}


@pytest.mark.parametrize("dimensions", OURS.values(), ids=OURS)
def test_tensor_by_tensor_a_block_keeps_the_elements_that_autograd_was_seen_to_keep(
    dimensions: DecoderDimensions,
) -> None:
    # `models.block_workload` is held against real forwards by the tests of models.
    experts = dimensions.experts > 0
    tensors = kept_tensors(dimensions, 128, Plan(), Software(), experts=experts)
    halves = attention_half(dimensions), feed_forward_half(dimensions, experts=experts)
    kept = sum(tensor.elements for tensor in tensors if "none" in tensor.recompute)
    assert kept == sum(half.kept for half in halves)
    layer = decoder_workload(dimensions, 128).layers[1]
    costly = sum(tensor.elements for tensor in tensors if "selective" in tensor.recompute)
    assert 128 * (costly - dimensions.hidden) == layer.costly_elements_per_sample


def test_a_compiled_block_keeps_one_of_its_widest_tensors_less() -> None:
    dimensions = OURS["plain"]
    plain, fused = (block(Plan(), dimensions, Software(fused=fused)) for fused in (False, True))
    assert plain - fused == 2 * 192 / 64


def test_an_all_to_all_keeps_what_it_gives_back_and_repeats_keys_that_its_ranks_cannot_share() -> None:
    dimensions = OURS["plain"]
    ring, exchanged = Plan(cp=2), Plan(cp=2, cp_method="all_to_all")
    more = block(exchanged, dimensions, Software()) - block(ring, dimensions, Software())
    assert more == pytest.approx(2 / 2)  # attended: as wide as hidden, in 2 bytes, of half the tokens
    wide = [
        block(replace(plan, cp=4), dimensions, Software()) for plan in (exchanged, ring)
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
    here = block(plan, OURS[model], Software())
    assert block(replace(plan, tp=2 * tp), OURS[model], Software()) <= here + 1e-9
    assert block(replace(plan, cp=2 * cp), OURS[model], Software()) <= here
    more: dict[Recompute, Recompute] = {"none": "selective", "selective": "full", "full": "full"}
    assert block(replace(plan, recompute=more[recompute]), OURS[model], Software()) <= here
