"""Speedup and efficiency of contenders on different amounts of hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.scaling_results import record, result
from wanma.bench.figures.scaling import find_scalings
from wanma.bench.presentation.page import result_page
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.result import ContenderRecord
from wanma.cli.main import main
from wanma.job.cluster import Cluster, NodeGroup


def test_the_published_curve_of_four_servers_is_recomputed() -> None:
    """Speedup 3.5 on 4 servers: efficiency 0.875."""
    (scaling,) = find_scalings(result([record(4), record(1)], [350.0, 100.0]))
    assert (scaling.kind, scaling.unit) == ("strong", "GPUs")
    one, four = scaling.rows
    assert (one.ranks, one.speedup.median, one.efficiency) == (1, 1.0, 1.0)
    assert four.speedup.median == pytest.approx(3.5)
    assert four.ideal == 4.0
    assert four.efficiency == pytest.approx(0.875)
    assert four.forecast == pytest.approx(4**0.9)
    assert four.speedup.has_interval


def test_the_same_batch_per_rank_is_weak_scaling() -> None:
    (scaling,) = find_scalings(result([record(1, 8), record(2, 16)], [100.0, 180.0]))
    assert scaling.kind == "weak"
    assert scaling.rows[1].efficiency == pytest.approx(0.9)


def test_on_cpus_the_devices_are_cores() -> None:
    (scaling,) = find_scalings(result([record(1, device="cpu"), record(2, device="cpu")], [100.0, 150.0]))
    assert scaling.unit == "cores"
    assert [row.devices for row in scaling.rows] == [2, 4]


def nodes(count: int, cores: int = 2) -> Cluster:
    return Cluster((NodeGroup("node", cores=cores, memory_bytes=1 << 30, devices=(), count=count),))


def cpu_record(ranks: int, threads: int) -> ContenderRecord:
    return record(ranks, device="cpu", threads=threads, cluster=nodes(1))


def test_threads_beyond_the_cores_are_no_devices() -> None:
    """4 ranks on 2 cores have 2 cores: the ideal is 2, and the row says so."""
    (scaling,) = find_scalings(result([cpu_record(one, 1) for one in (1, 2, 4)], [100.0, 190.0, 180.0]))
    assert [row.devices for row in scaling.rows] == [1, 2, 2]
    assert [row.ideal for row in scaling.rows] == [1.0, 2.0, 2.0]
    assert scaling.rows[2].efficiency == pytest.approx(0.9)
    assert "1 thread." in scaling.note
    assert "4: 4 threads share 2 cores" in scaling.note
    assert "2: " not in scaling.note


def test_unequal_threads_are_told() -> None:
    (scaling,) = find_scalings(result([cpu_record(1, 2), cpu_record(2, 1)], [100.0, 104.9]))
    assert [row.ideal for row in scaling.rows] == [1.0, 1.0]
    assert "cluster.threads_per_rank" in scaling.note


def test_efficiency_over_servers_stands_beside_that_over_devices() -> None:
    """Four servers of four cards: 3.5 over one server, and 0.875 of them; over a card each."""
    records = [record(ranks, cluster=nodes(count)) for ranks, count in ((1, 1), (4, 1), (16, 4))]
    found = result(records, [100.0, 390.0, 1365.0])
    devices, servers = find_scalings(found)
    assert [row.ideal for row in devices.rows] == [1.0, 4.0, 16.0]
    assert devices.rows[2].efficiency == pytest.approx(13.65 / 16)
    assert [(row.ranks, row.devices) for row in servers.rows] == [(4, 1), (16, 4)], "one card is no server"
    assert servers.rows[1].efficiency == pytest.approx(0.875)
    page = result_page(found)
    assert "Strong scaling over servers" in page
    assert "the quotient of the servers" in page


def test_on_one_server_there_is_no_scaling_over_servers() -> None:
    found = result([record(1, cluster=nodes(1)), record(4, cluster=nodes(1))], [1.0, 3.0])
    assert [one.unit for one in find_scalings(found)] == ["GPUs"]


@pytest.mark.parametrize(
    "records",
    [
        [record(1)],
        [record(1), record(2, 12)],
        [record(1), record(2, **{"train.precision": "bf16"})],
        [record(2), replace(record(2), name="same")],
        [record(1), ContenderRecord("2", "command")],
    ],
    ids=["one", "another batch", "another setting", "the same ranks", "a command"],
)
def test_anything_else_is_no_scaling(records: list[ContenderRecord]) -> None:
    assert find_scalings(result(records, [100.0] * len(records))) == []


def named(name: str, ranks: int, batch: int = 8, precision: str = "fp32") -> ContenderRecord:
    own = record(ranks, batch)
    settings = {**own.settings, "train.precision": precision, "train.compile": "true"}
    return replace(own, name=name, settings=settings)


def test_each_precision_has_a_scaling_of_its_own() -> None:
    records = [
        named(f"{precision} {ranks}", ranks, precision=precision)
        for precision in ("fp32", "bf16")
        for ranks in (1, 2)
    ]
    found = result(records, [100.0, 190.0, 300.0, 450.0])
    assert [(one.title, [row.contender for row in one.rows]) for one in find_scalings(found)] == [
        ("Strong scaling: precision=fp32", ["fp32 1", "fp32 2"]),
        ("Strong scaling: precision=bf16", ["bf16 1", "bf16 2"]),
    ]
    assert [one.rows[1].speedup.median for one in find_scalings(found)] == pytest.approx([1.9, 1.5])
    assert "Strong scaling: precision=bf16" in result_page(found)


def test_each_global_batch_has_a_scaling_of_its_own() -> None:
    records = [named(f"{batch} on {ranks}", ranks, batch) for batch in (8, 16) for ranks in (1, 2)]
    found = find_scalings(result(records, [100.0, 190.0, 110.0, 200.0]))
    assert [one.title for one in found] == [
        "Strong scaling: global_batch=8",
        "Strong scaling: global_batch=16",
    ]


def test_a_contender_with_another_setting_leaves_the_scaling_of_the_others() -> None:
    records = [record(1), record(2), named("bf16", 2, precision="bf16")]
    (scaling,) = find_scalings(result(records, [100.0, 190.0, 300.0]))
    assert [row.contender for row in scaling.rows] == ["1", "2"]


def test_a_contender_without_a_common_round_has_no_speedup() -> None:
    found = result([record(1), record(2), record(4)], [100.0, 190.0, 350.0])
    found.values["2"]["samples_per_second"] = {77: 190.0}  # type: ignore[index]
    (scaling,) = find_scalings(found)
    assert [row.ranks for row in scaling.rows] == [1, 4]


def test_the_page_has_the_table_and_its_definitions() -> None:
    page = result_page(result([record(1), record(4)], [100.0, 350.0]))
    assert "Strong scaling" in page
    assert "87.5 %" in page
    assert "the quotient of the devices" in page


def test_the_markdown_of_a_result_has_the_table_and_its_definitions(tmp_path: Path) -> None:
    directory = ResultDirectory(tmp_path / "result")
    directory.write_result(result([record(1), record(4)], [100.0, 350.0]))
    assert main(["bench", "export", str(directory.path), "--format", "markdown"]) == 0
    text = (directory.path / "result.md").read_text()
    assert "**Strong scaling**" in text
    assert "| 87.5 % |" in text
    assert "the quotient of the devices" in text
