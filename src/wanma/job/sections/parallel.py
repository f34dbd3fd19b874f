"""Sections `[parallel]` and `[servers]` of a job file: mesh dimensions, methods, parameter servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from wanma.job.sections.base import Section

Shard = Literal["none", "optimizer", "gradients", "parameters"]
ContextParallelMethod = Literal["ring", "all_to_all"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "host", "disk"]
CollectiveTransport = Literal["auto", "shared_memory", "gloo"]
AllReduceAlgorithm = Literal["backend", "ring", "tree", "halving_doubling", "hierarchical"]
Compression = Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"]
OuterCompression = Literal["none", "bf16", "int8"]
SyncMethod = Literal["local_sgd", "diloco", "delayed"]
OuterOffload = Literal["none", "host"]
EmbeddingMode = Literal["dense", "auto", "row_wise", "table_wise", "replicated"]
TableSharding = Literal["row_wise", "table_wise", "replicated"]
ServerMode = Literal["synchronous", "bounded", "asynchronous"]
Approximation = Literal["bf16", "fp8", "compression", "staleness"]
"""Approximations, which change the mathematics and are never chosen unless a job allows them by name."""


class CompressionGroupSection(Section):
    """Parameters, selected by name, whose gradients are compressed by another method."""

    match: str = Field(description="shell pattern on the full parameter name, e.g. '*embedding*'")
    compression: Compression = Field(description="compression of these gradients")


def _list_to_tuple(value: Any) -> Any:
    """Convert a list to a tuple; needed because `parallel` may be a word and is validated beforehand."""
    return tuple(value) if isinstance(value, list) else value


class ParallelSection(Section):
    """Layout over the ranks. Rank order: pp outermost, then dp_replicate, dp_shard, cp, tp innermost."""

    auto: bool = Field(
        False, description='let the planner choose the layout; also written `parallel = "auto"`'
    )
    allow: list[Approximation] = Field(
        default_factory=list,
        description="approximations, which change the numbers: those that auto may choose, and staleness for "
        "parameter servers that are not synchronous",
    )
    pp: int = Field(1, ge=1, le=1_000_000, description="pipeline parallelism: ranks per pipeline")
    dp_replicate: int = Field(1, ge=1, le=1_000_000, description="replicas of the model (data parallelism)")
    dp_shard: int = Field(1, ge=1, le=1_000_000, description="ranks that share one replica's state (ZeRO)")
    cp: int = Field(1, ge=1, le=1_000_000, description="context parallelism: ranks that share one sequence")
    tp: int = Field(1, ge=1, le=1_000_000, description="tensor parallelism: ranks that share each matrix")
    ep: int = Field(1, ge=1, le=1_000_000, description="expert parallelism: ranks that share the experts")
    shard: Shard | None = Field(
        None, description="state that dp_shard shards: ZeRO 0-3; default: parameters when dp_shard > 1"
    )
    micro_batch: int | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="maximum samples per forward pass and data rank; default: planned",
    )
    batch_shares: list[PositiveInt] = Field(
        default_factory=list,
        description="integer weight of each data rank in the global batch (unlike devices); default: equal",
    )
    load_balancing: Literal["auto", "off", "on"] = Field(
        "auto",
        description="adapt batch shares to the speed of the ranks during the run; auto: if the planner "
        "gave unlike devices unequal shares, and not under train.deterministic",
    )
    batch_share_schedule: list[Annotated[tuple[int, list[PositiveInt]], BeforeValidator(_list_to_tuple)]] = (
        Field(
            default_factory=list,
            description="[[step, batch_shares], ...]: shares from that step on, as recorded by a run with "
            "load_balancing",
        )
    )
    sequence_parallel: bool = Field(
        True,
        description="tp: shard activations along the sequence between sharded matrices (sequence "
        "parallelism)",
    )
    cp_method: ContextParallelMethod = Field(
        "ring", description="cp: method by which attention sees the complete sequence"
    )
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    virtual_stages: int | None = Field(
        None,
        gt=0,
        le=1_024,
        description="pipeline stages per rank; default: as many as the schedule needs (1 or 2)",
    )
    stage_cuts: list[int] = Field(
        default_factory=list,
        description="first block of every pipeline stage but the first; default: by cost",
    )
    recompute: Literal["none", "selective", "full", "auto"] = Field(
        "none", description="activations that backward recomputes; auto: as few as fit in memory"
    )
    recompute_share: float = Field(1.0, gt=0, le=1, description="share of the blocks that recompute")
    overlap: bool = Field(
        True,
        description="reduce gradients and gather parameters during backward; false: one after another",
    )
    bucket_bytes: int | None = Field(
        None,
        gt=0,
        le=2**40,
        description="dp_replicate: maximum bytes of gradients in one message; default: the fewest that "
        "fill the network",
    )
    all_reduce: Literal["auto", "backend", "ring", "tree", "halving_doubling", "hierarchical"] = Field(
        "auto",
        description="dp_replicate: algorithm of the gradients' all-reduce: the transport's own (backend), "
        "fewest bytes (ring), fewest messages (tree), few of both (halving_doubling), within each node first "
        "(hierarchical); auto: between nodes of CPU ranks the fastest by forecast, else backend",
    )
    offload_parameters: Offload = Field(
        "none", description="memory that holds parameters while unused: device (none), host, disk"
    )
    offload_optimizer: Offload = Field(
        "none", description="memory that holds optimizer state between steps: device (none), host, disk"
    )
    offload_activations: Offload = Field(
        "none", description="memory that holds activations until backward: device (none), host, disk"
    )
    compile: bool = Field(False, description="apply torch.compile to each block; needs a C++ compiler on CPU")
    collectives: CollectiveTransport = Field(
        "auto",
        description="transport of collectives on CPUs: memory shared by the ranks of one node "
        "(shared_memory), or TCP (gloo); auto: shared_memory on one node that has a C++ compiler",
    )
    embedding: EmbeddingMode = Field(
        "dense",
        description="recommenders: placement of embedding tables: as parameters like any other (dense), rows "
        "split over the data ranks, each table on one of them, or on all; auto: by table",
    )
    embedding_tables: dict[str, TableSharding] = Field(
        default_factory=dict,
        description="embedding by table: a shell pattern of names = row_wise, table_wise or replicated; the "
        "first match applies, all others: embedding",
    )
    embedding_memory_bytes: int | None = Field(
        None,
        gt=0,
        le=2**60,
        description="memory of a rank's device for rows of its embedding tables and their optimizer state; "
        "all rows lie in a file in cluster.scratch, and those in use in memory; with servers.count "
        "of worker 0; default: all rows in memory",
    )
    compression: Compression = Field(
        "none",
        description="compression of gradients before the reduction: rounded (bf16, fp16, int8), largest "
        "elements (topk), or low-rank matrices (powersgd); changes the numbers",
    )
    compression_share: float = Field(
        0.01, gt=0, le=1, description="topk: share of each tensor's elements that a rank sends"
    )
    compression_rank: int = Field(4, ge=1, le=100_000, description="powersgd: rank of the matrices")
    compression_from_step: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="first optimizer steps without compression",
    )
    compression_groups: list[CompressionGroupSection] = Field(
        default_factory=list,
        description="compression by parameter; the first match applies, all others: compression",
    )
    synchronize: Literal["every_step", "local_sgd", "diloco", "delayed"] = Field(
        "every_step",
        description="synchronization between sites, groups of replicas with slow links between them: "
        "local_sgd and diloco exchange weights every synchronize_every steps, delayed applies gradients "
        "staleness steps late; these change the numbers",
    )
    sites: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="groups of replicas with slow links between them; default: dp_replicate",
    )
    synchronize_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000_000,
        description="local_sgd, diloco: steps between two exchanges of a fragment; default: 100",
    )
    synchronous_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="local_sgd, diloco: first steps of the run, synchronized at every step",
    )
    outer_learning_rate: float | None = Field(
        None, gt=0, le=1_000, description="diloco: learning rate of the outer optimizer; default: 0.7"
    )
    outer_momentum: float | None = Field(
        None, ge=0, lt=1, description="diloco: Nesterov momentum of the outer optimizer; default: 0.9"
    )
    fragments: int = Field(
        1, ge=1, le=100_000, description="local_sgd, diloco: parts of the model that are exchanged in turn"
    )
    overlap_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="local_sgd, diloco: steps during which an exchange runs in the background; 0: steps "
        "wait for it",
    )
    overlap_mixing_factor: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="overlap_steps: share of its own weights that a site keeps when an exchange arrives; "
        "default: 0.5",
    )
    outer_compression: OuterCompression = Field(
        "none", description="local_sgd, diloco: rounding of the exchanged tensors"
    )
    outer_offload: OuterOffload = Field(
        "none",
        description="local_sgd, diloco: memory that holds outer weights and momentum: device (none), host",
    )
    staleness: int | None = Field(
        None, ge=0, le=1_000, description="delayed: delay of gradients between sites, in steps; default: 1"
    )


MAX_SERVERS = 1_024


class ServersSection(Section):
    """Parameter servers, which hold the parameters and the optimizer for all workers."""

    count: int = Field(
        0,
        ge=0,
        le=MAX_SERVERS,
        description="server processes, which share all parameters by rows, spread over the nodes; 0: none; "
        "`wanma resize RUN --servers N` changes the number of a run that trains",
    )
    mode: ServerMode = Field(
        "synchronous",
        description="synchronous: workers share each global batch, same numbers as one process; "
        "asynchronous: each worker takes global batches of its own and waits for no other; bounded: the "
        "same, with at most `staleness` updates between a worker's read and its update. The last two need "
        "parallel.allow = ['staleness']",
    )
    staleness: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="bounded: most updates of other workers between a worker's read and its update; "
        "default: 4",
    )
    replicas: Literal[1, 2] = Field(
        1,
        description="servers that hold each shard; 2: an update is acknowledged when both have it, so that "
        "no killed server loses one",
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="rounding of the gradients that workers push; changes the numbers"
    )

    @model_validator(mode="after")
    def _check_combination(self) -> ServersSection:
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if name != "count" and getattr(self, name) != field.default]
        if self.count == 0 and changed:
            raise ValueError(f"{changed[0]} has no effect without count")
        if self.count and self.replicas > self.count:
            raise ValueError(f"replicas = {self.replicas} needs count of at least {self.replicas}")
        if self.staleness is not None and self.mode != "bounded":
            raise ValueError("staleness has an effect only with mode = 'bounded'")
        return self
