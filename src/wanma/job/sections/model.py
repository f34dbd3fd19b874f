"""Section `[model]` of a job file: source, dimensions and adapters of the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.sections.recommender import RecommenderSection


class ModelSection(Section):
    """Model: a preset, a family with dimensions, a Hugging Face config, or a custom factory."""

    preset: str | None = Field(None, description="named model, e.g. 'gpt-10m', 'llama-3-8b', 'resnet-18'")
    family: Literal["decoder", "convnet", "resnet", "recommender"] | None = Field(
        None, description="model family, built from the dimensions below"
    )
    kind: Literal["matrix_factorization", "two_tower", "dlrm", "dcnv2"] | None = Field(
        None, description="recommender: architecture"
    )
    factory: str | None = Field(None, description="'package.module:function' returning an nn.Module")
    huggingface: str | None = Field(
        None, description="config.json of a transformers causal model, or the folder that holds it"
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory; or keys of the config to replace"
    )
    loss: str | None = Field(
        None,
        description="'package.module:function' (output, targets) -> loss per target; default: cross-entropy",
    )
    layers: int | None = Field(None, gt=0, le=1_024, description="decoder: number of blocks")
    hidden: int | None = Field(None, gt=0, le=10_000_000, description="decoder: width of the residual stream")
    heads: int | None = Field(None, gt=0, le=1_000_000, description="decoder: attention heads")
    kv_heads: int | None = Field(
        None, gt=0, le=1_000_000, description="decoder: key/value heads; default: heads"
    )
    feed_forward: int | None = Field(
        None,
        gt=0,
        le=100_000_000,
        description="decoder: inner width of the feed-forward network; default: 8/3 × hidden, or 4 × with "
        "'gelu'",
    )
    activation_function: Literal["swiglu", "gelu"] | None = Field(
        None,
        description="decoder: feed-forward network of three matrices ('swiglu', default) or of two ('gelu')",
    )
    vocabulary: int | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="decoder: number of tokens; default: the tokenizer's, rounded up to 64",
    )
    rope_theta: float | None = Field(
        None, gt=0, le=1e12, description="decoder: base of the rotary frequencies"
    )
    tie_embeddings: bool | None = Field(
        None, description="decoder: share input and output embeddings (weight tying)"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="decoder: probability of residual dropout, keyed by sample"
    )
    experts: int | None = Field(
        None, gt=1, le=100_000, description="decoder: routed experts per block; default: none (dense)"
    )
    experts_per_token: int | None = Field(
        None, gt=0, le=100_000, description="decoder: routed experts per token; default: 2"
    )
    shared_experts: int | None = Field(
        None, ge=0, le=100_000, description="decoder: experts that every token uses"
    )
    expert_feed_forward: int | None = Field(
        None, gt=0, le=100_000_000, description="decoder: inner width of one expert; default: feed_forward"
    )
    dense_layers: int | None = Field(
        None, ge=0, le=1_024, description="decoder: number of first blocks without experts"
    )
    router: Literal["softmax", "sigmoid"] | None = Field(
        None, description="decoder: function from router scores to weights; default: softmax"
    )
    balance: Literal["none", "bias", "loss"] | None = Field(
        None,
        description="decoder: load balancing of experts by a bias that follows the load (default), or by "
        "a loss",
    )
    balance_rate: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="decoder: step of the bias (default: 1e-3), or weight of the loss (default: 1e-2)",
    )
    balance_group: int = Field(
        1,
        gt=0,
        le=1_000_000_000,
        description="decoder: samples over which a balancing loss and the expert capacity are counted",
    )
    capacity_factor: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="decoder: expert capacity in tokens, as a multiple of an even share; 0: no token is "
        "dropped",
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="inner dimension of low-rank adapters (LoRA), then the only trained parameters; 0: none",
    )
    lora_alpha: float = Field(
        16.0, gt=0, le=1_000_000, description="scale of an adapter's output: lora_alpha / lora_rank"
    )
    lora_targets: list[str] = Field(
        default_factory=lambda: ["*.attention.*", "*.self_attn.*_proj", "*.attn.c_*"],
        min_length=1,
        description="shell patterns on the paths of the linear layers that get an adapter",
    )
    depth: Literal[18, 50] | None = Field(None, description="resnet: number of layers")
    classes: int | None = Field(
        None, gt=1, le=1_000_000_000, description="vision: number of classes; default: the data's"
    )
    channels: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: input channels; default: the data's"
    )
    image_size: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: height and width in pixels; default: the data's"
    )
    batch_norm_group: int = Field(
        32,
        gt=0,
        le=1_000_000_000,
        description="samples that share one batch-normalization statistic, in any layout",
    )
    recommender: RecommenderSection = Field(
        default_factory=RecommenderSection, description="dimensions of a recommender"
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSection:
        sources = ("preset", "family", "factory", "huggingface")
        given_sources = [k for k in sources if getattr(self, k) is not None]
        if len(given_sources) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(sources)} (given: {', '.join(given_sources) or 'none'})"
            )
        return self
