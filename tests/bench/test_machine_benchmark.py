"""`wanma bench machine`, really measured, and what it refuses."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from support.command import share_compiled
from support.launcher_environments import srun
from wanma.api.calibration.corrections import correct_calibration
from wanma.bench.figures import precision
from wanma.bench.machine.cases import known_algorithms
from wanma.bench.machine.collective_selection import parse_sizes
from wanma.bench.machine.execution import parse_benchmark_cluster
from wanma.bench.machine_benchmark import launched_overrides, machine_suite, node_role
from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.statistics.warm_up import find_warm_up
from wanma.bench.suites.suite_file import find_suite
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.cli.main import main
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.engines.launchers.placement import read_placement
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import JobError
from wanma.job.run.resource_limits import cpu_model
from wanma.job.run.run_directory import RunDirectory
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.hardware_model.operator_time import matmul_seconds

CPU = ["--set", "cluster.device=cpu"]
QUICK = ["--rounds", "1", "--seconds", "0.2", "--foreign-limit", "1000"]
ON_CPU = not discover_node().nodes[0].devices
JOB = """
[model]
preset = "gpt-1m"

[data]
text = ["stdlib"]
sequence_length = 64

[train]
steps = 6
global_batch = 4

[parallel]
dp_replicate = 2

[cluster]
device = "cpu"
"""


def bench(*words: str) -> int:
    return main(["bench", *words])


def newest(root: Path = Path("bench-results")) -> ResultDirectory:
    return ResultDirectory(max(path for path in root.iterdir() if path.is_dir()))


def test_every_collective_is_measured_by_every_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--ranks", "3", "--sizes", "1K,64K", "--rounds", "1", "--seconds", "1"]
    assert bench("machine", *arguments, "--foreign-limit", "1000", *CPU) == 0
    assert "halving doubling" in capsys.readouterr().out
    (measurement,) = newest().read().measurements
    names = [name.split(".") for name in measurement.figures if name.endswith("fp32.1024_seconds")]
    assert {(collective, algorithm) for collective, algorithm, *_ in names} == {*known_algorithms("cpu")}
    for collective, algorithm, *_ in names:
        assert 0 < measurement.figures[f"{collective}.{algorithm}.fp32.65536_seconds"] < math.inf


def test_the_suite_compares_all_algorithms_by_figures_that_they_print(tmp_path: Path) -> None:
    suite, _ = read_suite_or_job(find_suite("collectives"))
    names = ["backend", *ALGORITHMS["all_reduce"]]
    assert {one.name for one in suite.contenders} == {f"all_reduce={name}" for name in names}
    for one in suite.contenders:
        assert one.command[one.command.index("--algorithms") + 1] == one.name.removeprefix("all_reduce=")
        sizes = parse_sizes(one.command[one.command.index("--sizes") + 1])
        case = f"all_reduce.{one.name.removeprefix('all_reduce=')}.fp32"
        printed = " ".join(f"{case}.{size}_seconds {size}e-9" for size in sizes)
        program = CommandProgram(one, tmp_path, None)
        _, figures = program.read([(0.0, f"wanma figure {printed}")])
        for metric, size in zip(suite.file.metrics, sizes, strict=True):
            assert figures[metric] == size * 1e-9


@pytest.mark.full
def test_links_of_real_ranks_are_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("machine", "--ranks", "3", "--parts", "links", *QUICK, *CPU) == 0
    shown = capsys.readouterr().out
    assert "Link bandwidth" in shown
    assert "Bisection" in shown
    assert "GB/s from each rank (row) to each other" in shown
    assert "Slower than the others of their kind" in shown
    directory = newest()
    figures = directory.read().measurements[0].figures
    for first in range(3):
        for second in range(3):
            assert (f"pair.{first}-{second}_bytes_per_second" in figures) == (first != second)
    assert figures["bisection_bytes_per_second"] > 0
    assert not any(name.startswith(("product", "storage", "all_reduce")) for name in figures)
    assert "GB/s from each rank (row) to each other" in directory.page.read_text()
    assert bench("list") == 0
    assert "Limits of the machine" in capsys.readouterr().out
    assert bench("show", directory.id) == 0
    assert "Link latency" in capsys.readouterr().out
    assert bench("export", directory.id, "--format", "markdown", "--out", "exported") == 0
    assert "Link bandwidth (95 %)" in Path("exported/result.md").read_text()
    assert "pair" not in Path("exported/result.md").read_text()
    assert bench("compare", directory.id, directory.id) == 0
    assert "Link bandwidth" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="measures the processor, which a GPU hides")
def test_the_whole_machine_is_measured_calibrated_and_compared_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share_compiled(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    assert main(["train", "job.toml", "--run-dir", "run", "observe.console=quiet"]) == 0
    capsys.readouterr()
    assert bench("machine", "--ranks", "2", *QUICK, "--save") == 0
    shown = capsys.readouterr().out
    for title in ("Matrix products, fp32", "Memory copy", "All-reduce bus bandwidth", "Storage write"):
        assert title in shown
    (measured,) = load_calibration().devices
    assert (measured.device, measured.ranks) == (cpu_model(), 2)
    operators = {point.operator for point in measured.points}
    assert operators >= {"product", "attention", "all_reduce", "tensor_gather", "send", "disk", "blocks"}
    assert operators >= {"blocks_tensor", "blocks_gradients", "blocks_parameters"}
    # A small model takes longer than its kernels do one by one, and FSDP2 more than that.
    assert 1e-6 < measured.machine.program.kernel_seconds < 1e-3
    assert 1e-4 < measured.machine.program.parameters_seconds < 1.0
    assert not measured.machine.host.doubt
    machine = build_hardware_model(discover_node(), calibration=load_calibration(), ranks=2)
    assert not machine.unknown
    large = matmul_seconds(machine.chip, 1024, 1024, 1024, "fp32")
    assert 1e9 < 2 * 1024**3 / large < 1e13
    assert main(["train", "job.toml", "--run-dir", "learned", "observe.console=quiet"]) == 0
    learned = correct_calibration(RunDirectory(Path("learned")))
    missed = [
        abs(one / learned.measured_seconds - 1) for one in (learned.before_seconds, learned.after_seconds)
    ]
    assert missed[1] <= missed[0]
    assert load_calibration().corrections_for(cpu_model()).runs == 1
    capsys.readouterr()
    directory = newest()
    assert 'aria-label="Roofline"' in directory.page.read_text()
    # A training whose steps drift has no step time: on a machine with other load that is no fault.
    monkeypatch.setattr(precision, "find_warm_up", partial(find_warm_up, max_drift=math.inf))
    options = ["--rounds", "1", "--steps", "30", "--foreign-limit", "1000"]
    assert bench("train", "job.toml", *options) == 0
    measured = capsys.readouterr()
    assert "step_seconds" in newest().read().summaries.get("job", {}), f"no step time:\n{measured}"
    assert bench("show", directory.id) == 0
    shown = capsys.readouterr().out
    assert "of the roof; of products" in shown
    assert "job of 2" in shown, f"the training that was measured since:\n{measured}"
    assert "job of 2" in directory.page.read_text()


@pytest.mark.full
def test_the_machine_in_small_is_part_of_the_smoke_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("smoke", "--list") == 0
    assert "machine" in capsys.readouterr().out
    assert bench("smoke", "machine") == 0
    assert "works" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("launcher", [pytest.param("options", marks=pytest.mark.exhaustive), "srun"])
def test_two_nodes_measure_together_and_the_first_one_keeps_the_result(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{sock.getsockname()[1]}"
    command = [sys.executable, "-m", "wanma", "bench", "machine", "--ranks", "2", "--parts", "links"]
    command += ["--rounds", "2", "--seconds", "0.5", "--rendezvous", place, *CPU]
    processes = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        options, environment = ["--nodes", "2", "--node-rank", str(number)], dict(os.environ)
        if launcher == "srun":
            options, environment = [], environment | srun(number, size=2, tasks="1(x2)")
        processes.append(
            subprocess.Popen(
                [*command, *options],
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path / str(number),
                env=environment,
            )
        )
    (first, _), (second, _) = (one.communicate(timeout=280) for one in processes)
    assert [one.returncode for one in processes] == [0, 0]
    assert "Limits of 2 nodes" in first
    assert second == "measurement complete; the result is on the node of rank 0\n"
    assert not (tmp_path / "1" / "bench-results").exists()
    directory = newest(tmp_path / "0" / "bench-results")
    result = directory.read()
    assert result.contender_names == ("nodes=2 ranks=4",)
    assert len(result.measurements) == 2
    assert "pair.1-2_bytes_per_second" in result.measurements[0].figures, "between the nodes"
    monkeypatch.chdir(tmp_path / "0")
    assert bench("reproduce", directory.id) == 2
    assert "is of several nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "link"], "'link'. Did you mean 'links'?"),
        (["--ranks", "0"], "at least one rank"),
        (["--ranks", "two"], "'two' is not a list of numbers"),
        (["--ranks", "1", "--parts", "links"], "one rank has no links"),
        (["--ranks", "4096"], "and this node has"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--rounds", "0"], "--rounds: '0' is not a number"),
        (["--folder", "no-such-folder"], "--folder no-such-folder is no folder"),
        (["--set", "train.steps=3"], "train.steps is not a key of [cluster]"),
        (["--nodes", "2"], "--nodes 2 without --node-rank"),
        (
            ["--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--ranks", "1,2"],
            "several nodes measure one number",
        ),
        (
            ["--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--save"],
            "--save with --nodes 2",
        ),
        (["--save", "--parts", "compute"], "--save without memory"),
        (["--sizes", "1Q"], "'1Q' is not a size"),
        (["--ranks", "1", "--sizes", "4K"], "one rank has no links"),
        (["--algorithms", "butterfly"], "unknown name 'butterfly'"),
        (["--ranks", "64", "--sizes", "16G"], "and this node has"),
        (["--nodes", "2..3"], "cluster.nodes = '2..3'"),
    ],
)
def test_what_cannot_be_measured_is_one_message_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("machine", *CPU, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not Path("bench-results").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert bench("machine", "--folder", str(tmp_path)) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_launcher_says_which_node_this_is() -> None:
    placement = read_placement(srun(3, size=4, nodes=2, tasks="2(x2)"))
    assert placement is not None
    overrides = launched_overrides(["cluster.device=cpu", "cluster.rendezvous=a:1"], placement)
    assert overrides[2:] == ["cluster.nodes=2", "cluster.rendezvous=a:1", "cluster.node_rank=1"]
    assert node_role(overrides) == "follower"
    assert node_role(overrides[:2]) == "single"
    with pytest.raises(JobError, match=r"cluster\.nodes = 3"):
        launched_overrides(["cluster.nodes=3"], placement)
    with pytest.raises(JobError, match=r"cluster\.budget"):
        parse_benchmark_cluster(["cluster.budget.hours=2"])


def test_one_rank_and_all_of_the_node_are_the_default() -> None:
    suite, rule = machine_suite(overrides=["cluster.device=cpu"], seconds=5, rounds=3)
    (node,) = discover_node().nodes
    assert [contender.name for contender in suite.contenders] == [
        f"ranks={count}" for count in sorted({1, node.cores})
    ]
    assert (rule.rounds, rule.min_rounds) == (3, 3)
    assert suite.contenders[0].command[-2:] == ("--set", "cluster.device=cpu")


def test_another_folder_or_duration_is_another_suite() -> None:
    plain, longer, links = (
        machine_suite(overrides=["cluster.device=cpu"], **options)[0].digest
        for options in ({}, {"seconds": 5.0}, {"parts": ["links"]})
    )
    assert len({plain, longer, links}) == 3
