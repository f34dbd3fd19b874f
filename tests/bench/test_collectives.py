"""`wanma bench collectives`, really measured."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from wanma.bench.collectives.benchmark import bench_collectives, parse_benchmark_cluster
from wanma.bench.collectives.results import CollectiveResults, figure_lines
from wanma.bench.collectives.selection import parse_sizes
from wanma.bench.suites.suite_file import find_suite, make_suite, read_suite_file
from wanma.cli.main import main
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.measurement.bandwidth import CollectiveTiming
from wanma.job.errors import JobError

CPU = "cluster.device=cpu"


def test_every_collective_is_measured_by_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "collectives", "--ranks", "3", "--sizes", "1K,64K", "--dtypes", "fp32,bf16"]
    arguments += ["--seconds", "1", "--set", CPU, "--figures"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "3 ranks: round 1" in captured.err
    assert re.search("3 ranks, (shared|gloo): ", captured.out)
    assert "copies within memory" in captured.out
    rows = re.findall(r"^wanma figure (\w+)_(fp32|bf16)_(\d+)_bytes_seconds (\S+)$", captured.out, re.M)
    measured = {name for name, *_ in rows}
    assert measured >= {
        "all_reduce_backend",
        "all_reduce_ring",
        "all_reduce_tree",
        "all_reduce_halving_doubling",
        "all_reduce_hierarchical",
        "all_gather_backend",
        "all_gather_direct",
        "all_gather_ring",
        "reduce_scatter_direct",
        "reduce_scatter_ring",
        "all_to_all_backend",
        "broadcast_backend",
        "broadcast_tree",
    }
    assert len(rows) == len(measured) * 2 * 2
    for _, dtype, size_bytes, seconds in rows:
        assert float(seconds) > 0
        size, item = int(size_bytes), 4 if dtype == "fp32" else 2
        assert size % (3 * item) == 0, "whole elements for every rank"
        assert 0 <= size - (1024 if size < 60000 else 65536) < 3 * item


def timing(algorithm: str, size: int, ranks: int = 2) -> CollectiveTiming:
    return CollectiveTiming("all_reduce", algorithm, "fp32", ranks, 1, size, 2e-6 * size, 1e9)


def sweep_of(*timings: CollectiveTiming) -> CollectiveResults:
    return CollectiveResults(2, 1, "gloo", "", "", timings, 0)


def test_figures_have_names_that_two_algorithms_share() -> None:
    ring, tree = (sweep_of(timing(one, 4096), timing(one, 8192)) for one in ("ring", "tree"))
    assert list(figure_lines([ring])) == list(figure_lines([tree])) == [
        "wanma figure all_reduce_4096_bytes_seconds 0.008192000",
        "wanma figure all_reduce_8192_bytes_seconds 0.016384000",
    ]  # fmt: skip
    both = sweep_of(timing("ring", 1), timing("tree", 1))
    assert [line.split()[2] for line in figure_lines([both])] == [
        "all_reduce_ring_1_bytes_seconds", "all_reduce_tree_1_bytes_seconds",
    ]  # fmt: skip
    names = [line.split()[2] for line in figure_lines([sweep_of(timing("ring", 1, 4)), ring])]
    assert names[0] == "all_reduce_of_4_1_bytes_seconds"


def test_the_suite_compares_all_algorithms_by_figures_that_they_print() -> None:
    path = find_suite("collectives")
    suite = make_suite("collectives", read_suite_file(path), path.parent)
    names = ["backend", *ALGORITHMS["all_reduce"]]
    assert {one.name for one in suite.contenders} == {f"all_reduce={name}" for name in names}
    for one in suite.contenders:
        algorithm = one.name.removeprefix("all_reduce=")
        sizes = parse_sizes(one.command[one.command.index("--sizes") + 1])
        sweep = sweep_of(*(timing(algorithm, size, 4) for size in sizes))
        assert [line.split()[2] for line in figure_lines([sweep])] == suite.file.metrics
        assert one.command[one.command.index("--algorithms") + 1] == algorithm
        assert one.command[one.command.index("--ranks") + 1] == "4"


@pytest.mark.full
def test_two_machines_measure_together_and_the_first_one_shows_it(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{sock.getsockname()[1]}"
    command = [sys.executable, "-m", "wanma", "bench", "collectives", "--nodes", "2", "--rendezvous", place]
    command += [
        "--ranks",
        "1",
        "--sizes",
        "4K",
        "--collectives",
        "all_reduce",
        "--seconds",
        "1",
        "--set",
        CPU,
    ]
    both = [
        subprocess.Popen([*command, "--node-rank", number], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for number in ("0", "1")
    ]
    (first, _), (second, _) = (one.communicate(timeout=280) for one in both)
    assert [one.returncode for one in both] == [0, 0]
    assert re.search("2 ranks on 2 nodes, (shared|gloo): ", first)
    assert "messages between two nodes" in first
    assert "doubling" in first
    assert second == "measurement complete; results are shown on the node of rank 0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "1Q"], "'1Q' is not a size"),
        (["--ranks", "1"], "needs at least 2 ranks"),
        (["--ranks", "two"], "'two' is not a list of numbers"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--algorithms", "butterfly"], "unknown name 'butterfly'"),
        (["--dtypes", "int3"], "unknown name 'int3'"),
        (["--set", "train.steps=3"], "train.steps is not a key of [cluster]"),
        (["--nodes", "2..3"], "cluster.nodes = '2..3'"),
        (["--ranks", "64", "--sizes", "16G"], "3 buffers of 16.0 GiB"),
    ],
)
def test_what_cannot_be_measured_is_one_message_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "collectives", "--set", CPU, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_several_numbers_of_ranks_are_for_one_machine() -> None:
    with pytest.raises(JobError, match="one number of ranks per run"):
        bench_collectives(ranks=[1, 2], overrides=[CPU, "cluster.nodes=2", "cluster.rendezvous=127.0.0.1:1"])


def test_options_say_where_it_runs() -> None:
    section = parse_benchmark_cluster(["cluster.nodes=2", "cluster.network_interface=eth1"])
    assert (section.nodes, section.network_interface) == (2, "eth1")
    with pytest.raises(JobError, match=r"cluster\.budget"):
        parse_benchmark_cluster(["cluster.budget.hours=2"])
