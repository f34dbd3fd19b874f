"""Validation of transformers' settings and families: rejection of those that wanma computes otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from wanma.job.errors import JobError
from wanma.job.file.serialization import value_text
from wanma.models.huggingface.derived_parallel_spec import find_block_list
from wanma.models.huggingface.module_replacement import find_attention_modules

TESTED_FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families that are trained in wanma's own tests."""

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of attention whose window a probe can detect."""


def validate_config(
    config: PreTrainedConfig, vocabulary_size: int | None, sequence_length: int | None
) -> None:
    """Reject settings of the config that training would not follow.

    Args:
        config: the transformers config.
        vocabulary_size: number of tokens of the tokenizer.
        sequence_length: of the data.

    Raises:
        JobError: names the config's key, and what to write into model.arguments.
    """
    required = ("vocab_size", "num_attention_heads", "num_hidden_layers", "hidden_size")
    for key in (*required, "num_key_value_heads"):
        _reject_per_layer_value(config, key)
    if missing := [key for key in required if not isinstance(getattr(config, key, None), int)]:
        raise JobError(
            f"model.huggingface: a config of {config.model_type} has no {missing[0]}",
            "use the config of the causal language model alone, without an encoder or images",
        )
    settings = config.to_dict()
    if settings.get("is_encoder_decoder"):
        raise JobError(
            f"model.huggingface: {config.model_type} is an encoder-decoder (is_encoder_decoder), not a "
            "causal language model",
            "use the config of a causal language model",
        )
    if settings.get("router_jitter_noise"):
        _reject_key(
            "router_jitter_noise",
            settings["router_jitter_noise"],
            "its random numbers depend on the rank",
            "router_jitter_noise = 0.0",
        )
    if settings.get("output_router_logits"):
        _reject_key(
            "output_router_logits",
            True,
            "its balancing loss couples the samples of a micro-batch and is not supported",
            "output_router_logits = false",
        )
    for key in ("add_cross_attention", "reorder_and_upcast_attn"):
        if settings.get(key):
            _reject_key(key, True, "wanma replaces the attention of decoders by its own", f"{key} = false")
    kinds = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYER_TYPES
    if kinds:
        raise JobError(
            f"model.huggingface: its config has layers of {', '.join(sorted(kinds))} (layer_types), but "
            "wanma's attention covers the whole sequence",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        )
    _validate_positions(config, sequence_length)
    if vocabulary_size is not None and config.vocab_size < vocabulary_size:
        raise JobError(
            f"model.huggingface: its vocabulary of {config.vocab_size} is smaller than the tokenizer's "
            f"{vocabulary_size}",
            "use the model's own tokenizer, or set model.arguments = {vocab_size = ...}",
        )


def max_position_embeddings(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence, in tokens, that the config states; None: it states none."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def validate_model(model: PreTrainedModel) -> None:
    """Reject a family that is not built as wanma needs it.

    Raises:
        JobError: names the missing property.
    """
    kind = type(model).__name__
    obstacle = None
    if not model._supports_attention_backend:
        obstacle = "it does not use the attention interface of transformers"
    elif find_block_list(model) is None:
        obstacle = "it has no list of equal blocks"
    elif model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        obstacle = "its embedding or its output layer is not found"
    elif not any(True for _ in find_attention_modules(model)):
        obstacle = "its attention modules are not found"
    elif any(_has_stacked_experts(module) for module in model.modules()) and not (
        model.config.model_type in TESTED_FAMILIES and model.config.hidden_act == "silu"
    ):
        obstacle = "its routed experts are not those of Mixtral or Qwen3-MoE"
    if obstacle:
        raise JobError(
            f"model.huggingface: {kind} is not supported: {obstacle}",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        )


def _has_stacked_experts(module: nn.Module) -> bool:
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _validate_positions(config: PreTrainedConfig, sequence_length: int | None) -> None:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        longest = max_position_embeddings(config)
        if longest is not None and sequence_length is not None and sequence_length > longest:
            raise JobError(
                f"data.sequence_length = {sequence_length}, but the model has position embeddings for only "
                f"{longest} tokens",
                f"set data.sequence_length to at most {longest}",
            )
        return
    # One set of parameters, or one for each kind of layer.
    for part in [rope] if "rope_type" in rope else rope.values():
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in ("dynamic", "longrope"):
            _reject_key(
                "rope_parameters",
                kind,
                "its rotary frequencies depend on the longest sequence of a batch, which differs between "
                "ranks",
                'rope_parameters = {rope_type = "linear", ...}, or another type with fixed frequencies',
            )


def _reject_per_layer_value(config: PreTrainedConfig, key: str) -> None:
    """Reject a config whose layers differ in `key`, which transformers does not report as one number."""
    try:
        getattr(config, key, None)
    except RuntimeError as error:
        raise JobError(
            f"model.huggingface: layers of {config.model_type} differ in {key} (per_layer_config)",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        ) from error


def _reject_key(key: str, value: Any, reason: str, replacement: str) -> None:
    raise JobError(
        f"model.huggingface: its config has {key} = {value_text(value)}: {reason}",
        f"set model.arguments = {{{replacement}}}",
    )
