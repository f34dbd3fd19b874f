"""The local engine: runs of this machine that outlive the command which submitted them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.wheels import make_wheel
from wanma.api.engines.attachment import attach
from wanma.api.engines.control import cancel_run, resize_run, run_log_files, run_status, run_statuses
from wanma.api.engines.submission import submit_job
from wanma.cli.main import main
from wanma.engines.engine import Handle, RunStatus
from wanma.engines.engine_record import EngineRecord, read_engine_record
from wanma.engines.local.engine import LocalEngine
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection
from wanma.report.run_report import read_report

SECRET = "a-secret-that-nobody-guesses"


def job(folder: Path, steps: int):
    return to_job(
        {
            "model": {"preset": "gpt-1m"},
            "data": {"text": [str(Path(__file__))], "sequence_length": 32},
            "train": {"steps": steps, "global_batch": 2},
            "checkpoint": {"every_steps": 1000},
            "cluster": {"budget": {"shell_minutes": 7}},
            "observe": {"runs": str(folder), "name": "detached", "console": "plain"},
        }
    )


def wait_for(run: RunDirectory, states: tuple[str, ...], seconds: float = 120) -> RunStatus:
    deadline = time.monotonic() + seconds
    while (status := run_status(run)).state not in states:
        assert time.monotonic() < deadline, f"{status}: {run_log_files(run)[0].read_text()}"
        time.sleep(0.1)
    return status


def wait_for_step(run: RunDirectory) -> None:
    deadline = time.monotonic() + 120
    while not run.metrics.exists() or not run.metrics.read_text():
        assert time.monotonic() < deadline, run_status(run)
        time.sleep(0.1)


def wait_for_end(process: psutil.Process) -> None:
    """Wait until a process has ended; where process 1 collects no orphans, it stays as a zombie."""
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} goes on"
            time.sleep(0.1)


@dataclass(frozen=True)
class Submitted:
    """A run that has ended, and what was seen of it on its way."""

    run: RunDirectory
    record: EngineRecord
    state: str
    """State after its submission."""
    refusal: str
    """Refusal of another number of nodes."""
    exit_code: int
    shown: str
    """Output of `attach`."""


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """A run of three steps, submitted with a secret."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANMA_SECRET", SECRET)
        run, record = submit_job(job(tmp_path_factory.mktemp("submitted"), 3))
        state = run_status(run).state
        with pytest.raises(WanmaError) as refused:
            resize_run(run, 2)
        with contextlib.redirect_stdout(output):
            exit_code = attach(run, record)
    return Submitted(run, record, state, str(refused.value), exit_code, output.getvalue())


def test_a_submitted_run_ends_by_itself_and_is_shown_by_attach(submitted: Submitted) -> None:
    run = submitted.run
    assert submitted.record.engine == "local"
    assert submitted.state == "running"
    assert submitted.exit_code == 0
    assert "step 3/3" in submitted.shown
    assert "finished at step 3" in submitted.shown
    assert run_status(run) == RunStatus("finished", 0, "", (), run_status(run).job_ids)
    assert "step 3/3" in run_log_files(run)[0].read_text()
    assert run_log_files(run, [0]) == [run.rank_log(0)]
    with pytest.raises(WanmaError, match=r"no rank-7\.log"):
        run_log_files(run, [7])


def test_a_shell_has_the_time_of_the_job_or_of_its_option(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def keep(_program: str, command: list[str]) -> None:
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", keep)
    for option in ((), ("--minutes", "9")):
        with pytest.raises(SystemExit):
            main(["shell", str(submitted.run.path), *option])
    assert [command[-2] for command in commands] == ["7", "9"]


def test_a_run_of_one_machine_has_one_size(submitted: Submitted) -> None:
    assert "was started with cluster.nodes = 1, and 2 lies outside" in submitted.refusal


def test_the_record_holds_no_secret_and_a_damaged_one_is_named(submitted: Submitted, tmp_path: Path) -> None:
    run = submitted.run
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
    again = read_engine_record(run)
    assert again is not None
    assert again.read_submission("s" * 32).command == (
        "train",
        str(run.engine_files / "job.toml"),
        "--run-dir",
        str(run.path),
    )
    damaged = RunDirectory(tmp_path / "damaged")
    shutil.copytree(run.path, damaged.path)
    damaged.engine.write_text("{")
    with pytest.raises(WanmaError, match=r"engine.json cannot be read"):
        read_engine_record(damaged)
    assert "engine.json cannot be read" in run_statuses([damaged])[1][0]


def test_a_dry_run_shows_a_long_command_in_one_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = tmp_path / ("long-" * 30)
    (tmp_path / "job.toml").write_text(job_to_toml(job(tmp_path, 1)))
    assert main(["train", str(tmp_path / "job.toml"), "-d", "--dry-run", "--run-dir", str(run)]) == 0
    assert f"job.toml --run-dir {run} > {run}/engine/output.log" in capsys.readouterr().out


def test_a_cancelled_run_ends_in_order_and_the_same_job_resumes_it(tmp_path: Path) -> None:
    long = job(tmp_path, 100_000)
    run, _ = submit_job(long)
    wait_for_step(run)
    with pytest.raises(WanmaError, match=r"is running already .*\n.*wanma cancel detached"):
        submit_job(long)
    assert cancel_run(run, is_immediate=False).state == "running"
    assert wait_for(run, ("cancelled", "failed")).state == "cancelled"
    report = read_report(run)
    assert report.state == "interrupted"
    stopped = report.checkpoints[-1]["step"]
    run, record = submit_job(job(tmp_path, stopped + 2))
    assert attach(run, record) == 0
    assert read_report(run).starts[-1]["step"] == stopped


@pytest.mark.full
def test_a_run_whose_supervisor_is_killed_has_failed_and_leaves_no_process(tmp_path: Path) -> None:
    run, record = submit_job(job(tmp_path, 100_000))
    wait_for_step(run)
    rank = psutil.Process(read_report(run).starts[-1]["process"])
    os.kill(record.handle["process"], signal.SIGKILL)
    assert wait_for(run, ("failed",)).state == "failed"
    wait_for_end(rank)


def submitted_elsewhere(folder: Path) -> tuple[RunDirectory, Handle]:
    """Run directory that this host shares with another, where the run was submitted."""
    run = RunDirectory(folder / "script")
    run.create()
    handle: Handle = {
        "host": "another-host",
        "process": os.getpid(),
        "started": 1,
        "submitted": time.time() - 60,
        "run_directory": str(run.path),
    }
    return run, handle


def record_script(run: RunDirectory, age: float, **values: object) -> None:
    content = {
        "script": "train.py",
        "arguments": [],
        "ranks_per_node": 1,
        "nodes": 1,
        "host": "another-host",
        "process": os.getpid(),
        "started": time.time() - age,
        "ended": None,
        "exit_code": None,
        "failure": "",
    }
    run.script.write_text(json.dumps(content | values))


def status_of(handle: Handle) -> RunStatus:
    (status,) = LocalEngine().statuses([handle])
    return status


def test_a_run_of_another_host_is_judged_by_its_records(tmp_path: Path) -> None:
    run, handle = submitted_elsewhere(tmp_path)
    record_script(run, 50)
    assert status_of(handle).state == "running"
    assert status_of(handle).reason == "by its records, as it is on another-host"
    record_script(run, 50, ended=time.time() - 5, exit_code=0)
    assert status_of(handle).state == "finished"
    record_script(run, 50, ended=time.time() - 5, exit_code=143)
    assert status_of(handle).state == "cancelled"
    record_script(run, 50, ended=time.time() - 5, exit_code=1, failure="rank 0 failed: ValueError")
    assert (status_of(handle).state, status_of(handle).reason) == ("failed", "rank 0 failed: ValueError")


def test_a_run_that_has_died_on_another_host_is_over(tmp_path: Path) -> None:
    run, handle = submitted_elsewhere(tmp_path)
    handle["submitted"] -= 4_000
    record_script(run, 4_000)
    status = status_of(handle)
    assert status.state == "failed"
    assert status.reason.startswith("the process ended without a record; see ")


def test_records_of_an_earlier_start_say_nothing_of_a_run_on_another_host(tmp_path: Path) -> None:
    run, handle = submitted_elsewhere(tmp_path)
    for state in ("without records", "with those of an earlier start"):
        assert status_of(handle).state == "unknown", state
        assert status_of(handle).reason == "it is on another-host, and has no record yet: ask there"
        record_script(run, 600, ended=time.time() - 500, exit_code=0)


@pytest.mark.full
def test_cancel_now_ends_a_run_at_once(tmp_path: Path) -> None:
    run, _ = submit_job(job(tmp_path, 100_000))
    wait_for_step(run)
    cancel_run(run, is_immediate=True)
    assert wait_for(run, ("cancelled", "failed")).state == "cancelled"
    assert cancel_run(run, is_immediate=True).is_over


def test_a_run_that_fails_before_its_first_record_shows_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # the interpreter of the supervisor ends at once
    run, record = submit_job(job(tmp_path, 2))
    monkeypatch.delenv("PYTHONHOME")
    assert attach(run, record) == 1
    shown = capsys.readouterr().out
    assert "it ended before its first record" in shown
    assert "Fatal Python error" in shown or "No module named" in shown


@pytest.mark.full
def test_a_detached_run_has_the_environment_of_its_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    (tmp_path / "requirements.lock").write_text("--no-index\n--find-links wheels\ntiny==1.0\n")
    section = ClusterSection(environment="requirements.lock", system_site_packages=True)
    run, record = submit_job(job(tmp_path, 2).model_copy(update={"cluster": section}))
    assert attach(run, record) == 0
    (environment,) = (tmp_path / ".wanma" / "environments").glob("*/complete.json")
    recorded = json.loads(run.environment.read_text())["executable"]
    assert Path(recorded) == environment.parent / "bin" / "python"
