"""State-dict adapter between a transformers model and published checkpoints, with fused or split tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from wanma.models.layers.lora import is_lora_parameter
from wanma.models.state_dict.tensor_mapping import (
    Shape,
    TensorMapping,
    TensorSlice,
    map_moe_parameter,
    map_tensor,
)
from wanma.models.structure.parallel_spec import ParallelSpec


class TransformersStateDictAdapter(nn.Module):
    """Base class that makes a transformers model a state-dict adapter (`StateDictAdapter`)."""

    parallel_spec: ParallelSpec
    config: Any

    @property
    def tied_tensors(self) -> tuple[tuple[str, str], ...]:
        return self.parallel_spec.tied_parameters

    def tensor_mappings(self, name: str, shape: Shape) -> tuple[TensorMapping, ...]:
        if is_lora_parameter(name):
            return ()
        names = next((pair for pair in self.parallel_spec.tied_parameters if name in pair), (name,))
        mappings = tuple(
            mapping for tied_name in names for mapping in _mappings(tied_name, shape, self.config.model_type)
        )
        # Some checkpoints are of the model without its head: names lack the first part.
        prefix = f"{cast(PreTrainedModel, self).base_model_prefix}."
        mappings += tuple(_strip_prefix(prefix, mapping) for mapping in mappings)
        return mappings + tuple(
            dict.fromkeys(
                self._apply_renamings(mapping)
                for mapping in mappings
                if self._apply_renamings(mapping) != mapping
            )
        )

    def _apply_renamings(self, mapping: TensorMapping) -> TensorMapping:
        """Apply the renamings with which transformers reads published weights, reversed."""
        names = {piece.tensor_name: piece.tensor_name for piece in mapping}
        for renaming in reversed(_renamings(_class_name(self), self.config.model_type)):
            names = {tensor: renaming.rename_source_key(name)[0] for tensor, name in names.items()}
        return tuple(replace(piece, tensor_name=names[piece.tensor_name]) for piece in mapping)

    def is_ignored_tensor(self, tensor: str) -> bool:
        patterns = [*(cast(PreTrainedModel, self)._keys_to_ignore_on_load_unexpected or ())]
        if self.config.model_type == "gpt2":
            patterns.append(r"\.attn\.(masked_)?bias$")
        tied = [copy for _, copy in self.parallel_spec.tied_parameters]
        return (
            tensor in tied
            or tensor.endswith("rotary_emb.inv_freq")  # stored by old versions
            or any(re.search(pattern, tensor) for pattern in patterns)
        )

    def config_mismatches(self, config: Mapping[str, Any]) -> list[str]:
        own_config, other_config = _full_config(self.config), dict(config)
        if other_config.get("model_type") == own_config["model_type"]:
            # Settings that a config leaves out are its family's defaults.
            other_config = _full_config(type(self.config).from_dict(other_config))
        return [
            f"{key}: {own_config.get(key)} here, {other_config[key]} in its config.json"
            for key in (
                *_ARCHITECTURE_KEYS,
                *sorted(key for key in other_config if _SCALE_KEY_PATTERN.search(key)),
            )
            if other_config.get(key) is not None and own_config.get(key) != other_config[key]
        ]

    def export_config(self, sequence_length: int) -> dict[str, Any]:  # noqa: ARG002  # its config says
        values: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return {**values, "architectures": [type(self).__name__]}


_ARCHITECTURE_KEYS = (
    "model_type",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "num_experts_per_tok",
    "norm_topk_prob",
    "n_head",
    "tie_word_embeddings",
)
"""Settings that change the arithmetic without changing a shape."""
_SCALE_KEY_PATTERN = re.compile("multiplier|(?<!rope_)scal|softcap|soft_cap")
"""Pattern in names of further such settings, whatever the family."""


@cache
def _renamings(class_name: str, family: str) -> tuple[Any, ...]:
    """Return transformers' renamings of whole tensors, reversed: from its own names to published ones."""
    conversions = (
        get_checkpoint_conversion_mapping(class_name) or get_checkpoint_conversion_mapping(family) or ()
    )
    return tuple(
        conversion.reverse_transform() for conversion in conversions if type(conversion) is WeightRenaming
    )


def _class_name(model: nn.Module) -> str:
    """Return the name of transformers' class among the bases, which follows ours and FSDP2's."""
    return next(kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))


def _full_config(config: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


def _mappings(name: str, shape: Shape, family: str) -> list[TensorMapping]:
    if family == "gpt2":
        return [_gpt2_mapping(name, shape)]
    match = re.fullmatch(r"(.+)\.mlp\.(router\.weight|experts\.(gate|up|down))", name)
    if match is not None:
        return map_moe_parameter(match[1], match[3], shape, family)
    return [(map_tensor(name, shape),)]


def _gpt2_mapping(name: str, shape: Shape) -> TensorMapping:
    """Return the slices of GPT-2: linears are `Conv1D`, (inputs, outputs); query, key and value are one."""
    fused = re.fullmatch(r"(.+\.c_attn)\.(query|key|value)\.(weight|bias)", name)
    if fused is not None:
        path, part, kind = fused.groups()
        start = ("query", "key", "value").index(part) * shape[0]
        offset = (0, start) if kind == "weight" else (start,)
        return (TensorSlice(f"{path}.{kind}", 0, shape, offset, is_transposed=kind == "weight"),)
    is_linear = re.search(r"\.(c_fc|c_proj)\.weight$", name) is not None
    return (map_tensor(name, shape, is_transposed=is_linear),)


def _strip_prefix(prefix: str, mapping: TensorMapping) -> TensorMapping:
    return tuple(replace(piece, tensor_name=piece.tensor_name.removeprefix(prefix)) for piece in mapping)
