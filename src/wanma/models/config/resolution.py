"""Resolution of a job's `[model]` section to dimensions. No torch here.

The planner reads dimensions without building a model, so a forecast for 405B parameters costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import RecommenderSection
from wanma.models.config.dimensions import DecoderConfig, VisionConfig
from wanma.models.config.presets import DECODER_PRESETS, PRETRAINED_PRESETS, VISION_PRESETS
from wanma.models.recommender.config import RECOMMENDER_PRESETS

InputKind = Literal["tokens", "images", "interactions", "custom"]
_DECODER_KEYS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "feed_forward",
    "vocabulary",
    "rope_theta",
    "tie_embeddings",
    "activation_function",
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
    "capacity_factor",
)
_DEFAULT_BALANCE_RATES = {"none": 0.0, "bias": 1e-3, "loss": 1e-2}
"""Default balance rates: Wang et al. 2024, section 3; Fedus et al. 2021, section 2.2."""
_FAMILY_KINDS: dict[str, InputKind] = {"decoder": "tokens", "recommender": "interactions"}
_VISION_KEYS = ("depth", "classes", "channels", "image_size", "batch_norm_group")


def input_kind(section: ModelSection) -> InputKind:
    """Return the kind of the model's inputs: tokens, images, interactions, or those of the user's factory.

    Raises:
        JobError: the preset is unknown.
    """
    if section.factory is not None:
        return "custom"
    if section.huggingface is not None:
        return "tokens"
    if section.preset is None:
        return _FAMILY_KINDS.get(section.family or "", "images")
    if section.preset in DECODER_PRESETS:
        return "tokens"
    if section.preset in VISION_PRESETS:
        return "images"
    if section.preset in RECOMMENDER_PRESETS:
        return "interactions"
    presets = [*DECODER_PRESETS, *VISION_PRESETS, *RECOMMENDER_PRESETS]
    raise JobError(
        f"model.preset = '{section.preset}' is unknown.{did_you_mean(section.preset, presets)}",
        f"use a known preset: {', '.join(presets)}",
    )


def resolve_decoder_config(section: ModelSection, vocabulary_size: int | None) -> DecoderConfig:
    """Return the decoder that a `[model]` section describes: its preset, overridden by its explicit keys.

    The vocabulary is `model.vocabulary` if given, else a published preset's own, else the tokenizer's
    rounded up to a multiple of 64, else the preset's.

    Args:
        section: with a decoder preset or `family = "decoder"`.
        vocabulary_size: number of tokens of the tokenizer; None when there is no tokenizer yet.

    Raises:
        JobError: the preset is unknown or no decoder, a key is missing or does not apply, dimensions do
            not divide, or the vocabulary is smaller than the tokenizer's.
    """
    if input_kind(section) != "tokens":
        raise JobError(
            f"model '{section.preset or section.family or section.factory}' is not a decoder",
            f"use a decoder preset: {', '.join(DECODER_PRESETS)}",
        )
    reject_inapplicable_keys(section, _VISION_KEYS, "a decoder")
    explicit_keys: dict[str, Any] = {
        key: getattr(section, key) for key in _DECODER_KEYS if getattr(section, key) is not None
    }
    base = (
        DECODER_PRESETS[section.preset] if section.preset is not None else _config_from_family(explicit_keys)
    )
    if "heads" in explicit_keys and "kv_heads" not in explicit_keys and base.kv_heads == base.heads:
        explicit_keys["kv_heads"] = explicit_keys["heads"]
    if (
        "vocabulary" not in explicit_keys
        and section.preset not in PRETRAINED_PRESETS
        and vocabulary_size is not None
    ):
        explicit_keys["vocabulary"] = -(-vocabulary_size // 64) * 64
    dimensions = _apply_expert_keys(section, replace(base, **explicit_keys))
    _check_decoder_config(dimensions, vocabulary_size)
    return dimensions


def resolve_vision_config(
    section: ModelSection, image_shape: tuple[int, int, int] | None, classes: int | None
) -> VisionConfig:
    """Return the image classifier that a `[model]` section describes.

    Args:
        section: with a vision preset or `family` "convnet" or "resnet".
        image_shape: (channels, height, width) of the data; None when there is no data yet.
        classes: number of classes of the data; None when there is no data yet.

    Raises:
        JobError: the preset is unknown or no vision model, a key is missing, does not apply, or
            contradicts the data.
    """
    if input_kind(section) != "images":
        raise JobError(
            f"model '{section.preset or section.family or section.factory}' is not a vision model",
            f"use a vision preset: {', '.join(VISION_PRESETS)}",
        )
    reject_inapplicable_keys(section, (*_DECODER_KEYS, *_EXPERT_KEYS), "a vision model")
    if section.preset is not None:
        family, depth = VISION_PRESETS[section.preset]
        if section.depth not in (None, depth):
            raise JobError(
                f"model.depth = {section.depth} contradicts model.preset = '{section.preset}'",
                'remove one of them, or set family = "resnet" and a depth',
            )
    else:
        family, depth = ("convnet", None) if section.family == "convnet" else ("resnet", section.depth)
        if family == "resnet" and depth is None:
            raise JobError("model.family = 'resnet' needs model.depth", "set model.depth to 18 or 50")
        if family == "convnet" and section.depth is not None:
            raise JobError("model.depth does not apply to model.family = 'convnet'", "remove it")
    channels = _reconcile_with_data("channels", section.channels, image_shape[0] if image_shape else None)
    height = _reconcile_with_data("image_size", section.image_size, image_shape[1] if image_shape else None)
    width = _reconcile_with_data("image_size", section.image_size, image_shape[2] if image_shape else None)
    known_classes = section.classes if section.classes is not None else classes
    if known_classes is None:
        raise JobError("the number of classes is unknown", "set model.classes, or use labelled data")
    if classes is not None and known_classes < classes:
        raise JobError(
            f"model.classes = {known_classes}, but the data has {classes} classes",
            "remove model.classes to use the number of classes of the data",
        )
    if family == "convnet" and min(height, width) < 4:
        raise JobError(
            f"images of {height} × {width} are too small for the two pooling layers",
            "use images of at least 4 × 4",
        )
    return VisionConfig(family, known_classes, channels, height, width, depth, section.batch_norm_group)


def reject_inapplicable_keys(section: ModelSection, keys: tuple[str, ...], model: str) -> None:
    """Reject keys of the section that `model` would silently ignore."""
    for key in keys:
        if getattr(section, key) != ModelSection.model_fields[key].default:
            raise JobError(f"model.{key} does not apply to {model}", f"remove model.{key}")


def reject_other_models_keys(section: ModelSection) -> None:
    """Reject dimensions of decoders and image classifiers in a recommender's section, and the reverse."""
    if input_kind(section) == "interactions":
        reject_inapplicable_keys(section, (*_DECODER_KEYS, *_EXPERT_KEYS, *_VISION_KEYS), "a recommender")
    elif section.kind is not None or section.recommender != RecommenderSection():
        key = "kind" if section.kind is not None else "recommender"
        raise JobError(
            f"model.{key} applies to recommenders only",
            f"remove model.{key}, or set model.family = 'recommender'",
        )


def reject_architecture_keys(section: ModelSection, key: str = "model.factory") -> None:
    """Reject dimensions beside a model named by `key`, which takes `model.arguments` instead."""
    # A sample group also applies to a factory's model: its batch normalization is converted.
    architecture_keys = (*_DECODER_KEYS, *_EXPERT_KEYS, *_VISION_KEYS)
    keys = tuple(key for key in architecture_keys if key != "batch_norm_group")
    reject_inapplicable_keys(section, keys, f"{key}; pass it in model.arguments")


def _config_from_family(explicit_keys: dict[str, Any]) -> DecoderConfig:
    missing = [f"model.{key}" for key in ("layers", "hidden", "heads") if key not in explicit_keys]
    if missing:
        raise JobError(
            f"model.family = 'decoder' needs {', '.join(missing)}", "set them, or use model.preset"
        )
    hidden, heads = explicit_keys["hidden"], explicit_keys["heads"]
    # The same number of parameters and FLOPs either way, except for rounding.
    is_gelu = explicit_keys.get("activation_function") == "gelu"
    feed_forward = 4 * hidden if is_gelu else -(-8 * hidden // (3 * 64)) * 64
    return DecoderConfig(explicit_keys["layers"], hidden, heads, heads, feed_forward, None)


def _apply_expert_keys(section: ModelSection, base: DecoderConfig) -> DecoderConfig:
    """Return `base` with the section's keys for experts; a section that adds experts gets defaults."""
    if base.experts == 0 and section.experts is None:
        reject_inapplicable_keys(section, _EXPERT_KEYS, "a decoder without experts (model.experts)")
        return base
    explicit_keys: dict[str, Any] = {
        key: value for key in _EXPERT_KEYS if (value := getattr(section, key)) is not None
    }
    if base.experts == 0:
        base = replace(
            base, experts_per_token=min(2, explicit_keys["experts"]), balance="bias", balance_rate=1e-3
        )
    balance = explicit_keys.get("balance", base.balance)
    if balance == "none" and "balance_rate" in explicit_keys:
        raise JobError(
            f"model.balance_rate = {explicit_keys['balance_rate']} has no effect with model.balance = 'none'",
            "set model.balance to 'bias' or 'loss', or remove model.balance_rate",
        )
    if balance != base.balance:
        explicit_keys.setdefault("balance_rate", _DEFAULT_BALANCE_RATES[balance])
    dimensions = replace(base, **explicit_keys)
    _check_experts(dimensions)
    return dimensions


def _check_experts(config: DecoderConfig) -> None:
    if config.activation_function != "swiglu":
        raise JobError(
            f"model.activation_function = '{config.activation_function}' with model.experts = "
            f"{config.experts}, but experts are SwiGLU networks",
            "remove model.activation_function, or use a decoder without experts",
        )
    experts, per_token = config.experts, config.experts_per_token
    open_to_token = experts * config.expert_groups_per_token // config.expert_groups
    if experts % config.expert_groups:
        raise JobError(
            f"model.experts = {experts} is not divisible by the {config.expert_groups} expert groups of the "
            "preset",
            f"set model.experts to a multiple of {config.expert_groups}",
        )
    if per_token > open_to_token:
        raise JobError(
            f"model.experts_per_token = {per_token} exceeds the {open_to_token} experts that a token can be "
            "routed to",
            f"lower model.experts_per_token, or raise model.experts (now {experts})",
        )
    if config.dense_layers >= config.layers:
        raise JobError(
            f"model.dense_layers = {config.dense_layers} of model.layers = {config.layers} "
            "leaves no block with experts",
            "lower model.dense_layers, or remove model.experts",
        )
    if config.balance_group > 1 and config.balance != "loss" and config.capacity_factor == 0:
        raise JobError(
            f"model.balance_group = {config.balance_group} has no effect without a balancing loss or an "
            "expert capacity",
            "set model.balance = 'loss' or model.capacity_factor, or remove model.balance_group",
        )


def _check_decoder_config(config: DecoderConfig, tokenizer_vocabulary_size: int | None) -> None:
    hidden, heads, kv_heads = config.hidden, config.heads, config.kv_heads
    if config.explicit_head_dim is None and hidden % heads:
        raise JobError(
            f"model.hidden = {hidden} is not divisible by model.heads = {heads}",
            f"use a multiple of {heads} for model.hidden",
        )
    if heads % kv_heads:
        raise JobError(
            f"model.heads = {heads} is not divisible by model.kv_heads = {kv_heads}",
            "set model.kv_heads to a divisor of model.heads: "
            f"{', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}",
        )
    if config.uses_latent_attention and heads != kv_heads:
        raise JobError(
            f"model.kv_heads = {kv_heads} is not supported with latent attention, in which each of the "
            f"{heads} heads has its own keys and values",
            "remove model.kv_heads",
        )
    if config.rope_head_dim % 2:
        raise JobError(
            f"model.hidden = {hidden} and model.heads = {heads} give the odd head dimension "
            f"{config.head_dim}, but rotary position embedding needs an even one",
            f"use a multiple of {2 * heads} for model.hidden",
        )
    if config.vocabulary is None:
        raise JobError("the vocabulary is unknown", "set model.vocabulary, or use data with a tokenizer")
    if tokenizer_vocabulary_size is not None and config.vocabulary < tokenizer_vocabulary_size:
        raise JobError(
            f"the model's vocabulary of {config.vocabulary} is smaller than the tokenizer's "
            f"{tokenizer_vocabulary_size}",
            f"set model.vocabulary to {-(-tokenizer_vocabulary_size // 64) * 64}, or use another tokenizer",
        )


def _reconcile_with_data(key: str, explicit_value: int | None, data_value: int | None) -> int:
    if explicit_value is not None and data_value is not None and explicit_value != data_value:
        raise JobError(
            f"model.{key} = {explicit_value}, but the data has {data_value}",
            f"remove model.{key} to use the value of the data",
        )
    value = explicit_value if explicit_value is not None else data_value
    if value is None:
        raise JobError(f"model.{key} of the images is unknown", f"set model.{key}, or use data")
    return value
