"""`wanma plan --learn`: a run corrects the forecasts that come after it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from wanma.api.calibration.corrections import correct_calibration, corrections_table
from wanma.cli.main import main
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.planner.hardware_model.calibration import (
    Calibration,
    CorrectionFactors,
    DeviceCalibration,
    load_calibration,
    save_calibration,
)
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    HardwareModel,
    LinkLevel,
    MatmulCurve,
)

JOB = """\
[model]
family = "decoder"
layers = 4
hidden = 256
heads = 4
feed_forward = 704
vocabulary = 1024

[data]
text = ["stdlib"]
sequence_length = 128

[train]
steps = 10
global_batch = 8

[parallel]
dp_replicate = 2

[cluster]
device = "cpu"
"""

CPU = "a made-up CPU"
GIB = 1 << 30
CLUSTER = Cluster((NodeGroup("here", 2, 16 * GIB, (), cpu=Device("cpu", CPU, 16 * GIB, {"fp32": 200e9})),))
CHIP = DeviceModel(
    CPU,
    {"fp32": 100e9},
    20e9,
    1,
    {"fp32": MatmulCurve(0.9, 0.0)},
    AttentionCurve(1.0, 0.0, 1.0),
    {"fp32": AttentionCurve(0.4, 100.0, 0.9)},
    bandwidth_share=1.0,
    launch_seconds=4e-6,
    tiles=((16, 16, 1.0),),
)
MACHINE = HardwareModel(CHIP, (LinkLevel(2, 2e-4, 2e9),), dispatch_seconds=0.0, start_seconds=0.0)


def make_run(path: Path, *, steps: int = 10, seconds: float = 0.5, memory: int = 700 << 20) -> RunDirectory:
    """A run of two replicas, most of whose step is forward and backward."""
    run = RunDirectory(path)
    run.create()
    run.job.write_text(JOB)
    plan = Plan(dp_replicate=2, micro_batch=4)
    write_json(run.plan, {"plan": plan.to_json(), "forecast": None, "cluster": CLUSTER.to_json()})
    phases = {"forward_backward": 0.9 * seconds, "communication": 0.06 * seconds, "optimizer": 0.04 * seconds}
    lines = [
        {"step": step, "step_seconds": seconds, "phases": phases, "memory_bytes": memory, "time": float(step)}
        for step in range(1, steps + 1)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A calibration of the made-up CPU."""
    return save_calibration(
        Calibration((DeviceCalibration(CPU, 2, 1, MACHINE),)), tmp_path / "calibration.json"
    )


def test_after_a_run_the_same_run_is_forecast_as_it_was(tmp_path: Path, kept: Path) -> None:
    found = correct_calibration(make_run(tmp_path / "run"), kept)
    assert found.measured_seconds == 0.5
    assert abs(found.before_seconds / 0.5 - 1) > 0.2, "the made-up rates are off"
    assert found.after_seconds == pytest.approx(0.5, rel=0.02)
    again = correct_calibration(make_run(tmp_path / "again"), kept)
    assert again.before_seconds == pytest.approx(found.after_seconds), "it is kept for the next forecast"
    assert again.corrections.runs == 2


def test_corrections_are_kept_beside_what_was_measured(tmp_path: Path, kept: Path) -> None:
    found = correct_calibration(make_run(tmp_path / "run"), kept)
    stored = load_calibration(kept)
    assert stored.corrections_for(CPU) == found.corrections
    assert stored.corrections[CPU] != CorrectionFactors()
    assert stored.devices == (DeviceCalibration(CPU, 2, 1, MACHINE),), "rates stay as they were measured"


def test_what_changed_is_told(tmp_path: Path, kept: Path) -> None:
    stream = io.StringIO()
    Console(file=stream, width=110).print(
        corrections_table(correct_calibration(make_run(tmp_path / "run"), kept))
    )
    text = stream.getvalue()
    assert "compute" in text
    assert "0.45 s" in text, "measured forward and backward"
    assert "Step time: measured 0.50 s, forecast" in text


def test_a_run_of_few_steps_teaches_nothing(tmp_path: Path, kept: Path) -> None:
    with pytest.raises(WanmaError, match="has 4 steps, too few for a correction"):
        correct_calibration(make_run(tmp_path / "run", steps=4), kept)
    assert load_calibration(kept).corrections == {}


def test_a_run_without_its_machines_is_refused(tmp_path: Path, kept: Path) -> None:
    run = make_run(tmp_path / "run")
    write_json(run.plan, {"plan": Plan(dp_replicate=2, micro_batch=4).to_json()})
    with pytest.raises(WanmaError, match="does not contain the plan and cluster"):
        correct_calibration(run, kept)


def test_a_machine_of_unknown_rates_is_to_be_measured_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    told = json.loads(run.plan.read_text())
    told["cluster"]["nodes"][0]["cpu"]["peak_flops_per_second"] = {}
    write_json(run.plan, told)
    with pytest.raises(WanmaError) as refused:
        correct_calibration(run, tmp_path / "none.json")
    assert "wanma bench machine --save" in str(refused.value)


def test_the_command_takes_a_run_and_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_calibration(Calibration((DeviceCalibration(CPU, 2, 1, MACHINE),)))
    run = make_run(tmp_path / "run")
    assert main(["plan", "--learn", str(run.path)]) == 0
    assert "beside its forecast" in capsys.readouterr().out
    assert load_calibration().corrections_for(CPU).runs == 1
    assert main(["plan", "job.toml", "--learn", str(run.path)]) == 2
    assert main(["plan", "--learn", str(tmp_path / "nowhere")]) == 2
    assert main(["plan"]) == 2
    said = capsys.readouterr().err
    assert "--learn takes a run, not a job" in said
    assert "there is no run in" in said
    assert "JOB is missing" in said
