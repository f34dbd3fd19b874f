"""How a job runs, as pure data: the sizes of the axes and everything the runtime must obey.

`Plan` also answers the three questions every room asks of it: who am I in the grid
(`coordinates`), which rows of the global batch are mine (`rows`), and in which micro-batches
(`micro_batches`). They are functions of the plan alone, so that tests need no processes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from wanma.job.plan.placement import Replicas
from wanma.job.plan.rank_timing import starts, why_equal_counts
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.job import Precision
from wanma.job.sections.parallel import Compression, ContextKind, Offload, Recompute, Schedule, Shard

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: the chattiest axis stays on the fastest links."""

UPDATED_TOGETHER = 1 << 23
"""Parameters whose optimizer state is on the device at once, where it otherwise waits elsewhere."""

REDUCED_TOGETHER_BYTES = 25 << 20
"""Of whole gradients that are summed over replicas in one message, at most, as DDP's: many small ones cost
more switches between ranks than the copy saves, and one of all would be a second copy of them all."""
LEAST_TOGETHER_BYTES = 1 << 20
"""At least, likewise."""

_NO_COMPRESSIONS: frozenset[Compression] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The layout of a run. `ep` subdivides the data axes and so is no factor of `world_size`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: Shard = "nothing"
    sequence: bool = False
    """Between the matrices that `tp` splits, each of its ranks holds a part of the sequence."""
    context: ContextKind = "ring"
    """How attention sees the whole sequence when `cp` splits it."""
    micro_batch: int = 1
    """Most samples in one forward pass of one data rank."""
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    """Pipeline stages per rank."""
    stage_cuts: tuple[int, ...] = ()
    """First block of every pipeline stage but the first; `pp` × `virtual_stages` − 1 of them."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of the blocks that recompute, spread evenly over each stage."""
    offload_parameters: Offload = "nothing"
    offload_optimizer: Offload = "nothing"
    offload_activations: Offload = "nothing"
    compile: bool = False
    precision: Precision = "fp32"
    fp8: bool = False
    compression: Compression = "nothing"
    """What ranks exchange of gradients (`collectives.compression`)."""
    compression_share: float = 0.01
    """topk: of each tensor's elements."""
    compression_rank: int = 4
    """powersgd: of the matrices."""
    compression_from_step: int = 0
    """Optimizer steps before it begins."""
    compression_groups: tuple[tuple[str, Compression], ...] = ()
    """(pattern of parameter names, compression); the first that matches counts instead of `compression`."""
    overlap: bool = True
    """Replicas sum their gradients, and shards gather parameters ahead of use, while backward goes on."""
    bucket_bytes: int = REDUCED_TOGETHER_BYTES
    """Of gradients that replicas sum in one message; a larger tensor goes alone."""
    hierarchical: bool = False
    """Replicas sum their gradients within each node, then between nodes, of which each rank has a part."""
    device: str = "cpu"
    threads_per_rank: int = 1
    approximate: tuple[str, ...] = ()
    """Names of what changes the mathematics; empty for an exact plan."""
    batch_shares: tuple[int, ...] = ()
    """Samples of each data rank in every sum of them; empty: as even as can be."""
    placement: tuple[Replicas, ...] = ()
    """On mixed hardware: replicas by kind, in the order of their data ranks. Such a plan is no grid: `pp` and
    `tp` are those of its deepest and widest replica, `dp_replicate` counts all of them, and each has its own
    micro-batch and recompute. Its `shard` is over equal replicas, and `batch_shares` says what each does."""
    synchronization: Synchronization | None = None
    """What groups of replicas do instead of agreeing at every step. They are then outermost in the order of
    the ranks, before `pp`: what is within one stays on its links."""

    def __post_init__(self) -> None:
        if self.batch_shares and (len(self.batch_shares) != self.data_ranks or min(self.batch_shares) < 1):
            raise ValueError(
                f"batch_shares needs one number of at least 1 for each of {self.data_ranks} data ranks, "
                f"and has {len(self.batch_shares)}"
            )
        if self.placement:
            pp = max(len(replicas.places) for replicas in self.placement)
            tp = max(place.tp for replicas in self.placement for place in replicas.places)
            count = sum(replicas.count for replicas in self.placement)
            if (pp, count, 1, 1, tp, 1) != (*(getattr(self, axis) for axis in AXES), self.ep):
                raise ValueError(
                    f"placed replicas make pp = {pp}, dp_replicate = {count}, tp = {tp} and nothing else"
                )
            if not self.batch_shares:
                raise ValueError("placed replicas need batch_shares")
        if self.synchronization is not None and self.dp_replicate % self.synchronization.sites:
            raise ValueError(
                f"{self.synchronization.sites} sites cannot share dp_replicate = {self.dp_replicate} evenly"
            )

    def but(self, **changes: Any) -> Plan:
        """As `dataclasses.replace`, in a fraction of its time: searches make plans by the ten thousand.

        Raises:
            TypeError: a plan has no field of such a name.
            ValueError: the changed plan is none.
        """
        values = {**self.__dict__, **changes}
        if len(values) != len(self.__dict__):
            unknown = ", ".join(sorted(changes.keys() - self.__dict__.keys()))
            raise TypeError(f"a plan has no {unknown}")
        changed = object.__new__(Plan)
        changed.__dict__.update(values)
        changed.__post_init__()
        return changed

    @property
    def world_size(self) -> int:
        if self.placement:
            return sum(replicas.devices for replicas in self.placement)
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def sites(self) -> int:
        """Groups of replicas that do not agree at every step."""
        return 1 if self.synchronization is None else self.synchronization.sites

    @property
    def site_ranks(self) -> int:
        """Ranks of one site: all, where there is one."""
        return self.world_size // self.sites

    @property
    def stage_ranks(self) -> int:
        """Ranks of one site that hold one pipeline rank's stages: so far are they from the next one's."""
        return self.world_size // self.sites // self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples: the two data-parallel axes."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the state: those of `cp` take part in what `dp_shard` shards."""
        return 1 if self.shard == "nothing" else self.dp_shard * self.cp

    @property
    def replicas(self) -> int:
        """Copies of each stage's state, within a site."""
        return self.dp_replicate // self.sites * self.dp_shard * self.cp // self.shard_ranks

    @property
    def computes_with_state(self) -> bool:
        """Whether what computes is what the optimizer updates: neither gathered nor cast."""
        return (
            self.device == "cpu"
            and self.shard_ranks == 1
            and self.ep == 1
            and self.precision in ("fp32", "fp64")
            and self.offload_parameters == "nothing"
        )

    @property
    def reshards(self) -> bool:
        """Return whether ranks gather parameters for each use of a block, and let go of them after it."""
        # A pipeline's schedule says itself when a stage's parameters are gathered and let go.
        return (self.shard == "parameters" or self.offload_parameters != "nothing") and self.pp == 1

    @property
    def compressions(self) -> frozenset[Compression]:
        """The ways in which gradients are made smaller; empty where they are exchanged as they are."""
        if self.compression == "nothing" and not self.compression_groups:
            return _NO_COMPRESSIONS
        methods = {self.compression, *(method for _, method in self.compression_groups)}
        return frozenset(methods - {"nothing"})

    def compression_of(self, parameter: str) -> Compression:
        """What ranks exchange of the gradient of the parameter of this full name."""
        groups = (method for pattern, method in self.compression_groups if fnmatchcase(parameter, pattern))
        return next(groups, self.compression)

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """(replicate, shard) of the experts' own state: what `ep` leaves of `replicas` and `shard_ranks`.

        `ep` takes the innermost data ranks.

        Raises:
            ValueError: it divides neither; `allowed_ep` names the sizes that do.
        """
        if self.ep not in self.allowed_ep():
            raise ValueError(f"ep = {self.ep} does not divide the data ranks; possible: {self.allowed_ep()}")
        if self.ep <= self.shard_ranks:
            return self.replicas, self.shard_ranks // self.ep
        return self.replicas * self.shard_ranks // self.ep, 1

    def allowed_ep(self) -> list[int]:
        """Sizes of `ep` that this plan's data axes can be cut into."""
        inner, outer = self.shard_ranks, self.replicas
        within = [size for size in range(1, inner + 1) if inner % size == 0]
        beyond = [inner * size for size in range(2, outer + 1) if outer % size == 0]
        return within + beyond

    @property
    def sequence_unit(self) -> int:
        """What sequences must be a multiple of: each context rank of a ring holds two pieces, and under
        sequence parallelism `tp` cuts its part evenly."""
        pieces = 2 if self.cp > 1 and self.context == "ring" else 1
        return self.cp * math.lcm(pieces, self.tp if self.sequence else 1)

    @property
    def is_v_shaped(self) -> bool:
        """Whether the stages go down the ranks and up again, so that the first rank holds the last one."""
        return self.schedule in ("zbv", "dualpipev")

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Numbers of the pipeline stages that `pp_rank` holds, in the model's order."""
        if self.is_v_shaped:
            return pp_rank, 2 * self.pp - 1 - pp_rank
        return tuple(range(pp_rank, self.stages, self.pp))

    def holds_loss(self, rank: int) -> bool:
        """Whether `rank` holds the last stage, where losses are computed."""
        return self.stages - 1 in self.stages_of(self.coordinates(rank)["pp"])

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.virtual_stages

    def recomputed(self, blocks: int) -> list[int]:
        """Which of a stage's `blocks` recompute: at least the share that the plan asks, spread evenly."""
        count = 0 if self.recompute == "none" else math.ceil(round(blocks * self.recompute_share, 9))
        return [index for index in range(blocks) if (index + 1) * count // blocks > index * count // blocks]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis of `AXES`.

        Raises:
            ValueError: there is no such rank, or the plan is placed on mixed hardware and so is no grid.
        """
        if self.placement:
            raise ValueError("a plan that is placed on mixed hardware is no grid of ranks")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside a world of {self.world_size}")
        replicas = self.dp_replicate // self.sites
        site, rank = divmod(rank, self.site_ranks)
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            size = replicas if axis == "dp_replicate" else getattr(self, axis)
            rank, position[axis] = divmod(rank, size)
        position["dp_replicate"] += site * replicas
        return {axis: position[axis] for axis in AXES}

    def site_of(self, rank: int) -> int:
        return rank // self.site_ranks

    def stage_group(self, rank: int) -> list[int]:
        """Ranks of all sites that hold the same pipeline stages as `rank`."""
        first = rank % self.site_ranks // self.stage_ranks * self.stage_ranks
        return [
            start + place
            for start in range(first, self.world_size, self.site_ranks)
            for place in range(self.stage_ranks)
        ]

    def data_rank(self, rank: int) -> int:
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def rows(self, global_batch: int, data_rank: int) -> range:
        """Rows of the global batch that `data_rank` computes: contiguous, and as many as its share of them
        to within one."""
        if self.batch_shares:
            first = starts(self.batch_shares, global_batch)
            return range(first[data_rank], first[data_rank + 1])
        base, extra = divmod(global_batch, self.data_ranks)
        start = data_rank * base + min(data_rank, extra)
        return range(start, start + base + (data_rank < extra))

    def sizes(self, global_batch: int) -> list[int]:
        """Rows of every data rank."""
        if self.batch_shares:
            return [stop - start for start, stop in pairwise(starts(self.batch_shares, global_batch))]
        base, extra = divmod(global_batch, self.data_ranks)
        return [base + (rank < extra) for rank in range(self.data_ranks)]

    def most_rows(self, global_batch: int) -> int:
        """Of one data rank."""
        return max(self.sizes(global_batch)) if self.batch_shares else -(-global_batch // self.data_ranks)

    @property
    def counts_apart(self) -> bool:
        """Whether each data rank has as many micro-batches as its own rows need: its share is unlike others',
        and nothing that data ranks do together happens within a micro-batch."""
        return bool(self.batch_shares) and why_equal_counts(self) is None

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per step: of the data rank that has most of them, where they differ (`counts`)."""
        if not self.placement:
            return max(math.ceil(self.most_rows(global_batch) / self.micro_batch), 1)
        return max(self.counts(global_batch))

    def counts(self, global_batch: int) -> list[int]:
        """Micro-batches of every data rank in a step."""
        if not (self.placement or self.counts_apart):
            return [self.accumulation(global_batch)] * self.data_ranks
        return [
            max(math.ceil(rows / self._micro_batch_of(rank)), 1)
            for rank, rows in enumerate(self.sizes(global_batch))
        ]

    def micro_batches(self, global_batch: int, data_rank: int) -> list[range]:
        """This data rank's rows in as many runs as `counts` says; the last ones may be empty."""
        mine = self.rows(global_batch, data_rank)
        if self.placement or self.counts_apart:
            count = max(math.ceil(len(mine) / self._micro_batch_of(data_rank)), 1)
        else:
            count = self.accumulation(global_batch)
        base, extra = divmod(len(mine), count)
        runs, start = [], mine.start
        for index in range(count):
            stop = start + base + (index < extra)
            runs.append(range(start, stop))
            start = stop
        return runs

    def _micro_batch_of(self, data_rank: int) -> int:
        return self.replicas_of(data_rank).micro_batch if self.placement else self.micro_batch

    def replicas_of(self, data_rank: int) -> Replicas:
        """Those of `placement` that `data_rank` is one of."""
        for replicas in self.placement:
            if data_rank < replicas.count:
                return replicas
            data_rank -= replicas.count
        raise ValueError("the plan has no such placed replica")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        known = {f.name for f in fields(cls)}
        if unknown := set(value) - known:
            raise ValueError(f"unknown plan fields {sorted(unknown)}")
        tuples: dict[str, Any] = {
            key: tuple(value[key]) for key in ("stage_cuts", "approximate", "batch_shares") if key in value
        }
        if "compression_groups" in value:
            tuples["compression_groups"] = tuple(map(tuple, value["compression_groups"]))
        if "placement" in value:
            tuples["placement"] = tuple(Replicas.from_json(replicas) for replicas in value["placement"])
        if value.get("synchronization") is not None:
            tuples["synchronization"] = Synchronization(**value["synchronization"])
        return cls(**{**value, **tuples})

    def __str__(self) -> str:
        axes = " × ".join(
            f"{axis} {getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1
        )
        if self.placement:
            axes = " + ".join(
                f"{one.count} × {'-'.join(str(place.tp) for place in one.places)}" for one in self.placement
            )
        elif self.batch_shares:
            axes += ", uneven shares"
        ranks = "rank" if self.world_size == 1 else "ranks"
        sharded = "" if self.shard == "nothing" else f", {self.shard} sharded"
        seldom = "" if self.synchronization is None else f", {self.synchronization}"
        return (
            f"{self.world_size} {ranks} ({axes or 'one process'}){sharded}, {self.precision}, {self.device}"
            f"{seldom}"
        )
