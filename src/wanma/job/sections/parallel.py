"""`[parallel]` of a job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from wanma.job.sections.base import Section

Shard = Literal["nothing", "optimizer", "gradients", "parameters"]
ContextKind = Literal["ring", "all_to_all"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["nothing", "host", "disk"]
Collectives = Literal["auto", "shared", "gloo"]
Compression = Literal["nothing", "bf16", "fp16", "int8", "topk", "powersgd"]
OuterCompression = Literal["nothing", "bf16", "int8"]
SiteKind = Literal["local_sgd", "diloco", "stale"]
OuterPlace = Literal["nothing", "host"]
Approximation = Literal["bf16", "fp8", "compression"]
"""Approximations, which change the mathematics and are never chosen unless a job allows them by name."""


class CompressionGroupSection(Section):
    """Parameters whose name matches have their gradients summed in another way."""

    match: str = Field(description="shell pattern on the full parameter name, e.g. '*embedding*'")
    compression: Compression = Field(description="what ranks exchange of these gradients")


def _pair(value: Any) -> Any:
    """A list is good for a tuple here too, where `parallel` may be a word and so is looked at beforehand."""
    return tuple(value) if isinstance(value, list) else value


class ParallelSection(Section):
    """Layout over the ranks. Rank order: pp outermost, then dp_replicate, dp_shard, cp, tp innermost."""

    auto: bool = Field(False, description='let wanma choose; also written `parallel = "auto"`')
    allow: list[Approximation] = Field(
        default_factory=list, description="auto: what it may choose that changes the numbers"
    )
    pp: int = Field(1, ge=1, le=1_000_000, description="pipeline stages")
    dp_replicate: int = Field(1, ge=1, le=1_000_000, description="replicas of the model")
    dp_shard: int = Field(1, ge=1, le=1_000_000, description="ranks that share one replica's state (ZeRO)")
    cp: int = Field(1, ge=1, le=1_000_000, description="ranks that share one sequence")
    tp: int = Field(1, ge=1, le=1_000_000, description="ranks that share each matrix (tensor parallel)")
    ep: int = Field(1, ge=1, le=1_000_000, description="ranks that share the experts")
    shard: Shard | None = Field(
        None, description="what dp_shard shards: ZeRO 0-3; default: parameters when dp_shard > 1"
    )
    micro_batch: int | None = Field(
        None, gt=0, le=1_000_000_000, description="samples per forward pass and rank; default: planned"
    )
    batch_shares: list[PositiveInt] = Field(
        default_factory=list,
        description="samples of each data rank in every sum of them (unlike devices); default: equal",
    )
    balance: Literal["auto", "off", "on"] = Field(
        "auto",
        description="move shares of the batch while the run goes on, by how fast ranks are; auto: where the "
        "planner gave unlike devices unlike shares, and not under train.deterministic",
    )
    share_moves: list[Annotated[tuple[int, list[PositiveInt]], BeforeValidator(_pair)]] = Field(
        default_factory=list,
        description="[[step, batch_shares], ...]: other shares from that step on, as a run with balance told",
    )
    sequence: bool = Field(
        True, description="tp: ranks also share the sequence between the split matrices (sequence parallel)"
    )
    context: ContextKind = Field("ring", description="cp: how attention sees the whole sequence")
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    virtual_stages: int | None = Field(
        None,
        gt=0,
        le=1_024,
        description="pipeline stages per rank; default: what the schedule needs (1 or 2)",
    )
    stage_cuts: list[int] = Field(
        default_factory=list, description="first block of every stage but the first; default: by cost"
    )
    recompute: Literal["none", "selective", "full", "auto"] = Field(
        "none", description="what backward computes again; auto: as little as fits in memory"
    )
    recompute_share: float = Field(1.0, gt=0, le=1, description="share of the blocks that recompute")
    overlap: bool = Field(
        True,
        description="sum gradients and gather parameters while backward goes on; false: one after another",
    )
    bucket_bytes: int | None = Field(
        None,
        gt=0,
        le=2**40,
        description="dp_replicate: of gradients in one message; default: the fewest that fill the network",
    )
    hierarchical: Literal["auto"] | bool = Field(
        "auto",
        description="dp_replicate on several nodes: sum within each first, then between; auto: if faster",
    )
    offload_parameters: Offload = Field("nothing", description="where parameters wait: device, host, disk")
    offload_optimizer: Offload = Field("nothing", description="where optimizer state waits between steps")
    offload_activations: Offload = Field("nothing", description="where activations wait for backward")
    compile: bool = Field(False, description="torch.compile each block; needs a C++ compiler on CPU")
    collectives: Collectives = Field(
        "auto",
        description="on CPUs: over memory that the ranks of one machine share (shared), or TCP (gloo); "
        "auto: shared where they are on one machine that has a C++ compiler",
    )
    compression: Compression = Field(
        "nothing",
        description="of gradients that ranks sum: rounded (bf16, fp16, int8), their largest elements (topk), "
        "or thin matrices (powersgd); changes the numbers",
    )
    compression_share: float = Field(
        0.01, gt=0, le=1, description="topk: share of each tensor's elements that a rank sends"
    )
    compression_rank: int = Field(4, ge=1, le=100_000, description="powersgd: rank of the matrices")
    compression_from_step: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="optimizer steps before it begins, whose gradients are summed whole",
    )
    compression_groups: list[CompressionGroupSection] = Field(
        default_factory=list, description="first match wins; all others: compression"
    )
    synchronize: Literal["every_step", "local_sgd", "diloco", "stale"] = Field(
        "every_step",
        description="between sites, groups of replicas with slow links between them: local_sgd and diloco "
        "exchange weights every so many steps, stale has gradients come late; these change the numbers",
    )
    sites: int | None = Field(
        None, ge=1, le=1_000_000, description="groups of replicas; default: dp_replicate"
    )
    synchronize_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000_000,
        description="local_sgd, diloco: steps from one exchange to the next; default: 100",
    )
    synchronous_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="local_sgd, diloco: first steps, which all sites take together",
    )
    outer_rate: float | None = Field(
        None, gt=0, le=1_000, description="diloco: learning rate of the outer update; default: 0.7"
    )
    outer_momentum: float | None = Field(
        None, ge=0, lt=1, description="diloco: Nesterov momentum of the outer update; default: 0.9"
    )
    fragments: int = Field(
        1, ge=1, le=100_000, description="local_sgd, diloco: parts of the model that are exchanged in turn"
    )
    overlap_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="local_sgd, diloco: steps beside which an exchange runs; 0: it is waited for",
    )
    overlap_mix: float | None = Field(
        None, ge=0, lt=1, description="overlap_steps: what a site keeps of its own weights then; default: 0.5"
    )
    outer_compression: OuterCompression = Field(
        "nothing", description="local_sgd, diloco: what is exchanged is rounded to"
    )
    outer_offload: OuterPlace = Field(
        "nothing", description="local_sgd, diloco: where outer weights and momentum wait: device, host"
    )
    staleness: int | None = Field(
        None, ge=0, le=1_000, description="stale: steps by which gradients are late; default: 1"
    )
