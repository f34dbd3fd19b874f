"""Mixtures of experts beside the published code of Mixtral and DeepSeek-V3; what their routing promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wanma.job.errors import WanmaError
from wanma.models.architectures.decoder import Decoder, decoder_parallel_spec
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.keyed_random.dropout import bind_samples, recompute_context_fn
from wanma.models.layers.experts import (
    GroupedFeedForward,
    MixtureOfExperts,
    inverse_permutation,
    permute_tokens,
    unpermute_tokens,
    weighted_swiglu,
)
from wanma.models.layers.router import TopKRouter, set_auxiliary_loss_scale
from wanma.models.model_spec import ModelSpec, build_model

MIXTRAL = DecoderConfig(
    2, 32, 4, 2, 48, 64, rope_theta=1e6, experts=4, experts_per_token=2, norm_epsilon=1e-5
)
DEEPSEEK = DecoderConfig(
    3,
    32,
    4,
    4,
    48,
    64,
    norm_epsilon=1e-6,
    query_rank=24,
    key_value_rank=16,
    explicit_head_dim=8,
    explicit_rope_head_dim=4,
    explicit_value_head_dim=6,
    experts=8,
    experts_per_token=3,
    shared_experts=2,
    expert_feed_forward=12,
    dense_layers=1,
    router="sigmoid",
    routing_scale=2.5,
    expert_groups=4,
    expert_groups_per_token=2,
    balance="bias",
    balance_rate=0.1,
)


def decoder(dimensions: DecoderConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    spec = ModelSpec("mine", "tokens", lambda: Decoder(dimensions), decoder_parallel_spec(dimensions), False)
    model = build_model(spec, 3, dtype)
    assert isinstance(model, Decoder)
    return model


def mixture(dimensions: DecoderConfig, dtype: torch.dtype = torch.float64) -> MixtureOfExperts:
    """One layer whose router tells tokens apart."""
    layer = MixtureOfExperts(dimensions).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer


def tokens(rows: int, sequence: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, sequence, 32, generator=torch.Generator().manual_seed(7), dtype=dtype)


# ------------------------------------------------------------------ published models


def test_mixtral_gives_the_logits_of_its_published_code() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
        attn_implementation="eager",
    )
    theirs, ours = transformers.MixtralForCausalLM(config).eval(), decoder(MIXTRAL, torch.float32).eval()
    _spread_routers(ours)
    _copy(ours, theirs, {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"})
    _same_logits(ours, theirs)


def test_deepseek_v3_gives_the_logits_of_its_published_code() -> None:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 6):
        pytest.skip("transformers before 5.6 chooses experts of other groups, too")
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        attn_implementation="eager",
    )
    theirs, ours = transformers.DeepseekV3ForCausalLM(config).eval(), decoder(DEEPSEEK, torch.float32).eval()
    _spread_routers(ours)
    _copy(
        ours,
        theirs,
        {
            "query_latent": "q_a_proj",
            "query_latent_norm": "q_a_layernorm",
            "query": "q_b_proj",
            "key_value_latent": "kv_a_proj_with_mqa",
            "key_value_latent_norm": "kv_a_layernorm",
            "key_value": "kv_b_proj",
            "output": "o_proj",
        },
    )
    _same_logits(ours, theirs)


def _spread_routers(model: Decoder) -> None:
    """Scores and biases that differ enough for every rule of the choice to matter."""
    generator = torch.Generator().manual_seed(11)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.weight", "routing.bias")):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def _copy(ours: Decoder, theirs: Any, attention: dict[str, str]) -> None:
    """Our weights under the published names; plain attention's heads as halves, which turn other pairs."""
    width = ours.config.head_dim
    with torch.no_grad():
        theirs.model.embed_tokens.weight.copy_(ours.embedding.weight)
        theirs.model.norm.weight.copy_(ours.norm.weight)
        theirs.lm_head.weight.copy_(ours.head.weight)
        for number, their_block in enumerate(theirs.model.layers):
            block = ours.layers[str(number)]
            their_block.input_layernorm.weight.copy_(block.attention_norm.weight)
            their_block.post_attention_layernorm.weight.copy_(block.feed_forward_norm.weight)
            for name, their_name in attention.items():
                weight = block.attention.get_submodule(name).weight
                if their_name in ("q_proj", "k_proj"):
                    weight = weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)
                their_block.self_attn.get_submodule(their_name).weight.copy_(weight)
            mine, mlp = block.feed_forward, their_block.mlp
            if not isinstance(mine, MixtureOfExperts):
                _copy_network(mine, mlp)
                continue
            mlp.gate.weight.copy_(mine.router.weight)
            mlp.experts.gate_up_proj.copy_(torch.cat([mine.experts.gate, mine.experts.up], dim=1))
            mlp.experts.down_proj.copy_(mine.experts.down)
            if mine.shared is not None:
                _copy_network(mine.shared, mlp.shared_experts)
                mlp.gate.e_score_correction_bias.copy_(mine.routing.bias)


def _copy_network(ours: Any, theirs: Any) -> None:
    for name in ("gate", "up", "down"):
        theirs.get_submodule(f"{name}_proj").weight.copy_(ours.get_submodule(name).weight)


def _same_logits(ours: Decoder, theirs: Any) -> None:
    given = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = theirs(given).logits, ours(given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


# ------------------------------------------------------------------ the mathematics of a layer


@pytest.mark.parametrize("dimensions", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_a_layer_is_the_weighted_sum_of_its_experts(dimensions: DecoderConfig) -> None:
    layer, x = mixture(dimensions), tokens(2, 5).requires_grad_()
    weights, chosen = layer.routing(layer.router(x))
    plain = torch.zeros_like(x)
    experts = layer.experts
    for expert in range(dimensions.experts):
        inner = F.silu(x @ experts.gate[expert].T) * (x @ experts.up[expert].T)
        weight = torch.where(chosen == expert, weights, 0.0).sum(-1, keepdim=True)
        plain = plain + weight * (inner @ experts.down[expert].T)
    if layer.shared is not None:
        plain = plain + layer.shared(x)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(plain.square().sum(), leaves)
    got = torch.autograd.grad(layer(x).square().sum(), leaves)
    torch.testing.assert_close(layer(x), plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_token_does_not_notice_which_others_share_its_micro_batch() -> None:
    layer, x = mixture(DEEPSEEK), tokens(4, 6)
    together = layer(x)
    for row in range(4):
        torch.testing.assert_close(layer(x[row : row + 1]), together[row : row + 1], rtol=1e-13, atol=1e-13)


def test_router_scores_are_in_full_precision_in_bf16_too() -> None:
    layer = mixture(MIXTRAL, torch.bfloat16)
    x = tokens(2, 5, torch.bfloat16).requires_grad_()
    logits = layer.router(x)
    assert logits.dtype == torch.float32
    exact = x.detach().float() @ layer.router.weight.float().T
    torch.testing.assert_close(logits.detach(), exact, rtol=1e-6, atol=1e-6)
    logits.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert layer(x).dtype == torch.bfloat16


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3, unique=True), min_size=1, max_size=9))
@settings(deadline=None)
def test_rows_come_back_to_their_tokens_in_the_order_of_their_choices(choices: list[list[int]]) -> None:
    """Expert 4 stands for none: those rows are dropped."""
    chosen = torch.tensor(choices).unsqueeze(0)
    x = torch.randn(1, len(choices), 2, dtype=torch.float64, requires_grad=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)[: int((flat < 4).sum())]
    places = inverse_permutation(order, flat.numel()).view_as(chosen)
    rows = permute_tokens(x, order, places)
    assert flat[order].tolist() == sorted(number for number in flat.tolist() if number < 4)
    scaled = rows * (1.0 + flat[order].unsqueeze(1))
    result = unpermute_tokens(scaled, order, places)
    factor = torch.where(chosen < 4, 1.0 + chosen, 0.0).sum(-1, keepdim=True)
    torch.testing.assert_close(result, x * factor)
    result.sum().backward()
    torch.testing.assert_close(x.grad, factor.expand_as(x).to(torch.float64))


def test_the_weighted_swiglu_has_the_gradient_of_its_formula() -> None:
    inputs = tuple(torch.randn(4, width, dtype=torch.float64, requires_grad=True) for width in (3, 3, 1))
    assert torch.autograd.gradcheck(weighted_swiglu, inputs)
    gate, up, weights = inputs
    torch.testing.assert_close(weighted_swiglu(gate, up, weights), F.silu(gate) * up * weights)


@pytest.mark.gpu
def test_a_gpus_grouped_products_are_those_of_each_expert() -> None:
    generator = torch.Generator().manual_seed(2)
    counts = torch.tensor([5, 0, 11, 3])
    sizes: list[tuple[int, ...]] = [(19, 64), (19, 1), (4, 48, 64), (4, 48, 64), (4, 64, 48)]
    exact = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    low = [
        tensor.to("cuda", torch.float32 if number == 1 else torch.bfloat16).requires_grad_()
        for number, tensor in enumerate(exact)
    ]
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in low]
    rows, weights, *matrices = low
    got = GroupedFeedForward()(rows, weights, counts.cuda(), *matrices)
    expected = GroupedFeedForward()(wide[0], wide[1], counts, *wide[2:])
    got.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(got, expected), *((a.grad, b.grad) for a, b in zip(low, wide, strict=True))]
    for a, b in pairs:
        assert float((a.cpu().double() - b).norm() / b.norm()) < 2e-2


# ------------------------------------------------------------------ the load, and the bias that follows it


def counted(layer: MixtureOfExperts, x: Tensor, samples: list[int], *, again: bool = False) -> Tensor:
    """The load that one forward and backward notes."""
    with bind_samples(layer, 0, torch.tensor(samples)):
        y = (
            checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context_fn(layer))
            if again
            else layer(x)
        )
    assert isinstance(y, Tensor)
    y.sum().backward()
    return layer.routing.pop_sums()[0]


def test_the_load_counts_each_real_token_once_even_where_forward_runs_twice() -> None:
    layer, x = mixture(DEEPSEEK), tokens(3, 6).requires_grad_()
    _, chosen = layer.routing(layer.router(x))
    expected = torch.bincount(chosen[:2].flatten(), minlength=8)
    assert torch.equal(counted(layer, x, [4, 9, -1]), expected)
    assert torch.equal(counted(layer, x, [4, 9, -1], again=True), expected)
    assert torch.equal(layer.routing.pop_sums()[0], torch.zeros(8, dtype=torch.int64))


def test_neither_evaluation_nor_a_forward_without_backward_counts() -> None:
    layer, x = mixture(DEEPSEEK), tokens(2, 6).requires_grad_()
    layer(x)
    layer.eval()(x).sum().backward()
    assert layer.routing.pop_sums()[0].sum() == 0


def test_rows_that_were_not_announced_are_an_error() -> None:
    layer = mixture(DEEPSEEK)
    with (
        pytest.raises(WanmaError, match="a router receives 3 rows for 2 samples"),
        bind_samples(layer, 0, torch.arange(2)),
    ):
        layer(tokens(3, 6))


def test_the_bias_moves_towards_experts_with_less_than_their_share() -> None:
    routing = TopKRouter(replace(DEEPSEEK, experts=4, expert_groups=1, expert_groups_per_token=1)).double()
    routing.apply_sums(torch.tensor([10, 2, 6, 6]), torch.zeros(()))
    assert routing.bias is not None
    torch.testing.assert_close(routing.bias, torch.tensor([-0.1, 0.1, 0.0, 0.0], dtype=torch.float64))
    assert dict(routing.named_buffers()).keys() == routing.state_dict().keys() == {"bias"}


def test_the_bias_chooses_but_does_not_weigh() -> None:
    layer, x = mixture(replace(DEEPSEEK, expert_groups=1, expert_groups_per_token=1)), tokens(2, 6)
    assert layer.routing.bias is not None
    layer.routing.bias[5] = 10.0
    weights, chosen = layer.routing(layer.router(x))
    assert bool((chosen == 5).any(-1).all())
    scores = layer.router(x).sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


# ------------------------------------------------------------------ the balancing loss


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group", [1, 2])
def test_the_balancing_loss_adds_its_gradient_scaled_like_the_losses(router: Any, group: int) -> None:
    dimensions = replace(MIXTRAL, router=router, balance="loss", balance_rate=0.3, balance_group=group)
    layer, x = mixture(dimensions), tokens(5, 6).requires_grad_()
    samples, factor = [0, 1, 2, 3, -1] if group == 1 else [0, 1, 2, 3], 1 / 7
    x = x[: len(samples)]
    real = [row for row, sample in enumerate(samples) if sample >= 0]

    logits = layer.router(x)
    probabilities = logits.softmax(-1) if router == "softmax" else F.normalize(logits.sigmoid(), p=1, dim=-1)
    _, chosen = layer.routing(logits)
    balance = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(real), group):
        rows = real[start : start + group]
        share = torch.bincount(chosen[rows].flatten(), minlength=4) / (group * 6 * 2)
        balance = balance + group * 6 * 0.3 * 4 * (share * probabilities[rows].flatten(0, 1).mean(0)).sum()
    leaves = [layer.router.weight, *layer.experts.parameters()]
    objective = (layer.eval()(x).square().sum() + balance) * factor
    expected = torch.autograd.grad(objective, leaves)

    layer.train()
    set_auxiliary_loss_scale(layer.modules(), factor)
    with bind_samples(layer, 0, torch.tensor(samples)):
        loss = layer(x).square().sum()
    got = torch.autograd.grad(loss * factor, leaves)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.routing.pop_sums()[1], balance.detach())


def test_an_even_load_of_even_scores_has_the_least_balancing_loss() -> None:
    dimensions = replace(MIXTRAL, experts_per_token=1, balance="loss", balance_rate=1.0)
    even, uneven = torch.eye(4).repeat(2, 1) * 3.0, torch.eye(4)[[0, 0, 0, 0, 0, 1, 2, 3]] * 3.0
    values = []
    for logits in (even, uneven):
        routing = TopKRouter(dimensions)
        weights, _ = routing(logits.unsqueeze(0).requires_grad_())
        weights.sum().backward()
        values.append(float(routing.pop_sums()[1]) / 8)
    assert values[0] == pytest.approx(1.0)
    assert values[1] > 1.5


# ------------------------------------------------------------------ capacity


def test_capacity_keeps_an_experts_first_tokens_of_a_group_in_order_of_position() -> None:
    dimensions = replace(MIXTRAL, experts_per_token=1, capacity_factor=1.0, balance_group=2)
    routing = TopKRouter(dimensions)
    logits = torch.zeros(4, 4, 4)
    logits[:2, :, 1] = 5.0  # all eight tokens of the first group want expert 1, which has room for two
    logits[2:] = torch.eye(4) * 5.0
    _, chosen = routing(logits)
    assert chosen[:2].flatten().tolist() == [1, 1, 4, 4, 4, 4, 4, 4]
    assert chosen[2:].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    _, chosen = routing.eval()(logits)
    assert bool((chosen[:2] == 1).all())


def test_a_token_without_experts_passes_the_layer_as_zero() -> None:
    layer, x = mixture(replace(MIXTRAL, capacity_factor=0.25)), tokens(2, 8).requires_grad_()
    _, chosen = layer.routing(layer.router(x))
    nowhere = (chosen == 4).all(-1)
    assert 0 < nowhere.sum() < nowhere.numel()
    result = layer(x)
    assert bool((result[nowhere] == 0).all())
    assert bool((result[~nowhere] != 0).any(-1).all())
    (to_x,) = torch.autograd.grad(result.sum(), x)
    assert bool((to_x[nowhere] == 0).all())


@pytest.mark.parametrize(
    "more", [{"capacity_factor": 1.0}, {"balance": "loss", "balance_rate": 0.1}], ids=str
)
def test_broken_groups_are_refused_in_training(more: dict[str, Any]) -> None:
    layer = mixture(replace(MIXTRAL, balance_group=2, **more))
    with pytest.raises(WanmaError, match=r"groups of 2 .* with 3 rows") as error:
        layer(tokens(3, 4))
    assert "model.balance_group" in error.value.hint
    layer.eval()(tokens(3, 4))


# ------------------------------------------------------------------ initial values


def test_experts_begin_like_the_matrices_of_a_dense_block() -> None:
    model = decoder(DEEPSEEK, torch.float32)
    experts = model.layers["2"].feed_forward.experts
    assert isinstance(experts, nn.Module)
    assert float(experts.gate.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(experts.down.detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert not torch.equal(experts.gate[0], experts.gate[1])
    assert bool((model.layers["2"].feed_forward.routing.bias == 0).all())
