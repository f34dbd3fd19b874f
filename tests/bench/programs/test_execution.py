"""Executions of commands and of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from support.no_meter import NoMeter
from support.waiting import wait_until
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.programs.contender import Contender, Fault, Patterns
from wanma.bench.programs.execution import execute
from wanma.bench.programs.target import parse_target
from wanma.bench.programs.watched_program import ExecutionRule
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import usable_cores


def run(
    contender: Contender, folder: Path, *, steps: int | None = None, target: str = "", seconds: float = 60.0
) -> Measurement:
    (measurement,) = execute(
        [(contender, folder)],
        0,
        ExecutionRule(steps, parse_target(target) if target else None, seconds),
        make_meter=NoMeter,
        find_disturbances=lambda _: (),
    )
    assert Measurement.from_json(measurement.to_json()) == measurement or any(
        step.seconds != step.seconds for step in measurement.steps
    )
    return measurement


def script(text: str, **values: object) -> Contender:
    return Contender("script", "command", command=(sys.executable, "-u", "-c", text), **values)  # type: ignore[arg-type]


TRAINING = """
import time
print("warming up")
for step in range(1, 6):
    time.sleep(0.02)
    print(f"iter {step}: loss {5 - step:.2f}, 1,024 samples")
print("final accuracy 0.93")
"""
SLEEP_AND_SPIN = """
import time
time.sleep(2)
for step in range(10):
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    print("wanma step loss 1")
"""
PATTERNS = Patterns(
    loss=r"loss ([-0-9.]+)", samples=r"([0-9,]+) samples", figures={"accuracy": "final accuracy ([0-9.]+)"}
)


def test_a_command_is_read_by_patterns(tmp_path: Path) -> None:
    measurement = run(script(TRAINING, patterns=PATTERNS), tmp_path)
    assert [step.loss for step in measurement.steps] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert {step.samples for step in measurement.steps} == {1024.0}
    assert measurement.steps[-1].time - measurement.started >= 5 * 0.02
    assert measurement.steps[2].seconds == measurement.steps[2].time - measurement.steps[1].time
    assert measurement.figures == {"accuracy": 0.93}
    assert measurement.startup_seconds is not None
    assert measurement.startup_seconds >= 0.02
    assert measurement.counts
    assert "warming up" in (tmp_path / "output.log").read_text()


def test_a_line_of_python_does_without_patterns(tmp_path: Path) -> None:
    words = '"loss", 2.0 - i, "samples", 8, "seconds", 0.5, "phases.data", 0.1'
    text = f'for i in range(3): print("wanma step", {words})\n'
    measurement = run(script(text + 'print("wanma figure", "auc", 0.75)'), tmp_path)
    assert [(step.loss, step.samples, step.seconds) for step in measurement.steps] == [
        (2.0, 8.0, 0.5), (1.0, 8.0, 0.5), (0.0, 8.0, 0.5),
    ]  # fmt: skip
    assert measurement.figures == {"auc": 0.75}
    assert [step.phases for step in measurement.steps] == [{"data": 0.1}] * 3


def test_the_measurement_ends_with_its_target(tmp_path: Path) -> None:
    endless = TRAINING.replace("range(1, 6)", "range(1, 10**6)")
    measurement = run(script(endless, patterns=PATTERNS), tmp_path, target="loss<=-20")
    assert measurement.counts, measurement.error
    assert measurement.figures["samples_to_target"] == 25 * 1024
    assert measurement.figures["time_to_target_seconds"] >= 25 * 0.02


def test_a_program_that_ends_before_its_target_is_an_error(tmp_path: Path) -> None:
    measurement = run(script(TRAINING, patterns=PATTERNS), tmp_path, target="loss<=-20")
    assert measurement.error.startswith("ended before loss<=-20 was reached")
    assert not measurement.counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print('the cause'); raise SystemExit(3)", "ended with exit code 3\n    the cause"),
        ("import time; print('slow'); time.sleep(60)", "took longer than allowed\n    slow"),
    ],
)
def test_a_failure_has_the_end_of_the_output(tmp_path: Path, text: str, expected: str) -> None:
    measurement = run(script(text), tmp_path, seconds=1.5)
    assert measurement.error == expected
    assert not measurement.counts


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    measurement = run(Contender("none", "command", command=("no-such-program",)), tmp_path)
    assert measurement.error == "no-such-program cannot be started: No such file or directory"


def test_a_process_that_is_left_is_killed_and_named(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('wanma figure', 'child', child.pid)"
    )
    measurement = run(script(text), tmp_path)
    assert measurement.error.startswith("left processes behind: ")
    number = int(measurement.figures["child"])
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("pattern", "message"), [("loss (", "the pattern of loss is wrong"), ("loss", "has no group")]
)
def test_a_wrong_pattern_is_refused(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(WanmaError, match=message):
        CommandProgram(script("", patterns=Patterns(loss=pattern)), tmp_path, None)


JOB = """
[model]
preset = "gpt-1m"

[data]
text = ["{text}"]
sequence_length = 32
validation_fraction = 0.1

[train]
steps = 30
global_batch = 4
learning_rate = 3e-3

[checkpoint]
every_steps = 4

[observe]
console = "plain"
"""


@pytest.fixture
def job(tmp_path: Path) -> Contender:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(text=Path(__file__)))
    return Contender("small", "job", job=str(path), settings={"parallel.dp_replicate": "2"})


def test_a_job_is_read_from_its_run_directory(job: Contender, tmp_path: Path) -> None:
    measurement = run(job, tmp_path, steps=6)
    assert measurement.counts, measurement.error
    assert [step.step for step in measurement.steps] == [1, 2, 3, 4, 5, 6]
    assert {step.samples for step in measurement.steps} == {4.0}
    assert {round(step.targets or 0) for step in measurement.steps} == {4 * 32}
    assert {"forward_backward", "host", "compute", "exposed.data"} <= measurement.steps[-1].phases.keys()
    assert measurement.figures["checkpoint_stall_seconds"] > 0
    assert 0 < measurement.figures["goodput"] <= 1
    assert measurement.startup_seconds is not None
    assert 0 < measurement.startup_seconds < measurement.seconds


def test_the_utilization_is_of_the_steps_and_not_of_the_start(tmp_path: Path) -> None:
    (measurement,) = execute(
        [(script(SLEEP_AND_SPIN), tmp_path)],
        0,
        ExecutionRule(timeout_seconds=60.0),
        make_meter=partial(MachineMeter, interval_seconds=0.1),
        find_disturbances=lambda _: (),
    )
    assert measurement.counts, measurement.error
    steps = measurement.steps[-1].time - measurement.steps[0].time
    own = measurement.utilization.cpu_utilization
    assert own is not None
    # Nine of the ten spins of 0.1 s are between two steps, however slow the machine is. A mean from the start
    # on would give 0.4 at most; a late reading may count what Python's own start has used.
    assert 0.65 < own * steps * usable_cores() < 1.5


def test_a_job_ends_in_order_at_its_target(job: Contender, tmp_path: Path) -> None:
    measurement = run(job, tmp_path, steps=10_000, target="loss<=5.4")
    assert measurement.counts, measurement.error
    assert measurement.steps[-1].step < 10_000
    assert measurement.figures["time_to_target_seconds"] < measurement.seconds


@pytest.mark.full
def test_a_fault_that_never_happened_is_an_error(job: Contender, tmp_path: Path) -> None:
    faulty = Contender("faulty", "job", job.job, job.settings, fault=Fault(after_step=50, rank=1))
    measurement = run(faulty, tmp_path, steps=4)
    assert measurement.error.startswith("ended before rank 1 was killed after step 50")


def test_a_shell_around_the_training_ends_at_its_target(tmp_path: Path) -> None:
    endless = TRAINING.replace("range(1, 6)", "range(1, 10**6)")
    (tmp_path / "train.py").write_text(endless)
    command = ("sh", "-c", f"{sys.executable} -u {tmp_path}/train.py; echo the end")
    contender = Contender("shell", "command", command=command, patterns=PATTERNS)
    assert run(contender, tmp_path, target="loss<=-20").counts


def test_the_program_ends_with_a_benchmark_that_is_terminated(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path\n"
        "from support.no_meter import NoMeter\n"
        "from wanma.bench.programs.contender import Contender\n"
        "from wanma.bench.programs.execution import execute\n"
        "from wanma.bench.programs.watched_program import ExecutionRule\n"
        "endless = Contender('x', 'command', command=(sys.executable, '-S', '-c', "
        '\'import os, time; open("pid", "w").write(str(os.getpid())); time.sleep(600)\'))\n'
        "execute([(endless, Path('.'))], 0, ExecutionRule(timeout_seconds=600), make_meter=NoMeter,"
        " find_disturbances=lambda _: ())\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=source_environment())
    pid = tmp_path / "pid"
    wait_until(pid.read_text, "the contender", 60)
    bench.terminate()
    assert bench.wait(60) == 128 + signal.SIGTERM
    number = int(pid.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def source_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_fault_is_recovered_from_and_timed(job: Contender, tmp_path: Path) -> None:
    faulty = Contender(
        "faulty", "job", job.job, {**job.settings, "train.steps": "120"}, fault=Fault(after_step=6, rank=1)
    )
    measurement = run(faulty, tmp_path, seconds=240)
    assert measurement.counts, measurement.error
    assert measurement.figures["recovery_seconds"] > 0
