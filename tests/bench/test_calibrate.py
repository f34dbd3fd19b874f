"""`wanma cluster --calibrate`: this machine really measured, and what it refuses."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from support.command import share_compiled
from wanma.api.calibration.corrections import correct_calibration
from wanma.bench.calibration.node_calibration import (
    CalibrationPass,
    calibrate,
    calibration_table,
    minimum_times,
)
from wanma.cli.main import main
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import cpu_model
from wanma.job.run.run_directory import RunDirectory
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import BenchmarkPoint, DeviceCalibration, load_calibration
from wanma.planner.hardware_model.operator_time import matmul_seconds

ON_CPU = not discover_node().nodes[0].devices


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="measures the processor, which a GPU hides")
def test_this_machine_is_measured_and_a_run_on_it_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share_compiled(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told: list[str] = []
    measured, path = calibrate(ranks=[2], seconds=3.0, progress=told.append)
    (found,) = measured
    assert told == ["measuring 2 ranks of " + f"{found.threads} threads"]
    assert path == tmp_path / "cache" / "wanma" / "calibration.json"
    assert load_calibration().devices == (found,)
    assert (found.device, found.ranks) == (cpu_model(), 2)
    assert {point.operator for point in found.points} >= {
        "product",
        "attention",
        "all_reduce",
        "send",
        "disk",
        "blocks",
        "blocks_tensor",
        "blocks_gradients",
        "blocks_parameters",
    }
    # A small model takes longer than its kernels do one by one, and FSDP2 more than that.
    assert 1e-6 < found.machine.program.kernel_seconds < 1e-3
    assert 1e-4 < found.machine.program.parameters_seconds < 1.0
    assert not found.machine.host.doubt
    assert "torch" in found.host

    machine = build_hardware_model(discover_node(), calibration=load_calibration(), ranks=2)
    assert not machine.unknown
    large = matmul_seconds(machine.chip, 1024, 1024, 1024, "fp32")
    assert 1e9 < 2 * 1024**3 / large < 1e13
    shown = io.StringIO()
    Console(file=shown, width=140).print(calibration_table(measured))
    assert cpu_model()[:10] in shown.getvalue()

    job, corpus = tmp_path / "job.toml", tmp_path / "corpus.txt"
    corpus.write_text("".join(f"The square of {number} is {number**2}.\n" for number in range(2000)))
    job.write_text(
        f'[model]\npreset = "gpt-1m"\n\n[data]\ntext = ["{corpus}"]\nsequence_length = 64\n\n'
        "[train]\nsteps = 8\nglobal_batch = 4\n\n[parallel]\ndp_replicate = 2\n\n"
        '[cluster]\ndevice = "cpu"\n'
    )
    assert main(["train", str(job), "--run-dir", str(tmp_path / "run"), "observe.console=quiet"]) == 0
    learned = correct_calibration(RunDirectory(tmp_path / "run"))
    missed = [
        abs(one / learned.measured_seconds - 1) for one in (learned.before_seconds, learned.after_seconds)
    ]
    assert missed[1] <= missed[0]
    assert load_calibration().corrections_for(cpu_model()).runs == 1


def test_of_what_was_measured_several_times_the_least_counts() -> None:
    def found(*seconds: float, disturbed: int) -> CalibrationPass:
        points = tuple(
            BenchmarkPoint("product", (64, 64, number), one, "fp32") for number, one in enumerate(seconds)
        )
        return CalibrationPass(points, disturbed, None)

    best = minimum_times([found(1.0, 5.0, disturbed=2), found(3.0, 4.0, disturbed=1)])
    assert [point.seconds for point in best.points] == [1.0, 4.0]
    assert [point.shape[-1] for point in best.points] == [0, 1]
    assert best.contended_measurements == 1


def test_numbers_of_ranks_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def measured(_node: NodeGroup, _plan: Plan, seconds: float) -> CalibrationPass:
        told[-1] += f" for {seconds:g} s"
        return CalibrationPass((), 0, None)

    def fitted(_node: NodeGroup, plan: Plan, _found: CalibrationPass) -> DeviceCalibration:
        return DeviceCalibration("a processor", plan.world_size, 1, build_hardware_model(discover_node()))

    monkeypatch.setattr("wanma.bench.calibration.node_calibration._run_pass", measured)
    monkeypatch.setattr("wanma.bench.calibration.node_calibration.fit_calibration", fitted)
    calibrate(ranks=[1, 2], seconds=24.0, output=tmp_path / "kept.json", progress=told.append)
    threads = max(discover_node().nodes[0].cores // 2, 1)
    one, two = f"1 rank of {max(discover_node().nodes[0].cores, 1)} threads", f"2 ranks of {threads} threads"
    assert told == [f"measuring {ranks}, pass {turn} of 2 for 6 s" for turn in (1, 2) for ranks in (one, two)]


def test_too_little_time_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--seconds 3 leaves 1.5 s for each of 2") as refused:
        calibrate(ranks=[1, 2], seconds=3.0, output=tmp_path / "kept.json")
    assert "give at least 4" in refused.value.hint
    assert not (tmp_path / "kept.json").exists()


def test_a_damaged_file_is_told_of_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"version": 99}))
    with pytest.raises(WanmaError, match="version 99"):
        calibrate(ranks=[1], seconds=5.0, output=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8x8 H100 SXM", "--calibrate"], "--calibrate measures this node only"),
        (["--seconds", "5"], "--seconds has no effect"),
        (["--calibrate", "--ranks", "0"], "at least one rank"),
        (["--calibrate", "--ranks", "two"], "'two' is not a list of numbers"),
    ],
)
def test_wrong_arguments_are_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from wanma.hardware.catalogue.lookup import require_device_kind
    from wanma.job.cluster import Cluster

    (node,) = discover_node().nodes
    with_gpus = Cluster((replace(node, devices=(require_device_kind("H100 SXM").to_device(),) * 2),))
    monkeypatch.setattr("wanma.bench.calibration.node_calibration.discover_node", lambda: with_gpus)
    with pytest.raises(JobError, match="--ranks 4: this node has 2 GPUs"):
        calibrate(ranks=[4], output=tmp_path / "kept.json")
