"""Placement of embedding tables, and its forecast."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from wanma.job.forecast.forecast import EmbeddingTable, Workload
from wanma.job.plan.plan import Plan
from wanma.parallel.embedding.table_layout import TableLayout
from wanma.planner.cost.embedding_exchange import cached_rows, distinct_ids, table_bytes
from wanma.planner.embedding_placement import place_tables

ROWS = {"user": 1003, "item": 500, "tags": 60, "language": 7}
BAGS = {"tags": 20}


def plan(ranks: int, embedding: Any = "auto", **fields: Any) -> Plan:
    return Plan(dp_replicate=ranks, micro_batch=8, embedding=embedding, **fields)


def test_auto_replicates_small_tables_and_gives_bags_to_one_rank() -> None:
    placements = place_tables(ROWS, 16, {"tags": 3}, plan(2))
    shardings = {name: placement.sharding for name, placement in placements.items()}
    assert shardings == {
        "user": "row_wise",
        "item": "row_wise",
        "tags": "table_wise",
        "language": "replicated",
    }
    assert place_tables(ROWS, 16, BAGS, plan(2))["tags"].sharding == "replicated"  # 160 ids, 60 rows
    assert place_tables({"tags": 900}, 16, BAGS, plan(2))["tags"].sharding == "row_wise"  # one rank's alone


def test_a_pattern_replaces_the_sharding_of_its_tables() -> None:
    chosen = plan(3, "row_wise", embedding_tables=(("*er", "replicated"), ("u*", "table_wise")))
    placements = place_tables(ROWS, 16, {}, chosen)
    assert placements["user"].sharding == "replicated"
    assert placements["item"].sharding == "row_wise"
    assert Plan.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("embedding", ["auto", "row_wise", "table_wise", "replicated"])
def test_each_id_has_one_row_on_one_rank(ranks: int, embedding: str) -> None:
    placements = place_tables(ROWS, 16, BAGS, plan(ranks, embedding))
    keys = torch.arange(sum(ROWS.values()))
    for rank in range(ranks):
        layout = TableLayout(ROWS, placements, rank, ranks)
        holders, rows = layout.locate(keys)
        places = list(zip(holders.tolist(), rows.tolist(), strict=True))
        assert len(set(places)) == len(places)
        own = sorted(row for holder, row in places if holder == rank)
        assert own == list(range(layout.row_count))  # nothing is held that no id has
        ends = [(held.start, held.start + held.count) for held in layout.local_rows]
        assert all(end == start for (_, end), (start, _) in pairwise(ends))


def test_the_fullest_rank_of_a_forecast_holds_what_the_layout_gives_it() -> None:
    tables = tuple(EmbeddingTable("e", name, rows, 16, 1, 1.0) for name, rows in ROWS.items())
    chosen = plan(3, "row_wise", embedding_tables=(("item", "table_wise"), ("tags", "replicated")))
    forecast = table_bytes(Workload((), 1, tables=tables), chosen)
    placements = place_tables(ROWS, 16, {}, chosen)
    rows = max(TableLayout(ROWS, placements, rank, 3).row_count for rank in range(3))
    assert (forecast.weights, forecast.state) == (rows * 64, rows * 4)


def test_a_forecast_of_rows_on_disk_follows_the_memory_for_them() -> None:
    tables = tuple(EmbeddingTable("e", name, rows, 16, 1, 1.0) for name, rows in ROWS.items())
    workload = Workload((), 1, tables=tables)
    whole = table_bytes(workload, plan(2, "row_wise"))
    used, hit_rates = [], []
    for share in (0.1, 0.5, 2.0):
        size = int(share * sum(whole))
        chosen = plan(2, "row_wise", embedding_memory_bytes=size)
        assert Plan.from_json(chosen.to_json()) == chosen
        assert sum(table_bytes(workload, chosen)) == sum(whole)
        assert sum(table_bytes(workload, chosen).in_memory(chosen)) == pytest.approx(min(size, sum(whole)))
        cached = cached_rows(workload, chosen, 64)
        assert cached.memory_rows * 68 <= size
        used.append(cached.used_rows)
        hit_rates.append(cached.hit_rate)
    assert hit_rates[0] < hit_rates[1] < hit_rates[2] == 1.0
    assert used == [pytest.approx(used[0])] * 3
    assert cached.moved_bytes == 0


def test_the_most_frequent_ids_are_left_out_of_a_count() -> None:
    ranks = torch.arange(1, 5001, dtype=torch.float64) ** -1.05
    draws = [torch.multinomial(ranks, 2000, replacement=True).unique() for _ in range(20)]
    rare = sum(int((ids >= 500).sum()) for ids in draws) / 20
    assert distinct_ids(5000, 2000, first=500) == pytest.approx(rare, rel=0.03)
    assert distinct_ids(5000, 2000, first=5000) == 0


def test_ids_that_come_again_are_counted_once() -> None:
    assert distinct_ids(1000, 1) == pytest.approx(1, rel=0.1)
    assert distinct_ids(10, 100_000) == pytest.approx(10)
    ranks = torch.arange(1, 5001, dtype=torch.float64) ** -1.05
    draws = [len(torch.multinomial(ranks, 2000, replacement=True).unique()) for _ in range(20)]
    assert distinct_ids(5000, 2000) == pytest.approx(sum(draws) / 20, rel=0.02)
