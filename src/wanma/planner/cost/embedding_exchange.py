"""Cost of embedding tables that data ranks share: memory, lookups, exchanged vectors and updates of one rank.

Ids are taken to follow Zipf's law, as those of click logs do: few rows get most lookups, and an id that a
rank uses again in a micro-batch does not travel again. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import EmbeddingTable, Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.offload import master_weight_bytes
from wanma.planner.embedding_placement import (
    CACHE_ENTRY_BYTES,
    ROW_ADDRESS_BYTES,
    TablePlacement,
    cached_row_count,
    place_tables,
)
from wanma.planner.hardware_model.collective_time import RankGroup, all_reduce_seconds, all_to_all_seconds
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES, memory_bound_seconds

ZIPF_EXPONENT = 1.05
"""Exponent of the frequencies of ids: an assumption, which plans state. A larger one exchanges less."""
_ID_BYTES = 8
_PAGE_BYTES = 4096
"""Bytes that are read from a disk for a row, at least."""
_EXCHANGE_KERNELS = 20
"""Kernels of one lookup and its exchange; its gradient takes as many."""


class TableBytes(NamedTuple):
    """Bytes of the tables on the rank that holds most."""

    weights: float
    state: float

    def in_memory(self, plan: Plan) -> TableBytes:
        """Return the bytes in memory: all, or those of `plan.embedding_memory_bytes`, addresses included."""
        if plan.embedding_memory_bytes is None or self.weights == 0:
            return self
        share = min(plan.embedding_memory_bytes / (self.weights + self.state), 1.0)
        return TableBytes(self.weights * share, self.state * share)


def table_bytes(workload: Workload, plan: Plan) -> TableBytes:
    """Return the bytes of the tables on the fullest rank."""
    weights, state = [0.0] * plan.data_parallel_size, [0.0] * plan.data_parallel_size
    for table, placement in _placed(workload.tables, plan):
        for rank in range(plan.data_parallel_size):
            rows = len(placement.rows_of(rank, table.rows, plan.data_parallel_size))
            weights[rank] += rows * table.width * master_weight_bytes(plan)
            state[rank] += rows * table.state_elements_per_row * master_weight_bytes(plan)
    fullest = max(range(len(weights)), key=lambda rank: weights[rank] + state[rank])
    return TableBytes(weights[fullest], state[fullest])


class _Exchange(NamedTuple):
    """Traffic of one rank and micro-batch; of the rank with most, where they differ."""

    rows_read: float
    """Bytes of rows that the rank looks up for all ranks."""
    rows_sent: float
    """Bytes of the vectors that it gets from them: a bag that it sums is one."""
    rows_updated: float
    """Bytes of its rows that any rank uses."""
    summed: float
    """Bytes of the vectors of all ids, which the rank adds up, and of the sums of bags."""
    id_bytes: float
    vector_bytes: float
    """Bytes of vectors that the rank receives, or sends if that is more."""
    replicated_bytes: float
    """Bytes of the gradient of replicated tables."""


def embedding_cost(tables: Sequence[EmbeddingTable], plan: Plan, hardware: HardwareModel) -> LayerCost:
    """Return the cost of all tables for one micro-batch on the busiest rank."""
    traffic, group = _exchange(tables, plan), RankGroup(plan.data_parallel_size)
    look_up = traffic.rows_read + traffic.rows_sent + traffic.summed
    # Gradients are read for each row that is asked for; sums, weights and state are read and written.
    update = traffic.rows_read + 7 * traffic.rows_updated + traffic.summed
    vectors = all_to_all_seconds(hardware, group, traffic.vector_bytes)
    ids = all_to_all_seconds(hardware, group, traffic.id_bytes)
    reduce = all_reduce_seconds(hardware, group, traffic.replicated_bytes)
    return LayerCost(
        forward=memory_bound_seconds(hardware.chip, look_up, _EXCHANGE_KERNELS),
        backward_weight=memory_bound_seconds(hardware.chip, update, 2 * _EXCHANGE_KERNELS),
        kernels_forward=_EXCHANGE_KERNELS,
        kernels_backward=2 * _EXCHANGE_KERNELS,
        embedding_forward=ids + vectors,
        embedding_backward=vectors + reduce,
    )


def embedding_reasons(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Describe the placement of the tables and what ranks exchange; empty where tables are dense."""
    if not workload.tables:
        return ()
    names: dict[str, list[str]] = {}
    for table, placement in _placed(workload.tables, plan):
        holder = f" (rank {placement.rank})" if placement.sharding == "table_wise" else ""
        names.setdefault(placement.sharding, []).append(f"{table.name}{holder}")
    placed = "; ".join(f"{sharding}: {', '.join(members)}" for sharding, members in sorted(names.items()))
    traffic, fullest = _exchange(workload.tables, plan), table_bytes(workload, plan)
    return (
        f"embedding tables, {placed}",
        f"the rank with most of them holds {bytes_text(int(fullest.weights))} of rows and "
        f"{bytes_text(int(fullest.state))} of optimizer state; a micro-batch exchanges "
        f"{bytes_text(int(traffic.vector_bytes))} of vectors and as much of gradients on a rank (ids by "
        f"Zipf's law, exponent {ZIPF_EXPONENT})",
    )


class CachedRows(NamedTuple):
    """Rows that the fullest rank has in memory, of tables on disk, and those that it reads in a step."""

    rows: int
    memory_rows: int
    used_rows: float
    """Different rows that a step uses."""
    read_rows: float
    """Rows of a step that are not in memory, if the rows with most uses are."""
    moved_bytes: float
    """Bytes of the pages that are read for them, and written for the rows that they replace."""

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.read_rows / self.used_rows if self.used_rows else 1.0


def cached_rows(workload: Workload, plan: Plan, global_batch: int) -> CachedRows:
    """Return the use of `plan.embedding_memory_bytes`, which must not be None, by the fullest rank."""
    assert plan.embedding_memory_bytes is not None
    ranks, element_bytes = plan.data_parallel_size, master_weight_bytes(plan)
    placed = list(_placed(workload.tables, plan))
    parts = [
        [(table, len(place.rows_of(rank, table.rows, ranks))) for table, place in placed]
        for rank in range(ranks)
    ]
    fullest = max(parts, key=lambda part: sum(rows * _record_elements(table) for table, rows in part))
    rows = sum(count for _, count in fullest)
    record_bytes = element_bytes * sum(count * _record_elements(table) for table, count in fullest) / rows
    memory_rows = cached_row_count(plan.embedding_memory_bytes, rows, round(record_bytes))
    used, read = 0.0, [0.0]
    for table, count in fullest:
        draws, share = global_batch * table.ids_per_sample, count / table.rows
        used += share * distinct_ids(table.rows, draws)
        first = round(table.rows * memory_rows / rows)
        read.append(share * distinct_ids(table.rows, draws, first))
    pages = -(-record_bytes // _PAGE_BYTES)
    return CachedRows(rows, memory_rows, used, sum(read), 2 * sum(read) * pages * _PAGE_BYTES)


def row_cache_reasons(
    workload: Workload, plan: Plan, global_batch: int, hardware: HardwareModel
) -> tuple[str, ...]:
    """Describe the rows in memory and on disk; empty where memory holds all."""
    if plan.embedding_memory_bytes is None or not workload.tables:
        return ()
    fullest, cached = table_bytes(workload, plan), cached_rows(workload, plan, global_batch)
    seconds = cached.moved_bytes / hardware.host.disk_bytes_per_second
    return (
        f"embedding tables on disk: {bytes_text(int(sum(fullest)))} on the fullest rank, which has "
        f"{cached.memory_rows:,} of {cached.rows:,} rows in memory; {cached.hit_rate:.0%} of the "
        f"{cached.used_rows:,.0f} rows of a step are expected to be there, and the others are read while the "
        f"step before runs: {bytes_text(int(cached.moved_bytes))} read and written a step, "
        f"{duration_text(seconds)} at the disk's sequential rate, which the step time leaves out",
    )


def table_memory_error(workload: Workload, plan: Plan) -> JobError | None:
    """Return the error for `plan.embedding_memory_bytes` that hold no row of some rank's tables, or None."""
    given = plan.embedding_memory_bytes
    if given is None or plan.embedding == "dense" or not workload.tables:
        return None
    placed, ranks = list(_placed(workload.tables, plan)), plan.data_parallel_size
    parts = [
        [(table, len(place.rows_of(rank, table.rows, ranks))) for table, place in placed]
        for rank in range(ranks)
    ]
    needed = [_least_memory(part, master_weight_bytes(plan)) for part in parts]
    rank = needed.index(max(needed))
    if given >= needed[rank]:
        return None
    return JobError(
        f"parallel.embedding_memory_bytes = {given} has no room for a row of each of the embedding tables "
        f"of rank {rank} beside the addresses of its rows, which needs {needed[rank]} bytes",
        f"set parallel.embedding_memory_bytes to {needed[rank]} or more, for the rows of a step too, or use "
        "more ranks",
    )


def _least_memory(part: Sequence[tuple[EmbeddingTable, int]], element_bytes: float) -> int:
    """Return the least `plan.embedding_memory_bytes` with which a rank holds a row of each module's tables.

    Modules share the bytes as `parallel.embedding` divides them: by the size of their rows without state.

    Args:
        part: tables, and the rows of each that the rank has.
        element_bytes: bytes of an element of a row.
    """
    counts: dict[str, int] = {}
    for table, count in part:
        counts[table.module] = counts.get(table.module, 0) + count
    sizes, needed = list[int](), list[int]()
    for table in {table.module: table for table, _ in part if counts[table.module]}.values():
        rows = counts[table.module]
        sizes.append(rows * (int(table.width * element_bytes) + CACHE_ENTRY_BYTES + ROW_ADDRESS_BYTES))
        record_bytes = round(element_bytes * _record_elements(table))
        needed.append(rows * ROW_ADDRESS_BYTES + record_bytes + CACHE_ENTRY_BYTES)
    shares = zip(needed, sizes, strict=True)
    return max((-(-least * sum(sizes) // size) for least, size in shares), default=0)


def _record_elements(table: EmbeddingTable) -> float:
    return table.width + table.state_elements_per_row


def distinct_ids(rows: int, draws: float, first: int = 0) -> float:
    """Return the expected number of different ids among `draws` of a table's, which follow Zipf's law.

    A row of probability p is drawn with probability 1 − exp(−draws × p); rows are added up in groups of like
    probability.

    Args:
        rows: rows of the table.
        draws: number of ids.
        first: number of the most frequent ids that do not count.
    """
    edges = np.unique(np.geomspace(1, rows + 1, 400).astype(np.int64))
    counts = np.diff(edges)
    weights = ((edges[:-1] + edges[1:] - 1) / 2) ** -ZIPF_EXPONENT
    probabilities = weights / (weights * counts).sum()
    counted = np.clip(edges[1:] - np.maximum(edges[:-1], first + 1), 0, None)
    return float((counted * -np.expm1(-draws * probabilities)).sum())


def _exchange(tables: Sequence[EmbeddingTable], plan: Plan) -> _Exchange:
    ranks, element = plan.data_parallel_size, ELEMENT_BYTES[plan.precision]
    received = ids = replicated = shared_reads = shared_updates = summed = 0.0
    sent, reads, updates = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for table, placement in _placed(tables, plan):
        draws = plan.micro_batch * table.ids_per_sample
        distinct = distinct_ids(table.rows, draws)
        used = distinct_ids(table.rows, ranks * draws) * table.width
        is_whole = placement.sharding == "table_wise"
        arrives_summed = is_whole and table.ids_per_sample > 1 and table.rows > plan.micro_batch
        summed += (plan.micro_batch + (plan.micro_batch if arrives_summed else draws)) * table.width
        if placement.sharding == "replicated":
            replicated += table.rows * table.width * ELEMENT_BYTES["fp32"]
            shared_reads += distinct * table.width
            shared_updates += used
            continue
        if placement.sharding == "row_wise":
            vectors = wanted = distinct
            shared_reads += distinct * table.width
            shared_updates += used / ranks
        else:
            vectors, wanted = (float(plan.micro_batch), draws) if arrives_summed else (distinct, distinct)
            sent[placement.rank] += ranks * vectors * table.width
            reads[placement.rank] += ranks * wanted * table.width
            updates[placement.rank] += used
        received += vectors * table.width
        ids += wanted * _ID_BYTES
    even = received - sum(sent) / ranks  # what row-wise tables send, as much as they receive
    return _Exchange(
        (shared_reads + max(reads)) * ELEMENT_BYTES["fp32"],
        (shared_reads + max(sent)) * ELEMENT_BYTES["fp32"],
        (shared_updates + max(updates)) * ELEMENT_BYTES["fp32"],
        summed * element,
        ids,
        max(received, even + max(sent)) * element,
        replicated,
    )


def _placed(tables: Sequence[EmbeddingTable], plan: Plan) -> Iterator[tuple[EmbeddingTable, TablePlacement]]:
    for module in dict.fromkeys(table.module for table in tables):
        members = {table.name: table for table in tables if table.module == module}
        rows = {name: table.rows for name, table in members.items()}
        sizes = {name: table.ids_per_sample for name, table in members.items()}
        width = next(iter(members.values())).width
        for name, placement in place_tables(rows, width, sizes, plan).items():
            yield members[name], placement
