"""Tiny configs of transformers' causal architectures, in which what can be other than neutral is."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

LENGTH = 16
"""Tokens of a sequence, which windows are shorter than."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_ff", "mlp_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("max_sequence_length", "max_target_positions"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input",), 320),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "encoder_layers"), 1),
    **dict.fromkeys(("n_shared_experts", "num_kv_shared_layers"), 1),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 4),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "qk_rope_head_dim": 4,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 0,
}
_SCALES: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.61,
    "attention_multiplier": 0.23,
    "logit_scale": 0.37,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 24,
    "scale_embedding": True,
    "embedding_scale": 1.7,
    "lm_head_multiplier": 0.7,
    "scale_emb": 1.7,
    "use_qk_norm": True,
    "logits_soft_cap": 3.0,
    "routed_scaling_factor": 1.3,
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "norm_bias", "use_bias"), True),
}
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
"""Kinds of layers, which no cut of a pipeline shows in the same order."""
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10_000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 3.0, "rope_theta": 10_000.0}},
    "diffllama": {"attention_dropout": 0.0},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "minicpm3": {"num_key_value_heads": 4},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that no rule gives: sizes that must agree, and layers as the published models have them."""


def tiny_config(kind: str) -> dict[str, Any]:
    """A config of four small layers, in which what can be other than neutral is."""
    special = _SPECIAL.get(kind, {})
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # it has no default
        config = CONFIG_MAPPING[kind].from_dict(special)
    known = config.to_dict()
    tiny: dict[str, Any] = {"model_type": kind}
    for key, value in known.items():
        if key in _SIZES:
            tiny[key] = _SIZES[key]
        elif key in _SCALES:
            tiny[key] = _SCALES[key]
        elif "drop" in key and type(value) in (int, float):
            tiny[key] = 0.1
        elif key in _WINDOWS:
            tiny[key] = LENGTH // 2
    types = set(known.get("layer_types") or ())
    if types and types <= set(_KINDS):
        tiny["layer_types"] = _KINDS if "sliding_attention" in types else ["full_attention"] * 4
    return {**tiny, **special}
