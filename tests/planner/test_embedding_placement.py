"""Placement of embedding tables, and its forecast."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import EmbeddingTable, LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.parallel.embedding.table_layout import TableLayout
from wanma.planner.cost.embedding_exchange import (
    cached_rows,
    distinct_ids,
    embedding_cost,
    table_bytes,
    table_memory_error,
)
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.embedding_placement import (
    CACHE_ENTRY_BYTES,
    ROW_ADDRESS_BYTES,
    cached_row_count,
    place_tables,
)
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.job_planner import complete_plan

ROWS = {"user": 1003, "item": 500, "tags": 60, "language": 7}
BAGS = {"tags": 20}


def plan(ranks: int, embedding: Any = "auto", **fields: Any) -> Plan:
    return Plan(dp_replicate=ranks, micro_batch=8, embedding=embedding, **fields)


def test_auto_replicates_small_tables_and_gives_bags_to_one_rank() -> None:
    placements = place_tables(ROWS, 16, BAGS, plan(2, device="cuda"))
    shardings = {name: placement.sharding for name, placement in placements.items()}
    assert shardings == {
        "user": "row_wise",
        "item": "row_wise",
        "tags": "table_wise",
        "language": "replicated",
    }
    assert place_tables(ROWS, 16, BAGS, plan(2))["tags"].sharding == "row_wise"  # processors sum slowly
    alone = place_tables({"tags": 900}, 16, BAGS, plan(2, device="cuda"))
    assert alone["tags"].sharding == "row_wise"  # one rank would have all
    # It would send 8 bags to each of 8 ranks; split by rows each sends 60 vectors at most.
    many = place_tables({**ROWS, "user": 100_003}, 16, BAGS, plan(8, device="cuda"))
    assert many["tags"].sharding == "row_wise"


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
    sizes = torch.tensor(list(ROWS.values()))
    ids = torch.cat([torch.arange(rows) for rows in ROWS.values()])
    for rank in range(ranks):
        layout = TableLayout(ROWS, placements, rank, ranks)
        holders, rows, outside = layout.locate(ids, sizes)
        assert outside == -1
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


def test_a_plan_without_room_for_a_row_is_refused() -> None:
    sections = {"model": {"family": "recommender", "kind": "dlrm"}, "train": {"embedding_optimizer": "adam"}}
    tables = (EmbeddingTable("e", "user", 1000, 16, 1, 32.0),)
    workload = Workload((LayerWorkload("dense", 1, 5000, 1e6, 1e3),), 1, tables=tables)
    box = Cluster((NodeGroup("box", 8, 64 << 30, ()),))
    for size, is_refused in ((4000, True), (40_000, False)):
        chosen = plan(1, "row_wise", embedding_memory_bytes=size)
        if not is_refused:
            complete_plan(Job.model_validate(sections), chosen, box, workload)
            continue
        with pytest.raises(JobError, match=r"parallel\.embedding_memory_bytes = 4000"):
            complete_plan(Job.model_validate(sections), chosen, box, workload)


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_for_no_row_is_refused_with_the_least_that_holds_one(ranks: int) -> None:
    widths = {"embeddings": 16, "biases": 1}
    tables = tuple(
        EmbeddingTable(module, name, rows, width, 1, width)
        for module, width in widths.items()
        for name, rows in ROWS.items()
    )
    workload, row_wise = Workload((), 1, tables=tables), plan(ranks, "row_wise")
    assert table_memory_error(workload, row_wise) is None
    error = table_memory_error(workload, replace(row_wise, embedding_memory_bytes=1))
    assert error is not None
    assert re.match(r"parallel\.embedding_memory_bytes = 1 .*rank 0", error.message)
    least = int(error.hint.split()[3])
    assert table_memory_error(workload, replace(row_wise, embedding_memory_bytes=least)) is None
    assert table_memory_error(workload, replace(row_wise, embedding_memory_bytes=least - 1)) is not None
    # As `ShardedEmbedding.keep_on_disk` and `RowCache` divide it.
    count = TableLayout(ROWS, place_tables(ROWS, 16, {}, row_wise), 0, ranks).row_count
    sizes = {
        module: count * (4 * width + CACHE_ENTRY_BYTES + ROW_ADDRESS_BYTES)
        for module, width in widths.items()
    }
    for given, is_enough in ((least, True), (least - 1, False)):
        parts = {module: given * size // sum(sizes.values()) for module, size in sizes.items()}
        rows = [cached_row_count(parts[module], count, 8 * width) for module, width in widths.items()]
        assert (min(rows) > 0) == is_enough


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


def bag_cost(rows: int, embedding: Any, micro_batch: int) -> tuple[LayerCost, float]:
    """Return the cost of bags of 100 ids on two H100, and the seconds to read the vectors of one rank."""
    node = build_node_group(require_device_kind("H100 SXM"), 1, 2, nics=None)
    hardware = build_hardware_model(Cluster((node,)))
    tables = (EmbeddingTable("e", "tags", rows, 128, 100, 1.0),)
    chosen = replace(plan(2, embedding), micro_batch=micro_batch, precision="bf16", device="cuda")
    read_seconds = micro_batch * 100 * 128 * 2 / hardware.chip.bandwidth_bytes_per_second
    return embedding_cost(tables, chosen, hardware), read_seconds


def test_the_vectors_of_bags_are_read_for_their_sums() -> None:
    cost, read_seconds = bag_cost(1000, "row_wise", 65_536)
    assert min(cost.forward, cost.backward_weight) > read_seconds


def test_a_row_is_updated_once_however_many_bags_have_it() -> None:
    cost, read_seconds = bag_cost(100_000, "table_wise", 8192)
    # The holder reads rows of 32 bits, for both ranks: four times the vectors of one.
    assert 4 * read_seconds < cost.backward_weight < 16 * read_seconds
