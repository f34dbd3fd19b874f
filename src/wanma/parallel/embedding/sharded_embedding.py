"""Embedding tables that the data ranks share: ids go to the ranks that hold their rows, vectors come back.

Each id travels once however often a rank uses it. Of a table that lies on one rank, bags may be summed there,
so that one vector comes back for each. Vectors travel while the dense part of the model computes, and so do
their gradients. One rank reads its rows without any exchange. A table has no dense gradient:
`finalize_gradients` leaves rows and the gradient of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wanma.job.errors import JobError, WanmaError
from wanma.models.recommender.click_models import Dlrm
from wanma.models.recommender.embedding_tables import OFFSETS, EmbeddingTables
from wanma.parallel.embedding.id_groups import group_ids, sum_groups, sum_rows
from wanma.parallel.embedding.interaction import interact_compiled
from wanma.parallel.embedding.lookups import (
    Bags,
    ExchangedLookup,
    Lookup,
    OwnLookup,
    RankExchange,
    RowGradients,
    look_up,
)
from wanma.parallel.embedding.row_cache import RecordLayout, RowCache
from wanma.parallel.embedding.table_layout import TableLayout
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.precision.autocast import PRECISION_DTYPES
from wanma.planner.embedding_placement import (
    CACHE_ENTRY_BYTES,
    ROW_ADDRESS_BYTES,
    TablePlacement,
    place_tables,
)
from wanma.torch_internals.dtensor import make_spec, wrap_by_spec
from wanma.torch_internals.loaded import DTensor, Placement, Replicate, Shard
from wanma.torch_internals.modules import registered_parameters


def shard_embeddings(
    model: nn.Module, parallel_mesh: ParallelMesh, disk_pool: DiskPool | None = None
) -> list[ShardedEmbedding]:
    """Take the embedding tables out of a model and place them on the data ranks; every rank calls it.

    DLRM's interaction of their vectors becomes compiled code. The tables are no parameters of the model until
    `ShardedEmbedding.allocate`; with `plan.embedding_memory_bytes` until `ShardedEmbedding.allocate_states`.

    Args:
        model: model on the meta device.
        parallel_mesh: device meshes of the plan.
        disk_pool: disk pool of this rank, for a plan whose tables lie on disk.

    Raises:
        JobError: the model has no such tables, or a pattern of the plan matches none of them.
    """
    plan = parallel_mesh.plan
    modules = [(path, part) for path, part in model.named_modules() if isinstance(part, EmbeddingTables)]
    if not modules:
        raise JobError(
            f"parallel.embedding = '{plan.embedding}': {type(model).__name__} has no embedding tables that "
            "wanma can place",
            "remove parallel.embedding, or use model.family = 'recommender'",
        )
    if isinstance(model, Dlrm):
        model.interaction = interact_compiled
    group = dist.new_group() if plan.world_size > 1 else None
    embeddings = [
        ShardedEmbedding(
            module,
            path,
            place_tables(module.rows, module.width, module.bag_sizes, plan),
            parallel_mesh,
            group,
        )
        for path, module in modules
    ]
    if plan.embedding_memory_bytes is not None:
        assert disk_pool is not None
        sizes = [embedding.cached_bytes for embedding in embeddings]
        for embedding, size in zip(embeddings, sizes, strict=True):
            memory_bytes = plan.embedding_memory_bytes * size // max(sum(sizes), 1)
            embedding.keep_on_disk(disk_pool, memory_bytes)
    return embeddings


class ShardedEmbedding:
    """Tables of one `EmbeddingTables`, whose lookups it takes over.

    Args:
        module: tables on the meta device.
        path: name of `module` in the model.
        placements: placement of each table.
        parallel_mesh: device meshes of the plan.
        group: all data ranks, for the exchanges alone; None with one rank.
    """

    def __init__(
        self,
        module: EmbeddingTables,
        path: str,
        placements: Mapping[str, TablePlacement],
        parallel_mesh: ParallelMesh,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._module, self._path, self._mesh = module, path, parallel_mesh
        self._exchange = None if group is None else RankExchange(group, parallel_mesh.communication_timer)
        self._names = tuple(module.rows)
        self._counts = torch.tensor([module.rows[name] for name in self._names])
        self._is_whole = torch.tensor([placements[name].sharding == "table_wise" for name in self._names])
        self._has_whole = bool(self._is_whole.any())
        self.layout = TableLayout(module.rows, placements, parallel_mesh.rank, parallel_mesh.plan.world_size)
        weights = [registered_parameters(module.tables[f"of_{name}"]) for name in self._names]
        assert all(weight["weight"] is not None for weight in weights)
        self._dtype = next(weight["weight"].dtype for weight in weights if weight["weight"] is not None)
        precision = PRECISION_DTYPES[parallel_mesh.plan.precision]
        self._vector_dtype = self._dtype if self._dtype == torch.float64 else precision
        for weight in weights:
            weight["weight"] = None
        module.sharded_lookup = self
        self.matrix = torch.empty(0)
        """Rows of this rank, (rows, width); see `TableLayout`. With a cache, its slots: see `matrix_rows`."""
        self.stored_states: dict[str, Tensor] = {}
        """Optimizer state of all rows of this rank, by name, as checkpoints read and fill it."""
        self.cache: RowCache | None = None
        """Rows that are in memory; None: all are."""
        self._open_cache: Callable[[Sequence[str], Sequence[str]], RowCache] | None = None
        """Function from the names of states to the cache; None: memory holds all rows."""
        self._anchor = torch.zeros(0, requires_grad=True)
        """Leaf that makes autograd call the backward of a lookup."""
        self._lookups: list[Lookup] = []
        """Lookups of the step whose backward has begun."""
        self.gradient: TableGradient | None = None
        """Gradient of the step, summed over all ranks; None before it is complete."""

    def allocate(self, device: torch.device) -> None:
        """Allocate this rank's rows and make them parameters of the model, under the names of the tables."""
        self._counts, self._is_whole = self._counts.to(device), self._is_whole.to(device)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        rows = 0 if self._open_cache is not None else self.layout.row_count
        self.matrix = torch.empty(rows, self._module.width, dtype=self._dtype, device=device)
        if self._open_cache is None:
            self._register_parameters(self.matrix)

    def allocate_states(self, states: Sequence[str], row_states: Sequence[str]) -> dict[str, Tensor]:
        """Allocate optimizer state, all zero; with a cache also the rows, beside which it lies.

        Args:
            states: names of states with one element for each of a table.
            row_states: names of states with one element for each row.

        Returns:
            By name the state of the rows of `matrix`, (rows, width) or (rows,).
        """
        if self._open_cache is None:
            self.stored_states = {name: torch.zeros_like(self.matrix) for name in states} | {
                name: self.matrix.new_zeros(len(self.matrix)) for name in row_states
            }
            return self.stored_states
        self.cache = self._open_cache(states, row_states)
        self.matrix, self.stored_states = self.cache.matrix, self.cache.stored_states
        self._register_parameters(self.cache.stored_matrix)
        return self.cache.states

    def _register_parameters(self, matrix: Tensor) -> None:
        for name, state in self.table_views(matrix).items():
            table = self._module.tables[f"of_{name}"]
            registered_parameters(table)["weight"] = nn.Parameter(state)

    # ------------------------------------------------------------------ rows on disk

    @property
    def cached_bytes(self) -> int:
        """Bytes of this rank's rows in a cache that holds all of them, without optimizer state."""
        row_bytes = self._module.width * self._dtype.itemsize
        return self.layout.row_count * (row_bytes + CACHE_ENTRY_BYTES + ROW_ADDRESS_BYTES)

    def keep_on_disk(self, disk_pool: DiskPool, memory_bytes: int) -> None:
        """Keep rows and optimizer state on disk, and in memory those in use; before `allocate`.

        Args:
            disk_pool: disk pool of this rank.
            memory_bytes: memory of this rank for them.
        """

        def open_cache(states: Sequence[str], row_states: Sequence[str]) -> RowCache:
            layout = RecordLayout(self._module.width, tuple(states), tuple(row_states))
            return RowCache(
                self.layout.row_count,
                layout,
                self._dtype,
                memory_bytes,
                disk_pool,
                self._mesh.rank,
                self._counts.device,
            )

        self._open_cache = open_cache

    def used_rows(self, features: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows of this rank that any rank looks up, each once, (rows,); every rank calls it.

        Args:
            features: of each micro-batch of this rank, with the ids of each table.
        """
        ids = [torch.cat([batch[name].reshape(-1) for batch in features]) for name in self._names]
        flat, sizes = self._join(ids)
        # Ids outside, which the lookup reports, count as the nearest row.
        largest = (self._counts - 1).repeat_interleave(sizes)
        holders, rows, _ = self.layout.locate(flat.clamp_min(0).minimum(largest), sizes)
        first = group_ids(holders * self.layout.stride + rows).first_positions
        if self._exchange is None:
            return rows[first]
        sent = torch.bincount(holders[first], minlength=self.layout.ranks)
        received = self._exchange.start(sent).finish()
        asked = self._exchange.start(rows[first], received.tolist(), sent.tolist()).finish()
        return asked[group_ids(asked).first_positions]

    def write_back(self) -> None:
        """Make what checkpoints read current."""
        if self.cache is not None:
            self.cache.write_back()

    def matrix_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of `matrix` that hold rows of this rank, which change next.

        Raises:
            WanmaError: memory does not hold them all.
        """
        return rows if self.cache is None else self.cache.slots_to_change(rows)

    @property
    def parameter_names(self) -> dict[str, str]:
        """Full names of the tables' parameters, by table; of all tables."""
        return {name: f"{self._path}.tables.of_{name}.weight" for name in self._names}

    def table_views(self, matrix: Tensor) -> dict[str, DTensor]:
        """Return the tables of which this rank has rows, or an empty part, in the memory of `matrix`.

        Args:
            matrix: one entry or vector for each row of this rank, (rows, ...).
        """
        mesh = self._mesh.embedding_mesh
        assert mesh is not None
        meshes: dict[str, tuple[DeviceMesh, Placement]] = {
            "row_wise": (mesh["embedding"], Shard(0)),
            "table_wise": (mesh["embedding_holder"], Replicate()),
            "replicated": (mesh["embedding"], Replicate()),
        }
        views: dict[str, DTensor] = {}
        for rows in self.layout.local_rows:
            if rows.placement.sharding == "table_wise" and rows.placement.rank != self._mesh.rank:
                continue
            holders, placement = meshes[rows.placement.sharding]
            table = torch.empty(self._module.rows[rows.table], *matrix.shape[1:], device="meta")
            spec = make_spec(holders, [placement], table, matrix.dtype)
            # `DTensor.from_local` would copy rows on disk to the GPU that computes with them.
            views[rows.table] = wrap_by_spec(matrix[rows.start : rows.start + rows.count], spec)
        return views

    # ------------------------------------------------------------------ lookups

    def start(self, features: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        """Start a lookup, as `EmbeddingTables.forward`: ids are exchanged, and vectors are on their way."""
        ids = [features[name] for name in self._names]
        offsets = torch.stack([features[name + OFFSETS] for name in self._names])
        rows = offsets.shape[1]
        flat, sizes = self._join(ids)
        starts = (offsets + (sizes.cumsum(0) - sizes)[:, None]).flatten()
        is_summed = None
        if self._has_whole and self._exchange is not None:
            # On its holder a bag costs one vector; without, no more than the table has rows.
            is_summed = (self._is_whole & (sizes > rows) & (self._counts > rows)).repeat_interleave(sizes)
        lookup = self._begin(flat, sizes, Bags(starts, len(flat), rows), is_summed)

        def finish() -> list[Tensor]:
            sums = look_up(lookup, self._anchor, self._lookups)
            return list(sums.view(len(ids), rows, self._module.width).unbind(0))

        return finish

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of single ids (...)."""
        flat = ids.reshape(-1).to(self._counts.device)
        bags = Bags(torch.arange(len(flat), device=flat.device), len(flat), len(flat))
        sizes = torch.zeros_like(self._counts)
        sizes[self._names.index(name)] = len(flat)
        lookup = self._begin(flat, sizes, bags, None)
        vectors = look_up(lookup, self._anchor, self._lookups)
        return vectors.view(*ids.shape, self._module.width)

    def _join(self, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the ids of all tables, (all ids,), and the number of ids of each, (tables,)."""
        device = self._counts.device
        return torch.cat(list(ids)).to(device), torch.tensor([len(each) for each in ids], device=device)

    def _begin(self, ids: Tensor, sizes: Tensor, bags: Bags, is_summed: Tensor | None) -> Lookup:
        """Begin a lookup; without `is_summed`, as of `ExchangedLookup`, no bag is summed by its holder.

        Raises:
            WanmaError: an id lies outside its table.
        """
        holders, rows, outside = self.layout.locate(ids, sizes)
        if outside >= 0:
            name = self._names[int(torch.searchsorted(sizes.cumsum(0), outside, right=True))]
            raise WanmaError(
                f"rank {self._mesh.rank}: id {int(ids[outside])} in row "
                f"{int(bags.bag_of[outside]) % bags.rows} of a micro-batch is outside table '{name}', "
                f"which has {self._module.rows[name]:,} rows",
                f"correct the data, or set model.recommender.tables.{name}",
            )
        if self._exchange is None:
            return OwnLookup(self._read, rows, bags)
        return ExchangedLookup(self._read, self._exchange, self.layout, (holders, rows), bags, is_summed)

    def _read(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return the sums of lists of this rank's rows, (lists, width)."""
        matrix = self.matrix
        if self.cache is not None:
            matrix, rows = self.cache.vectors(rows), torch.arange(len(rows), device=rows.device)
        return sum_rows(matrix, rows, starts).to(self._vector_dtype)

    # ------------------------------------------------------------------ gradients

    def finalize_gradients(self, divisor: int) -> None:
        """Complete `gradient` after the last backward of a step; every rank calls it.

        Args:
            divisor: number by which summed gradients are divided.
        """
        rows, sums, is_used = self._sum_by_row(
            [lookup.finish_backward() for lookup in self._lookups], divisor
        )
        self._lookups.clear()
        shared, count = self.layout.shared_rows, self.layout.row_count
        if self._exchange is not None and count > shared:
            own = int(torch.searchsorted(rows, shared))
            replicated = sums.new_zeros(count - shared, sums.shape[1])
            replicated.index_copy_(0, rows[own:] - shared, sums[own:])
            self._exchange.all_reduce(replicated)
            rows = torch.cat([rows[:own], torch.arange(shared, count, device=rows.device)])
            sums = torch.cat([sums[:own], replicated])
            is_used = torch.cat([is_used[:own], replicated.abs().sum(1).ne(0)])
        # Rows of padding samples, and of those that no target depends on, are not used.
        if not bool(is_used.all()):
            rows, sums = rows[is_used], sums[is_used]
        self.gradient = TableGradient(rows, sums, int(torch.searchsorted(rows, shared)))

    def _sum_by_row(self, parts: Sequence[RowGradients], divisor: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of gradients, each once and ascending, (rows,), and of each `sum_groups`."""
        if not parts:
            no_rows = self.matrix.new_zeros(0, dtype=torch.int64)
            return no_rows, self.matrix.new_zeros(0, self._module.width), no_rows.bool()
        all_rows, values = (
            _joined([part.rows for part in parts]),
            _joined([part.values for part in parts]).to(self._dtype),
        )
        starts = itertools.accumulate((len(part.values) for part in parts), initial=0)
        sources = _joined([part.sources + start for part, start in zip(parts, starts, strict=False)])
        groups = group_ids(all_rows)
        return all_rows.index_select(0, groups.first_positions), *sum_groups(values, sources, groups, divisor)

    def reset_gradients(self) -> None:
        """Drop the gradients of the step."""
        for lookup in self._lookups:
            lookup.finish_backward()
        self._lookups.clear()
        self.gradient = None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another, without a copy of a single one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@dataclass(frozen=True)
class TableGradient:
    """Gradient of the rows that a step has used."""

    rows: Tensor
    """Rows of the rank's matrix, each once and ascending, (used,) int64."""
    values: Tensor
    """Gradient of each, (used, width)."""
    shared_count: int
    """Number of them, the first, that are on this rank alone; those of replicated tables follow."""

    @property
    def shared(self) -> Tensor:
        """Gradients that this rank alone holds, (shared, width), in the memory of `values`."""
        return self.values[: self.shared_count]

    @property
    def replicated(self) -> Tensor:
        """Gradients that all data ranks hold alike, (replicated, width), in the memory of `values`."""
        return self.values[self.shared_count :]
