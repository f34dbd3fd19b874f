"""Differences between versions of transformers, and the versions with which each family can be trained."""

from __future__ import annotations

import functools
import math
import sys
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import generic

from wanma.job.errors import JobError

VERSION: str = transformers.__version__
"""Version of the installed transformers."""

_FIRST_VERSIONS = {"gpt2": ((5, 4), "its model does not pass the attention mask on, or scales scores itself")}
"""First version with which a family can be trained, and the reason."""


def require_family(model_type: str) -> None:
    """Reject a family whose layout in the installed version is not the one that wanma splits.

    Raises:
        JobError: names the family, both versions and the reason.
    """
    first, reason = _FIRST_VERSIONS.get(model_type, ((0, 0), ""))
    if version_tuple(VERSION) < first:
        needed = ".".join(map(str, first))
        raise JobError(
            f"model.huggingface: {model_type} of transformers {VERSION} is not supported: {reason}",
            f"pip install 'transformers>={needed}', or pass the model as model.factory",
        )


def version_tuple(version: str) -> tuple[int, int]:
    """Return major and minor number of a version such as "5.4.0"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def allow_autocast_on_meta() -> None:
    """Let forwards run on the meta device with transformers before 5.4, which ask torch for its autocast.

    Torch has no autocast there. Modules that are already imported hold the function, too.
    """
    if version_tuple(VERSION) >= (5, 4):
        return
    original: Any = generic.maybe_autocast

    @functools.wraps(original)
    def maybe_autocast(device_type: str, *arguments: Any, **keywords: Any) -> Any:
        return nullcontext() if device_type == "meta" else original(device_type, *arguments, **keywords)

    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and vars(module).get("maybe_autocast") is original:
            module.maybe_autocast = maybe_autocast  # type: ignore[attr-defined]  # looked for


def scales_residual_projections(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return True if transformers draws GPT-2's residual projections with the smaller deviation.

    Before 5.15 its rule looks for them by a name that no parameter has, and they begin like all others.
    """
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        network = GPT2MLP(1, config)
        nn.init.constant_(network.c_proj.weight, math.nan)
        model._init_weights(network)
    return not bool(network.c_proj.weight.isnan().any())


def published_tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the tensor plan of a model by pattern of its modules' paths, as current versions complete it.

    Before 5.15 a model's own plan is its base model's alone, without the output layer, which its class
    names. Before 5.21 plans leave out the embedding, and before 5.3 the norms of heads.
    """
    plan = dict(model._tp_plan or {})
    if not plan:
        return plan
    base = model.base_model_prefix
    added = dict(type(model)._tp_plan or {})
    if isinstance(getattr(model.base_model, "embed_tokens", None), nn.Embedding):
        added[f"{base}.embed_tokens"] = "embedding_rowwise"
    if model.config.model_type in ("qwen3", "qwen3_moe"):
        for norm in ("q_norm", "k_norm"):
            added[f"{base}.layers.*.self_attn.{norm}"] = "replicated_with_grad_allreduce"
    return {**added, **plan}
