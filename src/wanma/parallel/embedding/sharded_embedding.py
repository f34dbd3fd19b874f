"""Embedding tables that the data ranks share: ids go to the ranks that hold their rows, vectors come back.

Each id travels once however often a rank uses it. Of a table that lies on one rank, bags may be summed there,
so that one vector comes back for each. Vectors travel while the dense part of the model computes, and so do
their gradients. A table has no dense gradient: `finalize_gradients` leaves rows and the gradient of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wanma.job.errors import JobError, WanmaError
from wanma.models.recommender.embedding_tables import OFFSETS, EmbeddingTables
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
from wanma.torch_internals.loaded import DTensor, Placement, Replicate, Shard
from wanma.torch_internals.modules import registered_parameters


def shard_embeddings(
    model: nn.Module, parallel_mesh: ParallelMesh, disk_pool: DiskPool | None = None
) -> list[ShardedEmbedding]:
    """Take the embedding tables out of a model and place them on the data ranks; every rank calls it.

    The tables are no parameters of the model until `ShardedEmbedding.allocate`; with
    `plan.embedding_memory_bytes` until `ShardedEmbedding.allocate_states`.

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
        self._group, self._timer = group, parallel_mesh.communication_timer
        self._names = tuple(module.rows)
        self._counts = torch.tensor([module.rows[name] for name in self._names])
        self._first_keys = self._counts.cumsum(0) - self._counts
        self._is_whole = torch.tensor([placements[name].sharding == "table_wise" for name in self._names])
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
        """Leaf that makes autograd call the backward of an exchange."""
        self._exchanges: list[_Exchange] = []
        """Exchanges of the step whose gradients have been sent."""
        self.gradient: TableGradient | None = None
        """Gradient of the step, summed over all ranks; None before it is complete."""

    def allocate(self, device: torch.device) -> None:
        """Allocate this rank's rows and make them parameters of the model, under the names of the tables."""
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
                self.layout.row_count, layout, self._dtype, memory_bytes, disk_pool, self._mesh.rank
            )

        self._open_cache = open_cache

    def used_rows(self, features: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows of this rank that any rank looks up, each once, (rows,); every rank calls it.

        Args:
            features: of each micro-batch of this rank, with the ids of each table.
        """
        keys = []
        for name, first, count in zip(
            self._names, self._first_keys.tolist(), self._counts.tolist(), strict=True
        ):
            ids = torch.cat([batch[name].reshape(-1) for batch in features]).unique()
            keys.append(ids[(ids >= 0) & (ids < count)] + first)  # the lookup reports others
        holders, rows = self.layout.locate(torch.cat(keys))
        sent = torch.bincount(holders, minlength=self.layout.ranks)
        received = self._all_to_all(sent)
        rows = rows[holders.argsort(stable=True)]
        own_rows: Tensor = self._all_to_all(rows, received.tolist(), sent.tolist()).unique()
        return own_rows

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
            local = matrix[rows.start : rows.start + rows.count]
            shape = (self._module.rows[rows.table], *matrix.shape[1:])
            views[rows.table] = DTensor.from_local(
                local,
                holders,
                [placement],
                run_check=False,
                shape=torch.Size(shape),
                stride=(*matrix.shape[1:], 1),
            )
        return views

    # ------------------------------------------------------------------ lookups

    def start(self, features: Mapping[str, Tensor]) -> Callable[[], list[Tensor]]:
        """Start a lookup, as `EmbeddingTables.forward`: ids are exchanged, and vectors are on their way."""
        ids = [features[name] for name in self._names]
        offsets = [features[name + OFFSETS] for name in self._names]
        device, rows = ids[0].device, len(offsets[0])
        sizes = torch.tensor([len(one) for one in ids], device=device)
        ends = [torch.cat([one[1:], one.new_tensor([len(of)])]) for one, of in zip(offsets, ids, strict=True)]
        lengths = torch.cat(ends) - torch.cat(offsets)
        tables = torch.arange(len(ids), device=device).repeat_interleave(sizes)
        bags = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        keys = self._keys(torch.cat(ids), tables, bags % max(rows, 1))
        # On its holder a bag costs one vector; without, no more than the table has rows.
        is_summed = self._is_whole.to(device) & (sizes > rows) & (self._counts.to(device) > rows)
        exchange = self._begin(keys, bags, is_summed[tables])
        return partial(self._bag_vectors, exchange, bags, is_summed[tables], lengths, len(ids))

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        """Return the vectors (..., width) of single ids (...)."""
        flat = ids.reshape(-1)
        tables = torch.full_like(flat, self._names.index(name))
        keys = self._keys(flat, tables, torch.arange(len(flat), device=ids.device))
        exchange = self._begin(keys, flat, torch.zeros_like(flat, dtype=torch.bool))
        vectors = self._receive(exchange)
        return F.embedding(exchange.segment_of, vectors).view(*ids.shape, -1)

    def _keys(self, ids: Tensor, tables: Tensor, rows: Tensor) -> Tensor:
        """Return ids as `TableLayout.locate` takes them.

        Raises:
            WanmaError: an id lies outside its table.
        """
        is_outside = (ids < 0) | (ids >= self._counts.to(ids.device)[tables])
        if bool(is_outside.any()):
            at = int(is_outside.nonzero()[0])
            name = self._names[int(tables[at])]
            raise WanmaError(
                f"rank {self._mesh.rank}: id {int(ids[at])} in row {int(rows[at])} of a micro-batch is "
                f"outside table '{name}', which has {self._module.rows[name]:,} rows",
                f"correct the data, or set model.recommender.tables.{name}",
            )
        return ids + self._first_keys.to(ids.device)[tables]

    def _begin(self, keys: Tensor, bags: Tensor, is_summed: Tensor) -> _Exchange:
        """Send ids and look up those that come, and start to send vectors back.

        A segment is what one vector comes back for: an id, or the ids of a bag that are summed.
        """
        layout, ranks = self.layout, self.layout.ranks
        holders, rows = layout.locate(keys)
        stride = layout.stride + (int(bags[-1]) + 1 if len(bags) else 1)
        wanted = holders * stride + torch.where(is_summed, layout.stride + bags, rows)
        segments, segment_of, counts = torch.unique(wanted, return_inverse=True, return_counts=True)
        in_holder = segments % stride
        is_bag = in_holder >= layout.stride
        lengths = torch.where(is_bag, counts, 1)
        in_bag = is_bag.repeat_interleave(lengths)
        addresses = keys.new_empty(len(in_bag))
        addresses[~in_bag] = in_holder[~is_bag]
        summed_ids = is_summed.nonzero()[:, 0]
        addresses[in_bag] = rows[summed_ids[segment_of[summed_ids].argsort(stable=True)]]
        starts = torch.searchsorted(segments, torch.arange(ranks + 1, device=keys.device) * stride)
        address_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])[starts]
        sent = torch.stack([address_starts.diff(), starts.diff()], 1)  # (ranks, addresses and segments)
        received = self._all_to_all(sent)
        (sent_addresses, sent_segments), (own_addresses, own_segments) = (
            sizes.T.tolist() for sizes in (sent, received)
        )
        addresses = self._all_to_all(addresses, own_addresses, sent_addresses)
        own_lengths = None
        if bool(self._is_whole.any()):  # else each segment is one id
            own_lengths = self._all_to_all(lengths, own_segments, sent_segments)
        with torch.no_grad():
            vectors = self._segment_vectors(addresses, own_lengths).to(self._vector_dtype)
        exchange = _Exchange(self, segment_of, addresses, own_lengths, own_segments, sent_segments)
        exchange.start(vectors, sent_segments, own_segments)
        return exchange

    def _segment_vectors(self, addresses: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the sum of the rows of each segment, (segments, width)."""
        matrix = self.matrix
        if self.cache is not None:
            matrix = self.cache.vectors(addresses)
            if lengths is None:
                return matrix
            addresses = torch.arange(len(addresses))
        if lengths is None or len(lengths) == len(addresses):
            return matrix.index_select(0, addresses)
        return F.embedding_bag(addresses, matrix, lengths.cumsum(0) - lengths, mode="sum")

    def _bag_vectors(
        self, exchange: _Exchange, bags: Tensor, is_summed: Tensor, lengths: Tensor, tables: int
    ) -> list[Tensor]:
        """Return the vectors of all bags, by table, (rows, width)."""
        vectors = self._receive(exchange)
        is_first = torch.ones_like(is_summed)
        is_first[1:] = bags[1:] != bags[:-1]
        is_used = is_first | ~is_summed  # of a bag that is summed, the one vector
        used = torch.bincount(bags[is_used], minlength=len(lengths))
        sums = F.embedding_bag(exchange.segment_of[is_used], vectors, used.cumsum(0) - used, mode="sum")
        return list(sums.view(tables, -1, self._module.width).unbind(0))

    def _receive(self, exchange: _Exchange) -> Tensor:
        """Return the vectors of an exchange, (segments, width), whose gradients go the way back."""
        anchor = self._anchor.to(self.matrix)
        vectors: Tensor = _ReceivedVectors.apply(anchor, exchange)  # type: ignore[no-untyped-call]
        return vectors

    def _all_to_all(
        self, tensor: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Tensor:
        if self._group is None:
            return tensor
        rows = len(tensor) if received is None else sum(received)
        output = tensor.new_empty(rows, *tensor.shape[1:])
        with self._timer.time_blocking_transfer("data"):
            dist.all_to_all_single(output, tensor.contiguous(), received, sent, group=self._group)
        return output

    # ------------------------------------------------------------------ gradients

    def finalize_gradients(self, divisor: int) -> None:
        """Complete `gradient` after the last backward of a step; every rank calls it.

        Args:
            divisor: number by which summed gradients are divided.
        """
        exchanges, self._exchanges = self._exchanges, []
        shared = self.layout.shared_rows
        rows = [self.matrix.new_zeros(0, dtype=torch.int64)]
        values = [self.matrix.new_zeros(0, self._module.width)]
        for exchange in exchanges:
            gradient = exchange.finish().to(self._dtype)
            if exchange.lengths is not None:
                gradient = gradient.repeat_interleave(exchange.lengths, 0)
            rows.append(exchange.addresses)
            values.append(gradient)
        all_rows, all_values = torch.cat(rows), torch.cat(values)
        is_shared = all_rows < shared
        own_rows, positions = torch.unique(all_rows[is_shared], return_inverse=True)
        own = all_values.new_zeros(len(own_rows), self._module.width).index_add_(
            0, positions, all_values[is_shared]
        )
        replicated = all_values.new_zeros(self.layout.row_count - shared, self._module.width)
        replicated.index_add_(0, all_rows[~is_shared] - shared, all_values[~is_shared])
        if self._group is not None and len(replicated):
            with self._timer.time_blocking_transfer("data"):
                dist.all_reduce(replicated, group=self._group)
        # Rows of padding samples, and of those that no target depends on, are not used.
        is_used, is_used_replica = (part.ne(0).any(1) for part in (own, replicated))
        used_replicas = is_used_replica.nonzero()[:, 0]
        self.gradient = TableGradient(
            torch.cat([own_rows[is_used], used_replicas + shared]),
            torch.cat([own[is_used], replicated[used_replicas]]).div_(divisor),
            int(is_used.sum()),
        )

    def reset_gradients(self) -> None:
        """Drop the gradients of the step."""
        for exchange in self._exchanges:
            exchange.finish()
        self._exchanges, self.gradient = [], None


@dataclass(frozen=True)
class TableGradient:
    """Gradient of the rows that a step has used."""

    rows: Tensor
    """Rows of the rank's matrix, each once, (used,) int64."""
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


@dataclass
class _Exchange:
    """Exchange of one lookup: vectors on their way, and then their gradients on the way back."""

    embedding: ShardedEmbedding
    segment_of: Tensor
    """Segment of each id that this rank has asked for, (ids,)."""
    addresses: Tensor
    """Rows that the ranks have asked of this rank's matrix, segment by segment, (addresses,)."""
    lengths: Tensor | None
    """Number of rows of each segment; None: one."""
    asked: list[int]
    """Number of segments that each rank has asked of this one."""
    sent: list[int]
    """Number of segments that this rank has asked of each."""
    _result: Tensor = field(default_factory=lambda: torch.empty(0))
    _work: Any = None
    _source: Tensor | None = None

    def start(self, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """Start to exchange rows of a tensor, of which the ranks get and give that many each."""
        group = self.embedding._group
        self._result = tensor
        if group is not None:
            self._source = tensor.contiguous()
            self._result = tensor.new_empty(sum(received), *tensor.shape[1:])
            self._work = dist.all_to_all_single(
                self._result, self._source, received, sent, group=group, async_op=True
            )

    def finish(self) -> Tensor:
        """Return what has come, once it has."""
        if self._work is not None:
            with self.embedding._timer.time_blocking_transfer("data"):
                self._work.wait()
        result, self._result, self._work, self._source = self._result, torch.empty(0), None, None
        return result


class _ReceivedVectors(torch.autograd.Function):
    """Vectors of an exchange, (segments, width); its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, exchange: _Exchange) -> Tensor:  # noqa: ARG004  # autograd's
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        exchange: _Exchange = ctx.exchange
        exchange.start(gradients[0], exchange.asked, exchange.sent)
        exchange.embedding._exchanges.append(exchange)
        return None, None
