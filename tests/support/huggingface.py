"""Tiny configs of transformers models, one per family that the tests train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanma.job.errors import JobError

_LIKE_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LIKE_LLAMA, "model_type": "llama"},
    "arcee": {**_LIKE_LLAMA, "model_type": "arcee", "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {**_LIKE_LLAMA, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {**_LIKE_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_LIKE_LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mixtral": {**_LIKE_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LIKE_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def write_config(folder: Path, family: str, **changed: Any) -> Path:
    """Make `folder` with the config.json of `family`; skip the test if transformers is too old for it."""
    if family == "gpt2":
        skip_if_refused(family)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FAMILIES[family], **changed}))
    return folder


def skip_if_refused(family: str) -> None:
    """Skip the test if wanma refuses `family` with the installed transformers, and not with newer ones."""
    from wanma.models.huggingface.installed_transformers import require_family

    try:
        require_family(family)
    except JobError as error:
        pytest.skip(error.message)
