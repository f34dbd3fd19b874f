"""Dimensions of models by preset name, ours and published ones, with their sources. No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wanma.models.config.dimensions import DecoderConfig

# Our own decoders, as wide and deep as the GPT of that size (Brown et al. 2020, table 2.1, from 125M on;
# nanoGPT's character model for 10M), but Llama-style: SwiGLU with an inner width of 8/3 hidden,
# rounded up to 64, has the parameters of GPT's two matrices of 4 hidden. `vocabulary` is the one used
# when the data does not say: bytes (256 and special tokens, rounded to 320) or GPT-2's, rounded.
#
# The last has all of GPT-3's matrices, in its shapes: 174.57B parameters, of its 174.60B, and its FLOPs. It
# lacks GPT-3's biases and learned positions (0.04B), and has RMS normalization, rotary positions, and dense
# attention in every layer, where GPT-3 has layer normalization and bands in every second layer.
OWN_PRESETS: dict[str, DecoderConfig] = {
    "gpt-1m": DecoderConfig(4, 128, 4, 4, 384, 320),
    "gpt-10m": DecoderConfig(6, 384, 6, 6, 1024, 320),
    "gpt-17m": DecoderConfig(6, 384, 6, 6, 1024, 8192),
    "gpt-60m": DecoderConfig(10, 512, 8, 8, 1408, 50304, tie_embeddings=True),
    "gpt-125m": DecoderConfig(12, 768, 12, 12, 2048, 50304, tie_embeddings=True),
    "gpt-350m": DecoderConfig(24, 1024, 16, 16, 2752, 50304, tie_embeddings=True),
    "gpt-1b": DecoderConfig(20, 2048, 16, 16, 5504, 50304, tie_embeddings=True),
    "gpt-3-175b": DecoderConfig(
        96, 12288, 96, 96, 4 * 12288, 50304, tie_embeddings=True, activation_function="gelu"
    ),
}


def _gpt_moe(
    layers: int, hidden: int, heads: int, width: int, experts: int, vocabulary: int, per_token: int
) -> DecoderConfig:
    return DecoderConfig(
        layers,
        hidden,
        heads,
        heads,
        (per_token + 1) * width,
        vocabulary,
        experts=experts,
        experts_per_token=per_token,
        shared_experts=1,
        expert_feed_forward=width,
        dense_layers=1,
        router="sigmoid",
        balance="bias",
        balance_rate=1e-3,
    )


def _with_latent_attention(
    config: DecoderConfig, query: int, key_value: int, head: int, rotary: int, value: int
) -> DecoderConfig:
    return replace(
        config,
        query_rank=query,
        key_value_rank=key_value,
        explicit_head_dim=head,
        explicit_rope_head_dim=rotary,
        explicit_value_head_dim=value,
    )


# Our own mixtures of experts after DeepSeek-V3: one shared expert, and a dense first block as wide as the
# experts that a token uses, balanced by a bias. The name gives the total number of parameters; a token
# uses 0.9M, 12M and 124M of them. The smallest has latent attention, with values as wide as queries and
# keys, because fused attention on CPUs requires that.
OWN_MOE_PRESETS: dict[str, DecoderConfig] = {
    "gpt-moe-3m": _with_latent_attention(_gpt_moe(4, 128, 4, 128, 16, 320, 2), 64, 32, 32, 16, 48),
    "gpt-moe-43m": _gpt_moe(6, 384, 6, 384, 16, 320, 2),
    "gpt-moe-400m": replace(_gpt_moe(12, 768, 12, 512, 24, 50304, 3), tie_embeddings=True),
}


def _llama_3(*sizes: int, tied: bool = False) -> DecoderConfig:
    layers, hidden, heads, kv_heads, feed_forward = sizes
    return DecoderConfig(
        layers, hidden, heads, kv_heads, feed_forward, 128256, rope_theta=500_000.0, tie_embeddings=tied
    )


def _qwen(*sizes: int, generation: Literal["2.5", "3"], tied: bool = False) -> DecoderConfig:
    layers, hidden, heads, kv_heads, feed_forward, vocabulary = sizes
    return DecoderConfig(
        layers,
        hidden,
        heads,
        kv_heads,
        feed_forward,
        vocabulary,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        tie_embeddings=tied,
        explicit_head_dim=128 if generation == "3" else None,
        attention_bias=generation == "2.5",
        qk_norm=generation == "3",
    )


def _mixtral(*sizes: int) -> DecoderConfig:
    layers, hidden, heads, kv_heads, feed_forward, vocabulary = sizes
    return DecoderConfig(
        layers,
        hidden,
        heads,
        kv_heads,
        feed_forward,
        vocabulary,
        rope_theta=1_000_000.0,
        experts=8,
        experts_per_token=2,
        balance="loss",
        balance_rate=0.02,
    )


# Published models, by the `config.json` of their weights on the Hugging Face hub; their vocabulary is part
# of the model. Rotary frequencies are the plain ones: the scaling that Llama 3.1 and 3.2 apply for
# contexts beyond 8,192 tokens changes neither parameters nor arithmetic.
PRETRAINED_PRESETS: dict[str, DecoderConfig] = {
    # Touvron et al. 2023; meta-llama/Llama-2-{7b,13b,70b}-hf
    "llama-2-7b": DecoderConfig(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": DecoderConfig(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": DecoderConfig(80, 8192, 64, 8, 28672, 32000),
    # Grattafiori et al. 2024, table 3; meta-llama/Meta-Llama-3-{8B,70B}, Llama-3.1-405B
    "llama-3-8b": _llama_3(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama_3(80, 8192, 64, 8, 28672),
    "llama-3-405b": _llama_3(126, 16384, 128, 8, 53248),
    # meta-llama/Llama-3.2-{1B,3B}
    "llama-3.2-1b": _llama_3(16, 2048, 32, 8, 8192, tied=True),
    "llama-3.2-3b": _llama_3(28, 3072, 24, 8, 8192, tied=True),
    # mistralai/Mistral-7B-v0.3 (full attention, unlike v0.1)
    "mistral-7b": DecoderConfig(32, 4096, 32, 8, 14336, 32768, rope_theta=1_000_000.0),
    # Qwen team 2024; Qwen/Qwen2.5-{0.5B,7B,72B}
    "qwen-2.5-0.5b": _qwen(24, 896, 14, 2, 4864, 151936, generation="2.5", tied=True),
    "qwen-2.5-7b": _qwen(28, 3584, 28, 4, 18944, 152064, generation="2.5"),
    "qwen-2.5-72b": _qwen(80, 8192, 64, 8, 29568, 152064, generation="2.5"),
    # Yang et al. 2025, table 1; Qwen/Qwen3-{0.6B,8B,32B}
    "qwen-3-0.6b": _qwen(28, 1024, 16, 8, 3072, 151936, generation="3", tied=True),
    "qwen-3-8b": _qwen(36, 4096, 32, 8, 12288, 151936, generation="3"),
    "qwen-3-32b": _qwen(64, 5120, 64, 8, 25600, 151936, generation="3"),
    # Jiang et al. 2024, table 1; mistralai/Mixtral-8x{7B,22B}-v0.1
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384, 32000),
    # DeepSeek-AI 2024, section 4.2; deepseek-ai/DeepSeek-V3. Without its module for predicting a second
    # token, and with plain rotary frequencies, as it was trained up to 4,096 tokens.
    "deepseek-v3": _with_latent_attention(
        DecoderConfig(
            61,
            7168,
            128,
            128,
            18432,
            129280,
            norm_epsilon=1e-6,
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            expert_feed_forward=2048,
            dense_layers=3,
            router="sigmoid",
            routing_scale=2.5,
            expert_groups=8,
            expert_groups_per_token=4,
            balance="bias",
            balance_rate=1e-3,
        ),
        query=1536,
        key_value=512,
        head=128,
        rotary=64,
        value=128,
    ),
}

DECODER_PRESETS: dict[str, DecoderConfig] = {**OWN_PRESETS, **OWN_MOE_PRESETS, **PRETRAINED_PRESETS}

VISION_PRESETS: dict[str, tuple[Literal["convnet", "resnet"], int | None]] = {
    "cifar-convnet": ("convnet", None),
    "resnet-18": ("resnet", 18),
    "resnet-50": ("resnet", 50),
}
"""Family and depth by preset; channels, image size and classes are the data's."""
