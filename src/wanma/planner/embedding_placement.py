"""Placement of embedding tables on the data ranks: a pure function of tables and plan.

Planner and runtime both call it, so that a forecast is of the placement that runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import TableSharding

MAX_REPLICATED_ELEMENTS = 1 << 22
"""Elements of a table up to which `auto` replicates it: 16 MiB in fp32, as large as a gradient bucket."""

MAX_EXCESS_SHARE = 1 / 8
"""Rows of whole tables that `auto` gives a rank, at most, as a share of an equal part of all rows."""

ROW_ADDRESS_BYTES = 4
"""Memory for each row of a rank whose rows lie on disk: its place in memory, if it has one."""

CACHE_ENTRY_BYTES = 16
"""Memory for each row in memory, beside row and state: its number, last use, uses, and flags."""


def embedding_plan_fields(job: Job) -> dict[str, Any]:
    """Return the plan fields of a job's embedding tables."""
    parallel = job.parallel
    return {
        "embedding": parallel.embedding,
        "embedding_tables": tuple(parallel.embedding_tables.items()),
        "embedding_memory_bytes": parallel.embedding_memory_bytes,
    }


def cached_row_count(memory_bytes: int, rows: int, record_bytes: int) -> int:
    """Return the number of rows that a rank has in memory, of those that lie on its disk.

    Args:
        memory_bytes: memory for rows, state and their addresses.
        rows: rows of the rank.
        record_bytes: bytes of a row and its state.
    """
    free_bytes = max(memory_bytes - rows * ROW_ADDRESS_BYTES, 0)
    return min(free_bytes // (record_bytes + CACHE_ENTRY_BYTES), rows)


def shared_table_ranks(plan: Plan) -> int:
    """Return the number of ranks that share embedding tables; 1 where tables are dense."""
    return 1 if plan.embedding == "dense" else plan.data_parallel_size


@dataclass(frozen=True)
class TablePlacement:
    """Placement of one embedding table on the data ranks."""

    sharding: TableSharding
    rank: int = 0
    """Data rank that holds the whole table; of table-wise tables only."""

    def rows_of(self, rank: int, rows: int, ranks: int) -> range:
        """Return the rows of a table that a rank holds; row-wise, equal parts but for the last ones."""
        if self.sharding == "replicated":
            return range(rows)
        if self.sharding == "table_wise":
            return range(rows if rank == self.rank else 0)
        part = -(-rows // ranks)
        return range(min(rank * part, rows), min((rank + 1) * part, rows))


def place_tables(
    rows: Mapping[str, int], width: int, bag_sizes: Mapping[str, int], plan: Plan
) -> dict[str, TablePlacement]:
    """Return the placement of each table under `plan.embedding` and `plan.embedding_tables`.

    `auto` replicates a small table with no more rows than a micro-batch has bags of it: its gradient is then
    no larger than the exchanged vectors. On GPUs a table with bags goes to one rank, which sends sums of bags
    in place of the vectors in them, if that rank then holds little more than others, and no rank sends more
    than all would of tables split by rows. On CPUs to exchange the different vectors takes less time than to
    sum all on one rank. The rest is split by rows.

    Args:
        rows: rows of each table.
        width: elements of a row.
        bag_sizes: usual number of ids in a bag of a table; 1 where a table has no entry.
        plan: plan of the run.
    """
    ranks = plan.data_parallel_size
    shardings: dict[str, TableSharding | None] = {
        name: _fixed_sharding(name, count, width, plan) for name, count in rows.items()
    }
    share = sum(count for name, count in rows.items() if shardings[name] != "replicated") / ranks
    loads = [0] * ranks
    placements: dict[str, TablePlacement] = {}
    # Longest processing time first (Graham 1969).
    for name in sorted(rows, key=lambda name: (-rows[name], name)):
        sharding, rank = shardings[name], loads.index(min(loads))
        if sharding is None:
            fits = loads[rank] + rows[name] <= MAX_EXCESS_SHARE * share
            sums_bags = bag_sizes.get(name, 1) > 1 and plan.device != "cpu"
            sharding = "table_wise" if fits and sums_bags else "row_wise"
        placements[name] = TablePlacement(sharding, rank if sharding == "table_wise" else 0)
        if sharding == "table_wise":
            loads[rank] += rows[name]
    chosen = [name for name in rows if shardings[name] is None and placements[name].sharding == "table_wise"]
    tables_by_rank = Counter(placements[name].rank for name in chosen)
    split_vectors = sum(min(rows[name], plan.micro_batch * bag_sizes[name]) for name in chosen)
    if max(tables_by_rank.values(), default=0) * ranks * plan.micro_batch > split_vectors:
        placements |= dict.fromkeys(chosen, TablePlacement("row_wise"))
    return {name: placements[name] for name in rows}


def _fixed_sharding(name: str, rows: int, width: int, plan: Plan) -> TableSharding | None:
    """Return the sharding of a table, or None if it depends on the other tables."""
    patterns = (sharding for pattern, sharding in plan.embedding_tables if fnmatchcase(name, pattern))
    if (named := next(patterns, None)) is not None:
        return named
    if plan.embedding in ("row_wise", "table_wise", "replicated"):
        return plan.embedding
    is_small = rows * width <= MAX_REPLICATED_ELEMENTS and rows <= plan.micro_batch
    return "replicated" if is_small else None
