"""Parallel spec of a transformers model, derived from the plans that transformers publishes with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from wanma.models.huggingface.forward_probe import Findings
from wanma.models.huggingface.module_replacement import attentions
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.router import Router
from wanma.models.structure.parallel_spec import Layout, TensorRole, find_blocks

_GPT2 = {
    "transformer.wte": "embedding_rowwise",
    "transformer.wpe": "embedding_rowwise",
    "transformer.h.*.attn.c_attn.*": "colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
"""Tensor plan of GPT-2, for which transformers publishes none.

Its query, key and value are one matrix there (`SplitAttention`).
"""

_ROLES: dict[str, TensorRole] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "head_norm",
}


def blocks_of(model: nn.Module) -> str | None:
    """Return the path of the repeated blocks, of which there may be only one."""
    lists = (path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return find_blocks(model) or next(lists, None)


def layout_of(model: PreTrainedModel, findings: Findings) -> Layout:
    """Return the parallel spec of a model whose modules have been replaced by ours.

    If a style of the published tensor plan has no counterpart here, nothing is split over `tp`.
    """
    config, blocks = model.config, blocks_of(model)
    assert blocks is not None
    tied = cast(dict[str, str], model._tied_weights_keys or {}) if config.tie_word_embeddings else {}
    cores = {_pattern(f"{path}.core", blocks) for path, _ in attentions(model)}
    mixtures = {
        _pattern(path, blocks) for path, m in model.named_modules() if isinstance(m, MixtureOfExperts)
    }
    return Layout(
        blocks=blocks,
        first=findings.first,
        last=findings.last,
        tensor=_roles(model, blocks),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        mask="mask",
        attention=cores.pop() if len(cores) == 1 else None,
        experts=f"{mixtures.pop()}.experts" if len(mixtures) == 1 else None,
        tied=tuple((kept, other) for other, kept in tied.items()),
    )


def _roles(model: PreTrainedModel, blocks: str) -> dict[str, TensorRole]:
    plan = _GPT2 if model.config.model_type == "gpt2" else dict(model._tp_plan or {})
    roles: dict[str, TensorRole] = {}
    for path, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if _matches(path, pattern)), None)
        if isinstance(module, Router):
            roles[path] = "norm"  # it acts on single tokens
        elif path == _head(model) and style == "colwise_gather_output":
            roles[path] = "head"
        elif style in _ROLES:
            is_key_or_value = re.search(r"\.(k_proj|v_proj|key|value)$", path) is not None
            roles[path] = "key_value" if style == "colwise" and is_key_or_value else _ROLES[style]
        elif style is not None and ".experts" not in path:  # routed experts are ours, and split as ours
            return {}
        elif style is None and "norm" in type(module).__name__.lower() and _has_own_parameters(module):
            roles[path] = "norm"
    split = [path for path, role in roles.items() if role in ("column", "key_value")]
    if not split:
        return {}
    inside = re.compile(rf"{re.escape(blocks)}\.\d+\.[^.]+")  # attention or feed-forward network of a block
    gathered = {found[0] for path in split if (found := inside.match(path)) is not None}
    if any(
        role == "norm" and f"{path}.".startswith(tuple(f"{g}." for g in gathered))
        for path, role in roles.items()
    ):
        return {}  # only transformers could say what a split means for a norm inside a rank's own heads
    roles |= dict.fromkeys(gathered, "gathered")
    return _by_pattern(roles, [path for path, _ in model.named_modules()], blocks)


def _by_pattern(roles: Mapping[str, TensorRole], paths: Iterable[str], blocks: str) -> dict[str, TensorRole]:
    """Merge paths into one pattern for all blocks, where all blocks with such a module agree on its style."""
    found: dict[str, set[TensorRole | None]] = {}
    for path in paths:
        found.setdefault(_pattern(path, blocks), set()).add(roles.get(path))
    return {
        pattern if len(found[pattern := _pattern(path, blocks)]) == 1 else path: role
        for path, role in roles.items()
    }


def _pattern(path: str, blocks: str) -> str:
    return re.sub(rf"^{re.escape(blocks)}\.\d+", f"{blocks}.*", path)


def _matches(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".") and fnmatchcase(path, pattern)


def _head(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    return paths[id(head)]


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
