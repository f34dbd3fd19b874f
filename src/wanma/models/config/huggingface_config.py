"""Reader of a transformers `config.json` that a job names. Imports neither torch nor transformers.

If the architecture is that of our own decoder, its dimensions follow from the config, so that a forecast for
a published model costs nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanma.job.errors import EXIT_USAGE, JobError, WanmaError, missing_extra_error
from wanma.job.sections.model import ModelSection
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.resolution import reject_architecture_keys

CONFIG_FILE_NAME = "config.json"


def read_section_config(section: ModelSection) -> dict[str, Any]:
    """Read the config that `model.huggingface` names, with `model.arguments` replacing its keys.

    There "null" is JSON's null.

    Raises:
        JobError: it is no local file, needs code from elsewhere, or has settings that would be ignored.
        WanmaError: transformers is not installed, or too old.
    """
    assert section.huggingface is not None
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra_error("transformers", "huggingface", "model.huggingface")
    _require_transformers_version()
    reject_architecture_keys(section, "model.huggingface")
    config = read_config_file(Path(section.huggingface).expanduser(), "model.huggingface")
    # TOML has no null.
    overrides = {key: None if value == "null" else value for key, value in section.arguments.items()}
    return {**config, **overrides}


def _require_transformers_version() -> None:
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # a source tree on the path
    if int(installed.partition(".")[0]) < _FIRST_MAJOR_VERSION:
        raise WanmaError(
            f"model.huggingface needs transformers {_FIRST_MAJOR_VERSION}.0 or later, and {installed} is "
            "installed.",
            "pip install --upgrade 'wanma[huggingface]'; model.factory trains models of any version",
            EXIT_USAGE,
        )


_FIRST_MAJOR_VERSION = 5
"""First major version whose experts, configs and checkpoints have the layout that wanma reads."""


def read_config_file(path: Path, key: str) -> dict[str, Any]:
    """Read one config.json, or that of a folder.

    Args:
        path: the file or folder.
        key: key of the job, for the message.

    Raises:
        JobError: there is none there, it is malformed, or it needs code from elsewhere.
    """
    file = path / CONFIG_FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise JobError(
            f"{key} = '{path}' is neither a file nor a folder with a {CONFIG_FILE_NAME}",
            "give the local path of a config.json or of its folder: wanma does not download models",
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(
            f"{key}: {file} cannot be read: {error}",
            "give a JSON file with the config of a transformers model",
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise JobError(
            f"{key}: {file} is not a transformers config: model_type is missing",
            f"give the {CONFIG_FILE_NAME} of a transformers model",
        )
    if "auto_map" in config:
        raise JobError(
            f"{key}: {file} requires custom code (auto_map), which wanma does not run",
            "use a model of the transformers library, or pass a custom module as model.factory",
        )
    if config.get("quantization_config"):
        raise JobError(
            f"{key}: {file} describes quantized weights (quantization_config), which cannot be trained",
            "use the config of the unquantized weights",
        )
    return config


def decoder_config_from_huggingface(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the dimensions of our own decoder with the parameters and arithmetic of `config`.

    Returns:
        None if ours has another architecture, or the config leaves sizes to transformers' defaults.
    """
    kind = config["model_type"]
    if kind not in _DECODER_FAMILIES or config.get("mlp_bias"):
        return None
    has_two_matrices = kind == "arcee"
    default, supported = ("relu2", _TANH_GELU_NAMES) if has_two_matrices else ("silu", ("silu",))
    if config.get("hidden_act", default) not in supported:
        return None
    if kind != "qwen2" and config.get("attention_bias"):
        return None  # of the output projections too, where ours have none
    rope = rope_parameters(config)
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "qwen3_moe" and config.get("decoder_sparse_step", 1) != 1:
        return None
    dense = list(config.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        return None
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        may_leave_out = kind in ("llama", "arcee")
        kv_heads = config.get("num_key_value_heads") if may_leave_out else config["num_key_value_heads"]
        width = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
        return DecoderConfig(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(kv_heads or heads),
            feed_forward=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            rope_theta=float(rope["rope_theta"]),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-5 if has_two_matrices else 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            explicit_head_dim=None if int(width) * heads == hidden else int(width),
            attention_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            activation_function="gelu" if has_two_matrices else "swiglu",
            **_expert_fields(config, len(dense)),
        )
    except KeyError:
        return None


def _expert_fields(config: Mapping[str, Any], dense_layers: int) -> dict[str, Any]:
    if config["model_type"] not in ("mixtral", "qwen3_moe"):
        return {}
    is_mixtral = config["model_type"] == "mixtral"
    count = config.get("num_local_experts") or config.get("num_experts")
    return {
        "experts": int(count) if count else int(config["num_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_feed_forward": None if is_mixtral else int(config["moe_intermediate_size"]),
        "normalize_routing_weights": is_mixtral or bool(config.get("norm_topk_prob", False)),
        "dense_layers": dense_layers,
    }


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding in the form of `rope_parameters`, from any spelling."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return {**parameters, "rope_type": kind, "rope_theta": theta}


_DECODER_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "arcee")
_TANH_GELU_NAMES = ("gelu_pytorch_tanh", "gelu_new")
"""Names of GELU's approximation by tanh."""
