"""State-dict adapter between our decoder and the published families that have its architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from wanma.job.errors import WanmaError
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.huggingface_config import decoder_config_from_huggingface
from wanma.models.layers.lora import is_lora_parameter
from wanma.models.state_dict.tensor_mapping import Shape, TensorMapping, map_moe_parameter, map_tensor


class DecoderStateDictAdapter:
    """Base class that makes `Decoder` a state-dict adapter (`StateDictAdapter`)."""

    config: DecoderConfig

    @property
    def tied_tensors(self) -> tuple[tuple[str, str], ...]:
        return (("model.embed_tokens.weight", "lm_head.weight"),) if self.config.tie_embeddings else ()

    def tensor_mappings(self, name: str, shape: Shape) -> tuple[TensorMapping, ...]:
        if is_lora_parameter(name):
            return ()
        family = _family(self.config)
        block, own_name = _split_block_name(name)
        if block is None:
            tied = self.config.tie_embeddings and own_name in ("embedding.weight", "head.weight")
            names = self.tied_tensors[0] if tied else (_OUTER_NAMES[own_name],)
            return tuple((map_tensor(tensor, shape),) for tensor in names)
        routed = re.fullmatch(r"feed_forward\.(router\.weight|experts\.(gate|up|down))", own_name)
        if routed is not None:
            return tuple(map_moe_parameter(f"model.layers.{block}", routed[2], shape, family))
        module, _, kind = own_name.rpartition(".")
        rotary_head_dim = self.config.head_dim if module in _ROTARY_MODULES else None
        return (
            (
                map_tensor(
                    f"model.layers.{block}.{_BLOCK_NAMES[module]}.{kind}", shape, head_dim=rotary_head_dim
                ),
            ),
        )

    def is_ignored_tensor(self, tensor: str) -> bool:
        tied = {copy for _, copy in self.tied_tensors}
        return tensor in tied or tensor.endswith("rotary_emb.inv_freq")  # stored by old versions

    def config_mismatches(self, config: Mapping[str, Any]) -> list[str]:
        other_config = decoder_config_from_huggingface(config)
        if other_config is None:
            kind = config["model_type"]
            return [
                f"its config.json (model_type {kind!r}) describes an architecture that differs from wanma's "
                "decoder"
            ]
        own_fields, other_fields = _architecture_fields(self.config), _architecture_fields(other_config)
        differences = [
            f"{key}: {own_fields[key]} here, {other_fields[key]} in its config.json"
            for key in other_fields
            if own_fields[key] != other_fields[key]
        ]
        if config.get("sliding_window") and config.get(
            "use_sliding_window", "qwen" not in config["model_type"]
        ):
            differences.append(
                "attention covers the whole sequence here, a sliding_window in its config.json"
            )
        return differences

    def export_config(self, sequence_length: int) -> dict[str, Any]:
        dimensions, family = self.config, _family(self.config)
        values: dict[str, Any] = {
            "architectures": [_ARCHITECTURE_CLASSES[family]],
            "model_type": family,
            "hidden_act": "silu" if dimensions.activation_function == "swiglu" else "gelu_pytorch_tanh",
            "vocab_size": dimensions.vocabulary,
            "hidden_size": dimensions.hidden,
            "intermediate_size": dimensions.feed_forward,
            "num_hidden_layers": dimensions.layers,
            "num_attention_heads": dimensions.heads,
            "num_key_value_heads": dimensions.kv_heads,
            "max_position_embeddings": sequence_length,
            "head_dim": dimensions.head_dim,
            "rms_norm_eps": dimensions.norm_epsilon,
            "rope_theta": dimensions.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": dimensions.rope_theta},
            "tie_word_embeddings": dimensions.tie_embeddings,
        }
        if family == "mixtral":
            values |= {
                "sliding_window": None,
                "num_local_experts": dimensions.experts,
                "intermediate_size": dimensions.expert_width,
            }
        if family == "qwen3_moe":
            values |= {
                "num_experts": dimensions.experts,
                "moe_intermediate_size": dimensions.expert_width,
                "norm_topk_prob": dimensions.normalize_routing_weights,
                "mlp_only_layers": list(range(dimensions.dense_layers)),
            }
        if dimensions.experts:
            values["num_experts_per_tok"] = dimensions.experts_per_token
        return values


def _family(config: DecoderConfig) -> str:
    """Return the published family with this architecture.

    Raises:
        WanmaError: there is none.
    """
    is_plain = (
        not (config.uses_latent_attention or config.shared_experts)
        and config.balance != "bias"
        and (config.router, config.routing_scale, config.expert_groups) == ("softmax", 1, 1)
    )
    is_mixtral = config.normalize_routing_weights and config.dense_layers == 0
    gated_families: dict[tuple[bool, bool, bool], str | None] = {
        (False, False, False): "llama",
        (True, False, False): "qwen2",
        (False, True, False): "qwen3",
        (False, True, True): "qwen3_moe",
        (False, False, True): "mixtral" if is_mixtral else None,
    }
    # Arcee's network has two matrices, and its config names the function between them.
    families = gated_families if config.activation_function == "swiglu" else {(False, False, False): "arcee"}
    family = families.get((config.attention_bias, config.qk_norm, config.experts > 0))
    if not is_plain or family is None:
        raise WanmaError(
            "no supported Hugging Face family has the architecture of this decoder (supported: {', "
            "'.join(_ARCHITECTURE_CLASSES)})",
            "use the weights in wanma's own checkpoints",
        )
    return family


def _split_block_name(name: str) -> tuple[str | None, str]:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (match[1], match[2]) if match is not None else (None, name)


_ARCHITECTURE_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "arcee": "ArceeForCausalLM",
}
_OUTER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_ROTARY_MODULES = ("attention.query", "attention.key", "attention.query_norm", "attention.key_norm")
"""Modules whose rows are elements of heads with rotary positions."""


def _architecture_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the dimensions that a config fixes too: no settings of training, all widths resolved."""
    widths = {"head_dim": config.head_dim, "expert_width": config.expert_width}
    values = {**asdict(config), **widths}
    left_out = (
        "explicit_head_dim",
        "expert_feed_forward",
        "dropout",
        "balance_rate",
        "balance_group",
        "capacity_factor",
    )
    if config.balance == "loss":
        values["balance"] = "none"
    if config.experts and not config.dense_layers:
        values["feed_forward"] = None  # of no block
    return {key: value for key, value in values.items() if key not in left_out}
