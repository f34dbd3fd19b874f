"""Contenders that live at once: real processes, of which all but one are stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from support.no_meter import NoMeter
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.meter.process_tree import descendants
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.execution import MAX_STOP_SECONDS, execute
from wanma.bench.programs.watched_program import ExecutionRule
from wanma.bench.results.directory import list_result_directories
from wanma.bench.statistics.verdicts import Outcome
from wanma.bench.turns import program_processes
from wanma.cli.main import main
from wanma.job.errors import WanmaError

STAMPS = """
import sys, time
name, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with open(name, "a") as file:
    for step in range(count):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        print(time.time(), file=file, flush=True)
        print("wanma step", "loss", 1.0, "samples", 4, "phases.work", seconds, flush=True)
"""
CHILD = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', *sys.argv[1:]]))"
"""Program that runs another, as a launcher runs ranks."""


def contender(folder: Path, name: str, count: int = 60, seconds: float = 0.01) -> Contender:
    command = (sys.executable, "-S", "-c", CHILD, STAMPS, str(folder / name), str(count), str(seconds))
    return Contender(name, "command", command=command)


def run(contenders: list[Contender], folder: Path, turn_seconds: float = 0.1) -> list[Measurement]:
    folders = [folder / f"run of {one.name}" for one in contenders]
    for one in folders:
        one.mkdir()
    bystanders = {process.pid for process in descendants()}
    try:
        return execute(
            list(zip(contenders, folders, strict=True)),
            0,
            ExecutionRule(timeout_seconds=120.0, turn_seconds=turn_seconds),
            make_meter=NoMeter,
            find_disturbances=lambda _: (),
        )
    finally:
        assert not descendants(bystanders), "nothing is left"


def stamps(folder: Path, name: str) -> list[float]:
    return [float(line) for line in (folder / name).read_text().split()]


def test_one_contender_runs_while_the_other_is_stopped(tmp_path: Path) -> None:
    both = run([contender(tmp_path, "a"), contender(tmp_path, "b")], tmp_path)
    assert all(one.counts for one in both), [one.error for one in both]
    merged = sorted((at, name) for name in ("a", "b") for at in stamps(tmp_path, name))
    switches = sum(before[1] != after[1] for before, after in pairwise(merged))
    turns = [one.turns for one in both if one.turns is not None]
    assert len(turns) == 2
    assert 4 <= switches <= sum(len(one.stops) for one in turns) + 1, "120 stamps in few turns"
    for one, own in zip(both, turns, strict=True):
        assert len(one.steps) == 60
        assert len(own.stops) >= 2
        assert all(ended > began for began, ended in own.stops)
        assert 0 < own.stopped_steps <= len(own.stops)
        assert sum(not step.phases for step in one.steps) == own.stopped_steps
        assert one.seconds >= 60 * 0.01
        assert 0 < one.steps[-1].time - one.started <= one.seconds + 0.05
        assert Measurement.from_json(one.to_json()).turns == own
    assert max(len(one.compared_steps) for one in both) == 60, "all of the first that ended"


SPAWNS = """
import os, sys
fifo = sys.argv[1]
os.mkfifo(fifo)
os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; : > {fifo}"], os.environ)
# The child opens the pipe before its program: until somebody writes, this process cannot be stopped.
actions = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=actions)
os.wait(), os.wait()
"""


def test_a_contender_is_stopped_while_it_starts_another_program(tmp_path: Path) -> None:
    command = (sys.executable, "-S", "-c", SPAWNS, str(tmp_path / "fifo"))
    spawns, other = run(
        [Contender("spawns", "command", command=command), contender(tmp_path, "other")], tmp_path, 0.3
    )
    assert spawns.counts, spawns.error
    assert other.counts, other.error
    assert spawns.turns is not None
    assert spawns.turns.stops


def test_a_contender_that_crashes_leaves_the_other_its_turns(tmp_path: Path) -> None:
    bad = Contender("bad", "command", command=(sys.executable, "-S", "-c", "raise SystemExit('no more hay')"))
    failed, good = run([bad, contender(tmp_path, "good")], tmp_path)
    assert failed.error.startswith("ended with exit code 1\n    no more hay")
    assert good.counts
    missing, good = run(
        [Contender("none", "command", command=("no-such-program",)), contender(tmp_path, "well")], tmp_path
    )
    assert missing.error == "no-such-program cannot be started: No such file or directory"
    assert good.counts
    assert len(good.steps) == 60


def test_a_process_that_is_left_is_killed_and_its_contender_named(tmp_path: Path) -> None:
    text = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    leaves = Contender("leaves", "command", command=(sys.executable, "-S", "-c", text))
    good, bad = run([contender(tmp_path, "good"), leaves], tmp_path)
    assert bad.error.startswith("left processes behind: ")
    assert good.counts, good.error


def test_a_contender_that_uses_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_processes, "GPU_FILES", (str(tmp_path / "a"),))  # which `a` has open
    with pytest.raises(WanmaError, match=r"a cannot .* uses a GPU") as found:
        run([contender(tmp_path, "a", 1000), contender(tmp_path, "b", 1000)], tmp_path)
    assert "leave out --turns" in str(found.value.hint)


def test_a_process_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "suspend", refuse)
    with pytest.raises(WanmaError, match="belongs to another user"):
        run([contender(tmp_path, "a", 1000), contender(tmp_path, "b", 1000)], tmp_path)


def bench(*words: str, rounds: int = 1) -> list[str]:
    options = ["--rounds", str(rounds), "--precision", "1e-9", "--foreign-limit", "1000", "--fresh"]
    return ["bench", "run", *options, *words]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT]
)
def test_nothing_is_left_of_contenders_whose_benchmark_is_ended(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(CHILD)
    (tmp_path / "stamps.py").write_text(STAMPS)
    program = "import runpy; runpy.run_path('stamps.py', run_name='__main__')"
    commands = [f'{sys.executable} -S launcher.py "{program}" {name} 100000 0.01' for name in ("a", "b")]
    words = [word for text in commands for word in ("--command", text)]
    output = tmp_path / "output.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "wanma", *bench("--turns", "0.2s", *words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdout=file,
            stderr=file,
            # A shell lets its background commands, such as this test run, ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    request.addfinalizer(process.kill)  # its guard then ends the contenders
    root = psutil.Process(process.pid)

    def contenders() -> list[psutil.Process]:
        return [one for one in root.children(recursive=True) if "launcher.py" in " ".join(one.cmdline())
                or "runpy" in " ".join(one.cmdline())]  # fmt: skip

    deadline = time.monotonic() + 240
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, [one.cmdline() for one in contenders()]
        time.sleep(0.05)
    everything = root.children(recursive=True)
    assert len(contenders()) == 4
    process.send_signal(number)
    assert process.wait(60) != 0
    _, alive = psutil.wait_procs(everything, timeout=60)
    left = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not left, [one.cmdline() for one in left]


PACED = """
import sys, time
before = time.process_time()
for step in range(int(sys.argv[2])):
    end = before + float(sys.argv[1])
    while time.process_time() < end:
        pass
    now = time.process_time()
    print("wanma step", "seconds", now - before, flush=True)  # of the processor: others change it little
    before = now
"""


@pytest.mark.full
def test_a_planted_difference_is_found_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paced.py").write_text(PACED)
    (tmp_path / "python").symlink_to(sys.executable)  # names are the first 60 characters
    commands = [f"./python -S paced.py {seconds} 150" for seconds in ("0.005", "0.0055", "0.0050")]
    words = [word for text in commands for word in ("--command", text)]
    assert main(bench("--turns", "0.1s", *words, rounds=3)) == 0
    (directory,) = list_result_directories(tmp_path / "bench-results")
    result = directory.read()
    slower, equal = (result.verdicts[text]["step_seconds"] for text in commands[1:])
    assert slower.outcome is Outcome.SLOWER
    assert abs(equal.ratio.median - 1) < 0.04, "one interval in twenty lacks the truth"
    assert slower.is_paired
    assert result.rule["turn_seconds"] == 0.1
    assert [one.round for one in result.measurements] == [0] * 3 + [1] * 3 + [2] * 3
    for number in range(3):
        meters = {one.machine for one in result.measurements if one.round == number}
        assert len(meters) == 1, "one meter a round"
    output = " ".join(capsys.readouterr().out.split())
    assert "in turns of 0.10 s." in output
    assert "had a stop inside" in output
    assert main(["bench", "reproduce", str(directory.path)]) in (0, 1)
    again = list(list_result_directories(tmp_path / "bench-results"))[-1].read()
    assert again.id != directory.id
    assert all(one.turns is not None for one in again.measurements)


def test_turns_as_long_as_the_programs_are_refused_with_those_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paced.py").write_text(PACED)
    commands = [f"{sys.executable} -S paced.py {seconds} 150" for seconds in ("0.005", "0.0055")]
    words = [word for text in commands for word in ("--command", text)]
    assert main(bench("--turns", "10s", *words, rounds=3)) == 1
    printed = capsys.readouterr()
    assert "Step time" not in printed.out, "no medians"
    found = re.search(r"turns of 10 s are too long: .* give --turns ([0-9.]+)s", printed.err)
    assert found is not None, printed.err
    assert main(bench("--turns", f"{found[1]}s", *words, rounds=1)) == 0
    result = list(list_result_directories(tmp_path / "bench-results"))[-1].read()
    assert [(one.round, one.turns is not None) for one in result.measurements] == [(0, True)] * 2
    assert len({one.machine for one in result.measurements}) == 1, "one meter a round"
    assert "Contenders lived at once, in turns of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "1s", "--", "true"], "turns are of two contenders or more"),
        (
            ["--turns", "11s", "--command", "true", "--command", "false"],
            "watchdogs of programs",
        ),
        (["--turns", "soon", "--command", "true", "--command", "false"], "'soon' is not a duration"),
    ],
)
def test_turns_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(bench(*words)) == 2
    assert message in capsys.readouterr().err


JOB = """
[model]
preset = "gpt-1m"

[data]
text = ["{text}"]
sequence_length = 32
validation_fraction = 0.0

[train]
steps = 40
global_batch = 4
learning_rate = 3e-3

[parallel]
dp_replicate = 2

[observe]
console = "plain"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(text=Path(__file__)))
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.engine=slurm"], "cluster.engine is 'slurm'"),
        (["cluster.engine=ssh"], "are stopped on this machine alone"),
        (["parallel.load_balancing=on"], "step times with stops inside"),
    ],
)
def test_jobs_that_cannot_be_stopped_are_refused(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(job.parent)
    over = ["--turns", "1s", "--over", "train.seed=1,2"]
    assert main(["bench", "train", str(job), *words, *over]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_faults_are_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job.parent)
    (job.parent / "suite.toml").write_text(
        'job = "job.toml"\n[rule]\nturns = "1s"\n[[contenders]]\nname = "a"\n'
        '[[contenders]]\nname = "b"\nfault = {after_step = 2, rank = 1}\n'
    )
    assert main(["bench", "train", "suite.toml"]) == 2
    assert "b cannot take turns: it has a fault" in capsys.readouterr().err


@pytest.mark.full
def test_a_job_of_two_ranks_trains_on_through_its_stops(job: Path, tmp_path: Path) -> None:
    contenders = [Contender(name, "job", job=str(job)) for name in ("a", "b")]
    both = run(contenders, tmp_path, turn_seconds=0.3)
    assert all(one.counts for one in both), [one.error for one in both]
    for one in both:
        assert [step.step for step in one.steps] == list(range(1, 41))
        assert one.turns is not None
        assert len(one.turns.stops) >= 3
        assert all(step.seconds > 0 for step in one.steps[1:])
        assert {"goodput", "checkpoint_stall_seconds"}.isdisjoint(one.figures)
    assert [step.loss for step in both[0].steps] == [step.loss for step in both[1].steps]
    events = "\n".join((tmp_path / f"run of {name}" / "output.log").read_text() for name in ("a", "b"))
    assert not any(word in events for word in ("slow", "recover", "lost", "hang"))


@pytest.mark.full
def test_stops_as_long_as_allowed_alarm_no_watchdog(job: Path, tmp_path: Path) -> None:
    contenders = [
        Contender(name, "job", job=str(job), settings={"train.steps": "600"}) for name in ("a", "b")
    ]
    both = run(contenders, tmp_path, turn_seconds=MAX_STOP_SECONDS)
    assert all(one.counts for one in both), [one.error for one in both]
    turns = [one.turns for one in both if one.turns is not None]
    assert max(ended - began for own in turns for began, ended in own.stops) >= MAX_STOP_SECONDS
    for name in ("a", "b"):
        events = (tmp_path / f"run of {name}" / "run" / "events.jsonl").read_text().splitlines()
        kinds = {json.loads(line)["kind"] for line in events}
        assert kinds <= {"start", "message", "checkpoint", "finish"}
