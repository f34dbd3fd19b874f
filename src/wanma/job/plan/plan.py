"""Execution plan as pure data: sizes of the mesh dimensions and everything the runtime must obey.

`Plan` also gives a rank's coordinates in the mesh (`coordinates`), its rows of the global batch
(`batch_rows`), and their micro-batches (`micro_batches`). These are functions of the plan alone, so that
tests need no processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from wanma.job.file.renamed_keys import VALUES, with_new_names
from wanma.job.plan.placement import ReplicaPlacement
from wanma.job.plan.stage_order import V_SHAPED_SCHEDULES, stages_of_pipeline_rank
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.parallel import (
    AllReduceAlgorithm,
    Compression,
    ContextParallelMethod,
    EmbeddingMode,
    Offload,
    Recompute,
    Schedule,
    Shard,
    TableSharding,
)
from wanma.job.sections.train import Precision

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh dimensions, outermost first: the one that communicates most stays on the fastest links."""

OPTIMIZER_CHUNK_PARAMETERS = 1 << 23
"""Parameters per chunk of an offloaded optimizer state that is on the device at once."""

DEFAULT_BUCKET_BYTES = 25 << 20
"""Maximum bytes of unsharded gradients in one all-reduce, as in DDP. Many small messages cost more switches
between ranks than the copy saves, and a single message would be a second copy of all gradients."""
MIN_BUCKET_BYTES = 1 << 20
"""Minimum bytes of unsharded gradients in one all-reduce."""


@dataclass(frozen=True)
class Plan:
    """Execution plan of a run.

    `ep` subdivides the data-parallel dimensions, so it is no factor of `world_size`.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: Shard = "none"
    sequence_parallel: bool = False
    """Sequence parallelism: activations between split matrices are sharded along the sequence over `tp`."""
    cp_method: ContextParallelMethod = "ring"
    """Context-parallel method: the way in which attention sees the complete sequence over `cp`."""
    micro_batch: int = 1
    """Maximum samples in one forward pass of one data rank."""
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    """Pipeline stages per rank."""
    stage_cuts: tuple[int, ...] = ()
    """First block of every pipeline stage but the first; `pp` × `virtual_stages` − 1 of them."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of the blocks that recompute, spread evenly over each stage; 0 .. 1."""
    offload_parameters: Offload = "none"
    offload_optimizer: Offload = "none"
    offload_activations: Offload = "none"
    compile: bool = False
    precision: Precision = "fp32"
    fp8: bool = False
    compression: Compression = "none"
    """Gradient compression method (`collectives.compression`)."""
    compression_share: float = 0.01
    """Share of each tensor's elements that top-k compression sends; 0 .. 1."""
    compression_rank: int = 4
    """Rank of the matrices of PowerSGD."""
    compression_from_step: int = 0
    """Optimizer steps before compression begins."""
    compression_groups: tuple[tuple[str, Compression], ...] = ()
    """Compression by parameter: (pattern of names, method); the first match replaces `compression`."""
    embedding: EmbeddingMode = "dense"
    embedding_tables: tuple[tuple[str, TableSharding], ...] = ()
    """Placement of embedding tables; instead of `embedding` the first (pattern of names, sharding) counts."""
    embedding_memory_bytes: int | None = None
    """Memory of a rank for rows of embedding tables, all of which lie on its disk; None: memory holds all."""
    overlap: bool = True
    """Overlap of gradient reduction and parameter gathering with backward."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Maximum bytes of gradients that replicas reduce in one message; a larger tensor is sent alone."""
    all_reduce: AllReduceAlgorithm = "backend"
    """Algorithm of the replicas' all-reduce, NCCL's or of `collectives.algorithms`; "backend": its choice."""
    device: str = "cpu"
    threads_per_rank: int = 1
    approximate: tuple[str, ...] = ()
    """Approximations that change the mathematics; empty for an exact plan."""
    batch_shares: tuple[int, ...] = ()
    """Integer weight of each data rank in the global batch; empty: as equal as possible."""
    placement: tuple[ReplicaPlacement, ...] = ()
    """Replica placement on heterogeneous nodes, in the order of the data ranks; empty for a regular mesh.

    With a placement, `pp` and `tp` are those of the deepest and widest replica, `dp_replicate` counts all
    replicas, and each has its own micro-batch and recompute. Its `shard` is over equal replicas, and
    `batch_shares` gives the share of each."""
    synchronization: Synchronization | None = None
    """Cross-site synchronization instead of a gradient sum at every step; None: all replicas sum.

    Sites are the outermost dimension of the rank order, before `pp`: traffic within a site stays on its
    links."""

    def __post_init__(self) -> None:
        if self.batch_shares and (
            len(self.batch_shares) != self.data_parallel_size or min(self.batch_shares) < 1
        ):
            raise ValueError(
                f"batch_shares needs one number of at least 1 for each of {self.data_parallel_size} data "
                f"ranks, and has {len(self.batch_shares)}"
            )
        if self.placement:
            pp = max(len(replicas.places) for replicas in self.placement)
            tp = max(stage.tp for replicas in self.placement for stage in replicas.places)
            count = sum(replicas.count for replicas in self.placement)
            if (pp, count, 1, 1, tp, 1) != (*(getattr(self, axis) for axis in MESH_DIMS), self.ep):
                raise ValueError(
                    f"placed replicas make pp = {pp}, dp_replicate = {count}, tp = {tp} and nothing else"
                )
            if not self.batch_shares:
                raise ValueError("placed replicas need batch_shares")
        if self.synchronization is not None and self.dp_replicate % self.synchronization.sites:
            raise ValueError(
                f"{self.synchronization.sites} sites cannot share dp_replicate = {self.dp_replicate} evenly"
            )

    def with_changes(self, **changes: Any) -> Plan:
        """Return a copy with changed fields, as `dataclasses.replace`, in a fraction of its time.

        Searches build plans by the ten thousand.

        Raises:
            TypeError: a plan has no field of that name.
            ValueError: the changed plan is invalid.
        """
        values = {**self.__dict__, **changes}
        if len(values) != len(self.__dict__):
            unknown = ", ".join(sorted(changes.keys() - self.__dict__.keys()))
            raise TypeError(f"a plan has no {unknown}")
        plan = object.__new__(Plan)
        plan.__dict__.update(values)
        plan.__post_init__()
        return plan

    @property
    def world_size(self) -> int:
        if self.placement:
            return sum(replicas.device_count for replicas in self.placement)
        return math.prod(getattr(self, axis) for axis in MESH_DIMS)

    @property
    def sites(self) -> int:
        """Groups of replicas that do not synchronize at every step; 1 without synchronization."""
        return 1 if self.synchronization is None else self.synchronization.sites

    @property
    def ranks_per_site(self) -> int:
        """Ranks of one site; all ranks if there is one site."""
        return self.world_size // self.sites

    @property
    def ranks_per_pipeline_rank(self) -> int:
        """Ranks of one site that hold the stages of one pipeline rank: the stride between pipeline ranks."""
        return self.world_size // self.sites // self.pp

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel size: ranks that read different samples, over both data-parallel dimensions."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_group_size(self) -> int:
        """Ranks that share one copy of the state: those of `dp_shard`, and of `cp` too."""
        return 1 if self.shard == "none" else self.dp_shard * self.cp

    @property
    def replicate_group_size(self) -> int:
        """Copies of each stage's state, within a site."""
        return self.dp_replicate // self.sites * self.dp_shard * self.cp // self.shard_group_size

    @property
    def computes_on_master_weights(self) -> bool:
        """True if ranks compute on the tensors that the optimizer updates, neither gathered nor cast."""
        return (
            self.device == "cpu"
            and self.shard_group_size == 1
            and self.ep == 1
            and self.precision in ("fp32", "fp64")
            and self.offload_parameters == "none"
        )

    @property
    def all_reduces_by_messages(self) -> bool:
        """True if replicas all-reduce by an algorithm of `collectives.algorithms`."""
        return self.all_reduce != "backend" and self.computes_on_master_weights

    @property
    def reshards_after_forward(self) -> bool:
        """True if ranks gather parameters for each use of a block, and free them after it."""
        # A pipeline's schedule decides itself when a stage's parameters are gathered and freed.
        return (self.shard == "parameters" or self.offload_parameters != "none") and self.pp == 1

    @property
    def compression_methods(self) -> frozenset[Compression]:
        """Compression methods of the gradients; empty if all are exchanged uncompressed."""
        if self.compression == "none" and not self.compression_groups:
            return frozenset()
        methods = {self.compression, *(method for _, method in self.compression_groups)}
        return frozenset(methods - {"none"})

    def compression_for_parameter(self, parameter: str) -> Compression:
        """Return the compression method for the gradient of the parameter with this full name."""
        groups = (method for pattern, method in self.compression_groups if fnmatchcase(parameter, pattern))
        return next(groups, self.compression)

    @property
    def expert_group_sizes(self) -> tuple[int, int]:
        """Sizes (replicate, shard) of the groups that hold the experts' state.

        `ep` divides them out of `replicas` and `shard_group_size`, innermost data ranks first.

        Raises:
            ValueError: `ep` divides neither; `valid_ep_sizes` names the valid sizes.
        """
        if self.ep not in self.valid_ep_sizes():
            raise ValueError(
                f"ep = {self.ep} does not divide the data ranks; possible: {self.valid_ep_sizes()}"
            )
        if self.ep <= self.shard_group_size:
            return self.replicate_group_size, self.shard_group_size // self.ep
        return self.replicate_group_size * self.shard_group_size // self.ep, 1

    def valid_ep_sizes(self) -> list[int]:
        """Return the sizes of `ep` that divide this plan's data-parallel dimensions."""
        shard_group_size, replicate_group_size = self.shard_group_size, self.replicate_group_size
        shard_sizes = [size for size in range(1, shard_group_size + 1) if shard_group_size % size == 0]
        replicate_sizes = [
            shard_group_size * size
            for size in range(2, replicate_group_size + 1)
            if replicate_group_size % size == 0
        ]
        return shard_sizes + replicate_sizes

    @property
    def sequence_length_multiple(self) -> int:
        """Number of tokens that must divide a sequence length.

        Each context rank of a ring holds two pieces, and under sequence parallelism `tp` splits its part
        evenly.
        """
        pieces = 2 if self.cp > 1 and self.cp_method == "ring" else 1
        return self.cp * math.lcm(pieces, self.tp if self.sequence_parallel else 1)

    @property
    def is_v_shaped(self) -> bool:
        """True if stages go down the ranks and up again, so that the first rank holds the last stage."""
        return self.schedule in V_SHAPED_SCHEDULES

    def stages_of_pipeline_rank(self, pp_rank: int) -> tuple[int, ...]:
        """Return the indices of the pipeline stages that `pp_rank` holds, in the model's order."""
        return stages_of_pipeline_rank(self.schedule, self.pp, pp_rank, self.stage_count)

    def has_last_stage(self, rank: int) -> bool:
        """Return True if `rank` holds the last stage, where losses are computed."""
        return self.stage_count - 1 in self.stages_of_pipeline_rank(self.coordinates(rank)["pp"])

    @property
    def stage_count(self) -> int:
        """Pipeline stages of the complete model."""
        return self.pp * self.virtual_stages

    def recomputed_blocks(self, block_count: int) -> list[int]:
        """Return the indices of a stage's recomputed blocks: at least the plan's share, spread evenly."""
        count = 0 if self.recompute == "none" else math.ceil(round(block_count * self.recompute_share, 9))
        return [
            index
            for index in range(block_count)
            if (index + 1) * count // block_count > index * count // block_count
        ]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` in every dimension of `MESH_DIMS`.

        Raises:
            ValueError: there is no such rank, or the plan has a placement and so no regular mesh.
        """
        if self.placement:
            raise ValueError("a plan that is placed on mixed hardware is no grid of ranks")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside a world of {self.world_size}")
        replicas = self.dp_replicate // self.sites
        site, rank = divmod(rank, self.ranks_per_site)
        position: dict[str, int] = {}
        for axis in reversed(MESH_DIMS):
            size = replicas if axis == "dp_replicate" else getattr(self, axis)
            rank, position[axis] = divmod(rank, size)
        position["dp_replicate"] += site * replicas
        return {axis: position[axis] for axis in MESH_DIMS}

    def site_of(self, rank: int) -> int:
        return rank // self.ranks_per_site

    def cross_site_stage_group(self, rank: int) -> list[int]:
        """Return the ranks of all sites that hold the same pipeline stages as `rank`."""
        first = rank % self.ranks_per_site // self.ranks_per_pipeline_rank * self.ranks_per_pipeline_rank
        return [
            start + offset
            for start in range(first, self.world_size, self.ranks_per_site)
            for offset in range(self.ranks_per_pipeline_rank)
        ]

    def data_parallel_rank(self, rank: int) -> int:
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def batch_rows(self, global_batch: int, data_parallel_rank: int) -> range:
        """Return the global batch's rows of a data-parallel rank: contiguous, its share to within one."""
        if self.batch_shares:
            first = batch_share_offsets(self.batch_shares, global_batch)
            return range(first[data_parallel_rank], first[data_parallel_rank + 1])
        base, extra = divmod(global_batch, self.data_parallel_size)
        start = data_parallel_rank * base + min(data_parallel_rank, extra)
        return range(start, start + base + (data_parallel_rank < extra))

    def rows_per_data_rank(self, global_batch: int) -> list[int]:
        """Return the number of rows of every data rank."""
        if self.batch_shares:
            return [
                stop - start for start, stop in pairwise(batch_share_offsets(self.batch_shares, global_batch))
            ]
        base, extra = divmod(global_batch, self.data_parallel_size)
        return [base + (rank < extra) for rank in range(self.data_parallel_size)]

    def max_rows_per_data_rank(self, global_batch: int) -> int:
        """Return the maximum number of rows of one data rank."""
        return (
            max(self.rows_per_data_rank(global_batch))
            if self.batch_shares
            else -(-global_batch // self.data_parallel_size)
        )

    @property
    def has_uneven_micro_batch_counts(self) -> bool:
        """True if each data rank has as many micro-batches as its own rows need.

        Shares are then unequal, and data ranks do nothing together within a micro-batch.
        """
        return bool(self.batch_shares) and uniform_count_reason(self) is None

    def gradient_accumulation_steps(self, global_batch: int) -> int:
        """Return the micro-batches per step, of the data rank with the most if they differ (`counts`)."""
        if not self.placement:
            return max(math.ceil(self.max_rows_per_data_rank(global_batch) / self.micro_batch), 1)
        return max(self.micro_batch_counts(global_batch))

    def micro_batch_counts(self, global_batch: int) -> list[int]:
        """Return the number of micro-batches of every data rank in a step."""
        if not (self.placement or self.has_uneven_micro_batch_counts):
            return [self.gradient_accumulation_steps(global_batch)] * self.data_parallel_size
        return [
            max(math.ceil(rows / self._micro_batch_of(rank)), 1)
            for rank, rows in enumerate(self.rows_per_data_rank(global_batch))
        ]

    def micro_batches(self, global_batch: int, data_parallel_rank: int) -> list[range]:
        """Split the rows of a data rank into as many ranges as `counts` gives; the last ones may be empty."""
        rows = self.batch_rows(global_batch, data_parallel_rank)
        if self.placement or self.has_uneven_micro_batch_counts:
            count = max(math.ceil(len(rows) / self._micro_batch_of(data_parallel_rank)), 1)
        else:
            count = self.gradient_accumulation_steps(global_batch)
        base, extra = divmod(len(rows), count)
        runs, start = [], rows.start
        for index in range(count):
            stop = start + base + (index < extra)
            runs.append(range(start, stop))
            start = stop
        return runs

    def _micro_batch_of(self, data_parallel_rank: int) -> int:
        return (
            self.replica_placement_of(data_parallel_rank).micro_batch if self.placement else self.micro_batch
        )

    def replica_placement_of(self, data_parallel_rank: int) -> ReplicaPlacement:
        """Return the placement entry that contains `data_parallel_rank`."""
        for replicas in self.placement:
            if data_parallel_rank < replicas.count:
                return replicas
            data_parallel_rank -= replicas.count
        raise ValueError("the plan has no such placed replica")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Build a plan from the result of `to_json`, also of an older release.

        Raises:
            ValueError: an unknown field.
        """
        value = _with_new_names(value)
        if unknown := set(value) - {field.name for field in fields(cls)}:
            raise ValueError(f"unknown plan fields {sorted(unknown)}")
        tuples: dict[str, Any] = {}
        for key in value.keys() & {"stage_cuts", "approximate", "batch_shares"}:
            tuples[key] = tuple(value[key])
        for key in value.keys() & {"compression_groups", "embedding_tables"}:
            tuples[key] = tuple(map(tuple, value[key]))
        if "placement" in value:
            tuples["placement"] = tuple(map(ReplicaPlacement.from_json, value["placement"]))
        if value.get("synchronization") is not None:
            tuples["synchronization"] = Synchronization.from_json(value["synchronization"])
        return cls(**{**value, **tuples})

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, as in `Plan(dp_shard=8, shard='optimizer')`."""
        values = {field: getattr(self, field.name) for field in fields(self)}
        changed = [f"{field.name}={value!r}" for field, value in values.items() if value != field.default]
        return f"Plan({', '.join(changed)})"

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in (*MESH_DIMS, "ep")}
        axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        if self.placement:
            axes = " + ".join(
                f"{replicas.count} × {'-'.join(str(stage.tp) for stage in replicas.places)}"
                for replicas in self.placement
            )
        elif self.batch_shares:
            axes += ", uneven shares"
        ranks = "rank" if self.world_size == 1 else "ranks"
        sharded = "" if self.shard == "none" else f", {self.shard} sharded"
        synchronization_text = "" if self.synchronization is None else f", {self.synchronization}"
        return (
            f"{self.world_size} {ranks} ({axes or 'one process'}){sharded}, {self.precision}, {self.device}"
            f"{synchronization_text}"
        )


def _with_new_names(value: dict[str, Any]) -> dict[str, Any]:
    """Return a plan that an older release wrote under today's names, which are those of `[parallel]`."""
    renamed: dict[str, Any] = with_new_names({"parallel": value})["parallel"]
    if "compression_groups" in renamed:
        kinds = VALUES["parallel.compression_groups.compression"]
        renamed["compression_groups"] = [(m, kinds.get(k, k)) for m, k in value["compression_groups"]]
    if "approximate" in renamed:
        kinds = VALUES["parallel.synchronize"]
        renamed["approximate"] = [kinds.get(method, method) for method in value["approximate"]]
    return renamed


def batch_share_offsets(batch_shares: Sequence[int], global_batch: int) -> list[int]:
    """Return the first row of every data rank, and the total number of rows."""
    total_shares = sum(batch_shares)
    return [
        global_batch * preceding_shares // total_shares
        for preceding_shares in accumulate(batch_shares, initial=0)
    ]


def uniform_count_reason(plan: Plan) -> str | None:
    """Return the reason why all data ranks need equally many micro-batches; None if they may differ.

    Their sizes may differ in any case. If data ranks communicate once per step, a rank with a third of the
    rows runs a third of the micro-batches; if they communicate within each, it runs as many smaller ones.
    """
    if plan.ep > 1:
        return "tokens visit the experts of other data ranks within every micro-batch (ep)"
    if plan.embedding != "dense":
        return "ranks look up embeddings of each other within every micro-batch"
    if plan.pp > 1:
        if plan.virtual_stages > 1 and not plan.computes_on_master_weights:
            return (
                f"under schedule '{plan.schedule}' the stages of a rank are gathered and reduced in an order "
                "that their number decides"
            )
        return None  # torch's schedules gather at the first use in a step, and reduce after the last one
    if plan.shard in ("gradients", "parameters"):
        return f"{plan.shard} that are sharded are exchanged within every micro-batch"
    if plan.shard == "optimizer" and plan.offload_parameters != "none":
        return "parameters that are offloaded are gathered within every micro-batch"
    return None
