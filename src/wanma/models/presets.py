"""Model dimensions: named presets and what a job's `[model]` section makes of them. No torch here.

The planner reads dimensions without building a model, so a forecast for 405B parameters costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections import ModelSection


@dataclass(frozen=True)
class DecoderDimensions:
    """Everything that fixes a decoder's parameters and arithmetic, but for the sequence length."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    feed_forward: int
    """Inner width of the SwiGLU block."""
    vocabulary: int | None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    """Of each block's two branches before they join the residual stream."""
    head_size: int | None = None
    """Width of one head; default: hidden / heads."""
    attention_bias: bool = False
    """Query, key and value projections have a bias (Qwen 2.5)."""
    head_norm: bool = False
    """Queries and keys are RMS-normalised per head (Qwen 3)."""
    query_rank: int = 0
    """Multi-head latent attention (DeepSeek-V2): width of the vector that queries are made from; 0: plain
    attention. With it all heads have keys and values of their own."""
    key_value_rank: int = 0
    """Likewise of the one that keys and values are made from."""
    rotary_size: int | None = None
    """Latent attention: elements that know their position, beside those of `head_size`."""
    value_size: int | None = None
    """Latent attention: width of one head's values."""
    experts: int = 0
    """Routed experts of a block; 0: one feed-forward network instead."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that every token passes; together one network of so many times the width."""
    expert_feed_forward: int | None = None
    """Inner width of one expert; default: feed_forward."""
    dense_layers: int = 0
    """First blocks that have one network of `feed_forward` and no experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize_weights: bool = True
    """The weights of a token's experts add up to one before they are scaled."""
    weight_scale: float = 1.0
    """Of those weights."""
    expert_groups: int = 1
    """Groups of neighbouring experts (DeepSeek-V3's n_group), of which
    `groups_per_token` (topk_group) are open to a token."""
    groups_per_token: int = 1
    balance: Literal["none", "bias", "loss"] = "none"
    """What keeps the use of experts even; see `models.routing`."""
    balance_rate: float = 0.0
    """Step of the bias, or weight of the loss."""
    balance_group: int = 1
    """Samples over which a balancing loss and capacity count."""
    capacity: float = 0.0
    """Tokens that an expert takes of such a group, times an even share; 0: all."""

    @property
    def head_width(self) -> int:
        return self.head_size if self.head_size is not None else self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """Elements of a head that know their position."""
        return self.rotary_size if self.rotary_size is not None else self.head_width

    @property
    def value_width(self) -> int:
        return self.value_size if self.value_size is not None else self.head_width

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.key_value_rank > 0

    @property
    def expert_width(self) -> int:
        return self.expert_feed_forward if self.expert_feed_forward is not None else self.feed_forward

    @property
    def couples_samples(self) -> bool:
        """Whether samples of one `balance_group` must be computed in one micro-batch."""
        return self.balance_group > 1


@dataclass(frozen=True)
class VisionDimensions:
    """Everything that fixes an image classifier."""

    family: Literal["convnet", "resnet"]
    classes: int
    channels: int
    height: int
    width: int
    depth: int | None
    """ResNet: 18 or 50."""
    statistics_group: int
    """Samples that share one batch-normalisation statistic."""


# Our own decoders, as wide and deep as the GPT of that size (Brown et al. 2020, table 2.1, from 125M to
# 1.3B; nanoGPT's character model for 10M), but Llama-style: SwiGLU with an inner width of 8/3 hidden,
# rounded up to 64, has the parameters of GPT's two matrices of 4 hidden. `vocabulary` is the one used
# when the data does not say: bytes (256 and special tokens, rounded to 320) or GPT-2's, rounded.
GPT_PRESETS: dict[str, DecoderDimensions] = {
    "gpt-1m": DecoderDimensions(4, 128, 4, 4, 384, 320),
    "gpt-10m": DecoderDimensions(6, 384, 6, 6, 1024, 320),
    "gpt-17m": DecoderDimensions(6, 384, 6, 6, 1024, 8192),
    "gpt-60m": DecoderDimensions(10, 512, 8, 8, 1408, 50304, tie_embeddings=True),
    "gpt-125m": DecoderDimensions(12, 768, 12, 12, 2048, 50304, tie_embeddings=True),
    "gpt-350m": DecoderDimensions(24, 1024, 16, 16, 2752, 50304, tie_embeddings=True),
    "gpt-1b": DecoderDimensions(20, 2048, 16, 16, 5504, 50304, tie_embeddings=True),
}


def _gpt_moe(
    layers: int, hidden: int, heads: int, width: int, experts: int, vocabulary: int, per_token: int
) -> DecoderDimensions:
    return DecoderDimensions(
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
    dimensions: DecoderDimensions, query: int, key_value: int, head: int, rotary: int, value: int
) -> DecoderDimensions:
    return replace(
        dimensions,
        query_rank=query,
        key_value_rank=key_value,
        head_size=head,
        rotary_size=rotary,
        value_size=value,
    )


# Our own mixtures of experts after DeepSeek-V3: one shared expert, a dense first block whose width is that
# of the experts which a token passes, balanced by a bias. The name says how many parameters there are in
# all; a token passes 0.9M, 12M and 124M of them. The smallest has latent attention, with values as wide as
# queries and keys, for fused attention on CPUs wants that.
GPT_MOE_PRESETS: dict[str, DecoderDimensions] = {
    "gpt-moe-3m": _with_latent_attention(_gpt_moe(4, 128, 4, 128, 16, 320, 2), 64, 32, 32, 16, 48),
    "gpt-moe-43m": _gpt_moe(6, 384, 6, 384, 16, 320, 2),
    "gpt-moe-400m": replace(_gpt_moe(12, 768, 12, 512, 24, 50304, 3), tie_embeddings=True),
}


def _llama_3(*sizes: int, tied: bool = False) -> DecoderDimensions:
    layers, hidden, heads, kv_heads, feed_forward = sizes
    return DecoderDimensions(
        layers, hidden, heads, kv_heads, feed_forward, 128256, rope_theta=500_000.0, tie_embeddings=tied
    )


def _qwen(*sizes: int, generation: Literal["2.5", "3"], tied: bool = False) -> DecoderDimensions:
    layers, hidden, heads, kv_heads, feed_forward, vocabulary = sizes
    return DecoderDimensions(
        layers,
        hidden,
        heads,
        kv_heads,
        feed_forward,
        vocabulary,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        tie_embeddings=tied,
        head_size=128 if generation == "3" else None,
        attention_bias=generation == "2.5",
        head_norm=generation == "3",
    )


def _mixtral(*sizes: int) -> DecoderDimensions:
    layers, hidden, heads, kv_heads, feed_forward, vocabulary = sizes
    return DecoderDimensions(
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
# of the model. Rotary frequencies are the plain ones: the stretching that Llama 3.1 and 3.2 apply for
# contexts beyond 8,192 tokens changes neither parameters nor arithmetic.
PUBLISHED_PRESETS: dict[str, DecoderDimensions] = {
    # Touvron et al. 2023; meta-llama/Llama-2-{7b,13b,70b}-hf
    "llama-2-7b": DecoderDimensions(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": DecoderDimensions(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": DecoderDimensions(80, 8192, 64, 8, 28672, 32000),
    # Grattafiori et al. 2024, table 3; meta-llama/Meta-Llama-3-{8B,70B}, Llama-3.1-405B
    "llama-3-8b": _llama_3(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama_3(80, 8192, 64, 8, 28672),
    "llama-3-405b": _llama_3(126, 16384, 128, 8, 53248),
    # meta-llama/Llama-3.2-{1B,3B}
    "llama-3.2-1b": _llama_3(16, 2048, 32, 8, 8192, tied=True),
    "llama-3.2-3b": _llama_3(28, 3072, 24, 8, 8192, tied=True),
    # mistralai/Mistral-7B-v0.3 (full attention, unlike v0.1)
    "mistral-7b": DecoderDimensions(32, 4096, 32, 8, 14336, 32768, rope_theta=1_000_000.0),
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
        DecoderDimensions(
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
            weight_scale=2.5,
            expert_groups=8,
            groups_per_token=4,
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

DECODER_PRESETS: dict[str, DecoderDimensions] = {**GPT_PRESETS, **GPT_MOE_PRESETS, **PUBLISHED_PRESETS}

VISION_PRESETS: dict[str, tuple[Literal["convnet", "resnet"], int | None]] = {
    "cifar-convnet": ("convnet", None),
    "resnet-18": ("resnet", 18),
    "resnet-50": ("resnet", 50),
}
"""Family and depth; channels, image size and classes are the data's."""

_DECODER_KEYS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "feed_forward",
    "vocabulary",
    "rope_theta",
    "tie_embeddings",
    "dropout",
)
_EXPERT_KEYS = (
    "experts",
    "experts_per_token",
    "shared_experts",
    "expert_feed_forward",
    "dense_layers",
    "router",
    "balance",
    "balance_rate",
    "balance_group",
    "capacity",
)
_BALANCE_RATES = {"none": 0.0, "bias": 1e-3, "loss": 1e-2}
"""Where the job says nothing: Wang et al. 2024, section 3; Fedus et al. 2021, section 2.2."""
_VISION_KEYS = ("depth", "classes", "channels", "image_size", "statistics_group")


def model_kind(section: ModelSection) -> Literal["tokens", "images", "custom"]:
    """What the model eats: token sequences, images, or whatever the user's factory says.

    Raises:
        JobError: the preset is unknown.
    """
    if section.factory is not None:
        return "custom"
    if section.huggingface is not None:
        return "tokens"
    if section.preset is None:
        return "tokens" if section.family == "decoder" else "images"
    if section.preset in DECODER_PRESETS:
        return "tokens"
    if section.preset in VISION_PRESETS:
        return "images"
    known = [*DECODER_PRESETS, *VISION_PRESETS]
    raise JobError(
        f"model.preset = '{section.preset}' is unknown.{did_you_mean(section.preset, known)}",
        f"known presets: {', '.join(known)}",
    )


def decoder_dimensions(section: ModelSection, vocabulary: int | None) -> DecoderDimensions:
    """The decoder that a `[model]` section describes: its preset, overridden by its explicit keys.

    The vocabulary is `model.vocabulary` if given, else a published preset's own, else the tokenizer's
    rounded up to a multiple of 64, else the preset's.

    Args:
        section: with a decoder preset or `family = "decoder"`.
        vocabulary: tokens that the tokenizer knows; None when there is no tokenizer yet.

    Raises:
        JobError: the preset is unknown or no decoder, a key is missing or does not apply, dimensions do
            not divide, or the vocabulary is smaller than the tokenizer's.
    """
    if model_kind(section) != "tokens":
        raise JobError(
            f"model '{section.preset or section.family or section.factory}' is no decoder",
            f"decoder presets: {', '.join(DECODER_PRESETS)}",
        )
    reject_keys(section, _VISION_KEYS, "a decoder")
    given: dict[str, Any] = {
        key: getattr(section, key) for key in _DECODER_KEYS if getattr(section, key) is not None
    }
    base = DECODER_PRESETS[section.preset] if section.preset is not None else _from_family(given)
    if "heads" in given and "kv_heads" not in given and base.kv_heads == base.heads:
        given["kv_heads"] = given["heads"]
    if "vocabulary" not in given and section.preset not in PUBLISHED_PRESETS and vocabulary is not None:
        given["vocabulary"] = -(-vocabulary // 64) * 64
    dimensions = _with_experts(section, replace(base, **given))
    _check(dimensions, vocabulary)
    return dimensions


def vision_dimensions(
    section: ModelSection, image_shape: tuple[int, int, int] | None, classes: int | None
) -> VisionDimensions:
    """The image classifier that a `[model]` section describes.

    Args:
        section: with a vision preset or `family` "convnet" or "resnet".
        image_shape: (channels, height, width) of the data; None when there is no data yet.
        classes: of the data; None when there is no data yet.

    Raises:
        JobError: the preset is unknown or no vision model, a key is missing, does not apply, or
            contradicts the data.
    """
    if model_kind(section) != "images":
        raise JobError(
            f"model '{section.preset or section.family or section.factory}' is no vision model",
            f"vision presets: {', '.join(VISION_PRESETS)}",
        )
    reject_keys(section, (*_DECODER_KEYS, *_EXPERT_KEYS), "a vision model")
    if section.preset is not None:
        family, depth = VISION_PRESETS[section.preset]
        if section.depth not in (None, depth):
            raise JobError(
                f"model.depth = {section.depth} contradicts model.preset = '{section.preset}'",
                'drop one of them, or use family = "resnet" with a depth',
            )
    else:
        family, depth = ("convnet", None) if section.family == "convnet" else ("resnet", section.depth)
        if family == "resnet" and depth is None:
            raise JobError("model.family = 'resnet' needs model.depth", "set model.depth to 18 or 50")
        if family == "convnet" and section.depth is not None:
            raise JobError("model.depth does not apply to model.family = 'convnet'", "remove it")
    channels = _agree("channels", section.channels, image_shape[0] if image_shape else None)
    height = _agree("image_size", section.image_size, image_shape[1] if image_shape else None)
    width = _agree("image_size", section.image_size, image_shape[2] if image_shape else None)
    known_classes = section.classes if section.classes is not None else classes
    if known_classes is None:
        raise JobError("the number of classes is unknown", "set model.classes, or give labelled data")
    if classes is not None and known_classes < classes:
        raise JobError(
            f"model.classes = {known_classes}, but the data has {classes} classes",
            "drop model.classes to use the data's",
        )
    if family == "convnet" and min(height, width) < 4:
        raise JobError(f"images of {height} × {width} are too small for two poolings", "use at least 4 × 4")
    return VisionDimensions(family, known_classes, channels, height, width, depth, section.statistics_group)


def reject_keys(section: ModelSection, keys: tuple[str, ...], what: str) -> None:
    """Refuse keys of the section that `what` would silently ignore."""
    for key in keys:
        if getattr(section, key) != ModelSection.model_fields[key].default:
            raise JobError(f"model.{key} does not apply to {what}", f"remove model.{key}")


def reject_dimension_keys(section: ModelSection, key: str = "model.factory") -> None:
    """Refuse dimensions beside what `key` names, which takes `model.arguments` instead."""
    # A group of samples means something for a factory's model too: its batch normalisation is converted.
    every = (*_DECODER_KEYS, *_EXPERT_KEYS, *_VISION_KEYS)
    keys = tuple(key for key in every if key != "statistics_group")
    reject_keys(section, keys, f"{key}; give it in model.arguments")


def _from_family(given: dict[str, Any]) -> DecoderDimensions:
    missing = [f"model.{key}" for key in ("layers", "hidden", "heads") if key not in given]
    if missing:
        raise JobError(f"model.family = 'decoder' needs {', '.join(missing)}", "or name a preset")
    hidden, heads = given["hidden"], given["heads"]
    feed_forward = -(-8 * hidden // (3 * 64)) * 64
    return DecoderDimensions(given["layers"], hidden, heads, heads, feed_forward, None)


def _with_experts(section: ModelSection, base: DecoderDimensions) -> DecoderDimensions:
    """`base` with the section's keys for experts; a section that asks for them first gets defaults."""
    if base.experts == 0 and section.experts is None:
        reject_keys(section, _EXPERT_KEYS, "a decoder without experts (model.experts)")
        return base
    given: dict[str, Any] = {
        key: value for key in _EXPERT_KEYS if (value := getattr(section, key)) is not None
    }
    if base.experts == 0:
        base = replace(base, experts_per_token=min(2, given["experts"]), balance="bias", balance_rate=1e-3)
    balance = given.get("balance", base.balance)
    if balance == "none" and "balance_rate" in given:
        raise JobError(
            f"model.balance_rate = {given['balance_rate']} has nothing to weigh: model.balance = 'none'",
            "set model.balance to 'bias' or 'loss', or remove model.balance_rate",
        )
    if balance != base.balance:
        given.setdefault("balance_rate", _BALANCE_RATES[balance])
    dimensions = replace(base, **given)
    _check_experts(dimensions)
    return dimensions


def _check_experts(dimensions: DecoderDimensions) -> None:
    experts, per_token = dimensions.experts, dimensions.experts_per_token
    open_to_token = experts * dimensions.groups_per_token // dimensions.expert_groups
    if experts % dimensions.expert_groups:
        raise JobError(
            f"model.experts = {experts} cannot be in the preset's {dimensions.expert_groups} groups",
            f"use a multiple of {dimensions.expert_groups}",
        )
    if per_token > open_to_token:
        raise JobError(
            f"model.experts_per_token = {per_token}, but there are only {open_to_token} to choose from",
            f"lower model.experts_per_token, or raise model.experts (now {experts})",
        )
    if dimensions.dense_layers >= dimensions.layers:
        raise JobError(
            f"model.dense_layers = {dimensions.dense_layers} of model.layers = {dimensions.layers} "
            "leaves no block with experts",
            "lower model.dense_layers, or leave model.experts out",
        )
    if dimensions.balance_group > 1 and dimensions.balance != "loss" and dimensions.capacity == 0:
        raise JobError(
            f"model.balance_group = {dimensions.balance_group} without anything that counts over groups",
            "set model.balance = 'loss' or model.capacity, or remove model.balance_group",
        )


def _check(dimensions: DecoderDimensions, tokenizer: int | None) -> None:
    hidden, heads, kv_heads = dimensions.hidden, dimensions.heads, dimensions.kv_heads
    if dimensions.head_size is None and hidden % heads:
        raise JobError(
            f"model.hidden = {hidden} is not divisible by model.heads = {heads}",
            f"use a multiple of {heads} for model.hidden",
        )
    if heads % kv_heads:
        raise JobError(
            f"model.heads = {heads} is not divisible by model.kv_heads = {kv_heads}",
            "each key/value head serves the same number of query heads; "
            f"model.kv_heads may be {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}",
        )
    if dimensions.is_latent and heads != kv_heads:
        raise JobError(
            f"model.kv_heads = {kv_heads} with latent attention, where each of {heads} heads has its own",
            "remove model.kv_heads",
        )
    if dimensions.rotary_width % 2:
        raise JobError(
            f"model.hidden = {hidden} and model.heads = {heads} give heads of odd width "
            f"{dimensions.head_width}, but rotary positions turn pairs",
            f"use a multiple of {2 * heads} for model.hidden",
        )
    if dimensions.vocabulary is None:
        raise JobError("the vocabulary is unknown", "set model.vocabulary, or give data with a tokenizer")
    if tokenizer is not None and dimensions.vocabulary < tokenizer:
        raise JobError(
            f"the model's vocabulary of {dimensions.vocabulary} is smaller than the tokenizer's {tokenizer}",
            f"set model.vocabulary to {-(-tokenizer // 64) * 64}, or use another tokenizer",
        )


def _agree(key: str, given: int | None, data: int | None) -> int:
    if given is not None and data is not None and given != data:
        raise JobError(
            f"model.{key} = {given}, but the data has {data}", f"drop model.{key} to use the data's"
        )
    known = given if given is not None else data
    if known is None:
        raise JobError(f"the images' {key} is unknown", f"set model.{key}, or give data")
    return known
