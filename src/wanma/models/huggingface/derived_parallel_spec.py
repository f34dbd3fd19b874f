"""Parallel spec of a transformers model, derived from the plans that transformers publishes with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from wanma.models.huggingface.forward_probe import ProbeResult
from wanma.models.huggingface.installed_transformers import published_tp_plan
from wanma.models.huggingface.module_replacement import find_attention_modules
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.router import RouterGate
from wanma.models.structure.parallel_spec import ParallelSpec, TensorParallelStyle, find_block_container

_GPT2_TP_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "transformer.wpe": "embedding_rowwise",
    "transformer.h.*.attn.c_attn.*": "colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
"""Tensor plan of GPT-2, for which transformers publishes none.

Its query, key and value are one matrix there (`UnfusedQKVAttention`).
"""

_OUTPUT_LAYER_STYLES = ("colwise_gather_output", "colwise_rep")
"""Names of the output layer's style: from transformers 5.1 on, and before."""

_STYLES: dict[str, TensorParallelStyle] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "head_norm",
}


def find_block_list(model: nn.Module) -> str | None:
    """Return the path of the repeated blocks, of which there may be only one."""
    lists = (path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return find_block_container(model) or next(lists, None)


def derive_parallel_spec(model: PreTrainedModel, probe_result: ProbeResult) -> ParallelSpec:
    """Return the parallel spec of a model whose modules have been replaced by ours.

    If a style of the published tensor plan has no counterpart here, nothing is split over `tp`.
    """
    config, blocks = model.config, find_block_list(model)
    assert blocks is not None
    tied = cast(dict[str, str], model._tied_weights_keys or {}) if config.tie_word_embeddings else {}
    cores = {_pattern(f"{path}.core", blocks) for path, _ in find_attention_modules(model)}
    mixtures = {
        _pattern(path, blocks) for path, m in model.named_modules() if isinstance(m, MixtureOfExperts)
    }
    return ParallelSpec(
        blocks=blocks,
        first_stage_modules=probe_result.first_stage_modules,
        last_stage_modules=probe_result.last_stage_modules,
        tensor_parallel_styles=_derive_styles(model, blocks),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        mask_module="mask",
        attention_cores=cores.pop() if len(cores) == 1 else None,
        expert_modules=f"{mixtures.pop()}.experts" if len(mixtures) == 1 else None,
        tied_parameters=tuple((source, copy) for copy, source in tied.items()),
    )


def _derive_styles(model: PreTrainedModel, blocks: str) -> dict[str, TensorParallelStyle]:
    plan = _GPT2_TP_PLAN if model.config.model_type == "gpt2" else published_tp_plan(model)
    roles: dict[str, TensorParallelStyle] = {}
    for path, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if _matches(path, pattern)), None)
        if isinstance(module, RouterGate):
            roles[path] = "norm"  # it acts on single tokens
        elif path == _output_layer_path(model) and style in _OUTPUT_LAYER_STYLES:
            roles[path] = "head"
        elif style in _STYLES:
            is_key_or_value = re.search(r"\.(k_proj|v_proj|key|value)$", path) is not None
            roles[path] = "key_value" if style == "colwise" and is_key_or_value else _STYLES[style]
        elif style is not None and ".experts" not in path:  # routed experts are ours, and split as ours
            return {}
        elif style is None and "norm" in type(module).__name__.lower() and _has_own_parameters(module):
            roles[path] = "norm"
    split = [path for path, role in roles.items() if role in ("column", "key_value")]
    if not split:
        return {}
    submodule_pattern = re.compile(
        rf"{re.escape(blocks)}\.\d+\.[^.]+"
    )  # attention or feed-forward network of a block
    gathered = {match[0] for path in split if (match := submodule_pattern.match(path)) is not None}
    if any(
        role == "norm" and f"{path}.".startswith(tuple(f"{g}." for g in gathered))
        for path, role in roles.items()
    ):
        return {}  # only transformers could say what a split means for a norm inside a rank's own heads
    roles |= dict.fromkeys(gathered, "gathered")
    return _merge_into_patterns(roles, [path for path, _ in model.named_modules()], blocks)


def _merge_into_patterns(
    styles: Mapping[str, TensorParallelStyle], paths: Iterable[str], blocks: str
) -> dict[str, TensorParallelStyle]:
    """Merge paths into one pattern for all blocks, where all blocks with such a module agree on its style."""
    styles_by_pattern: dict[str, set[TensorParallelStyle | None]] = {}
    for path in paths:
        styles_by_pattern.setdefault(_pattern(path, blocks), set()).add(styles.get(path))
    return {
        pattern if len(styles_by_pattern[pattern := _pattern(path, blocks)]) == 1 else path: role
        for path, role in styles.items()
    }


def _pattern(path: str, blocks: str) -> str:
    return re.sub(rf"^{re.escape(blocks)}\.\d+", f"{blocks}.*", path)


def _matches(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".") and fnmatchcase(path, pattern)


def _output_layer_path(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    return paths[id(head)]


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
