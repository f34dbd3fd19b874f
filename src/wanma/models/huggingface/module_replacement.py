"""Replacement of transformers modules that no plan could split, or that compute in fp32 only.

Each replacement has the arithmetic of the original, which is found by its kind rather than by its family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from wanma.job.errors import JobError
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.attention import DotProductAttention
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.rms_norm import RMSNorm

ATTENTION_IMPLEMENTATION = "wanma"
"""Name under which transformers finds `attention_forward`."""
MASK_KEYWORD = "wanma_mask"
"""Keyword that carries the mask from the model to `attention_forward`, past transformers' own masks."""

_RMS_NORM_CLASSES = tuple(
    f"{family}RMSNorm" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
)
"""Classes that compute what our `RMSNorm` does; others of that name add one to the weight, or more."""
_MOE_CLASSES = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
_IGNORED_KEYWORDS = (
    "position_ids",
    "use_cache",
    "cache_position",
    "sliding_window",
    "output_attentions",
    "is_causal",
)
"""Keywords without effect here: windows are refused if they are narrower than a sequence."""


def replace_modules(model: PreTrainedModel) -> None:
    """Replace transformers' own modules by ours, in place; call it on the meta device."""
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "GPT2Attention":
            model.set_submodule(path, UnfusedQKVAttention(module))
        elif type(module).__name__ in _MOE_CLASSES:
            model.set_submodule(path, MixtureOfExperts(_moe_config(model.config)))
    for path, module in list(model.named_modules()):
        if type(module).__name__ in _RMS_NORM_CLASSES:
            # Theirs computes in fp32 whatever the precision, and is six operations on a CPU.
            weight = module.get_parameter("weight")
            model.set_submodule(path, RMSNorm(weight.shape[0], eps=module.variance_epsilon))
        elif isinstance(module, Conv1D):
            model.set_submodule(path, nn.Linear(module.nx, module.nf))
    for _, attention in find_attention_modules(model):
        attention.core = DotProductAttention()


def find_attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the attention modules that call `attention_forward`."""
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "scaling"):
            yield path, module


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface by the layer's core, which context parallelism replaces.

    Args:
        module: the attention module, with `core`.
        query: (rows, heads, sequence, head_dim), and so are key and value.
        key: likewise.
        value: likewise.
        attention_mask: must be None: the mask comes as a keyword.
        dropout: must be 0.
        scaling: of the scores; None: 1 / sqrt(head_dim).
        keywords: further options of the interface.

    Returns:
        (rows, sequence, heads, head_dim), and no weights.

    Raises:
        JobError: the model requires an attention option that the core does not have.
    """
    if MASK_KEYWORD not in keywords:
        raise JobError(
            f"model.huggingface: {type(module).__name__} receives no attention mask: its model does not "
            "forward keyword arguments",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        )
    mask = keywords.pop(MASK_KEYWORD)
    unsupported = sorted(
        k for k, v in keywords.items() if v is not None and v is not False and k not in _IGNORED_KEYWORDS
    )
    if unsupported or attention_mask is not None or dropout > 0 or keywords.get("is_causal") is False:
        unsupported += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
        raise JobError(
            f"model.huggingface: {type(module).__name__} uses unsupported attention options: "
            f"{', '.join(unsupported) or 'non-causal mask'}",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        )
    core = cast(DotProductAttention, module.core)
    attended = core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, scaling)
    return attended, None


AttentionInterface.register(ATTENTION_IMPLEMENTATION, attention_forward)


class UnfusedQKVAttention(nn.Module):
    """GPT-2's attention with query, key and value as separate matrices, each split by whole heads."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        hidden = attention.embed_dim
        self.config = attention.config
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.c_attn = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
        self.c_proj = nn.Linear(hidden, hidden)
        self.resid_dropout = attention.resid_dropout
        self.dropout = float(attention.attn_dropout.p)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """Map (rows, sequence, hidden) to the same shape."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in self.c_attn.values()
        )
        keywords.pop("past_key_values", None)
        attend_now: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout if self.training else 0.0
        attended, _ = attend_now(self, query, key, value, scaling=self.scaling, dropout=dropout, **keywords)
        output: Tensor = self.resid_dropout(self.c_proj(attended.flatten(2)))
        return output, None


def _moe_config(config: Any) -> DecoderConfig:
    """Return the dimensions for our mixture of experts, which scores in at least fp32 and can be split."""
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return DecoderConfig(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        width,
        config.vocab_size,
        experts=getattr(config, "num_local_experts", None) or config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        normalize_routing_weights=getattr(config, "norm_topk_prob", True),
    )
