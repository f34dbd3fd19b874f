"""End of a job whose run is not finished, and nodes that leave a job: Slurm's answers are recorded ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.recorded_slurm import answer, submission, submitted
from wanma.engines.slurm import continuation
from wanma.engines.slurm.batch_script import CANCEL_FILE
from wanma.engines.slurm.departure import leave_run, release_nodes
from wanma.engines.slurm.records import parse_time_limit
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection
from wanma.report.run_report import read_report

REFUSED = "echo 'Requested operation is presently disabled for job 7' >&2; exit 1"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "REQUEUE_SECONDS", 0.0)
    monkeypatch.setattr(continuation, "RETRY_SECONDS", 0.0)


def record_end(run: RunDirectory, outcome: str, at: float) -> None:
    event = {"kind": "finish", "outcome": outcome, "time": at}
    run.events.write_text(json.dumps(event) + "\n")


@pytest.mark.parametrize(("outcome", "expected"), [("finished", 0), ("failed", 1), ("interrupted", 137)])
def test_the_code_of_a_lost_node_is_not_that_of_an_elastic_run(
    outcome: str, expected: int, tmp_path: Path, programs: Path
) -> None:
    run = submitted(tmp_path, "1..2")
    record_end(run, outcome, at=time.time())
    assert continuation.end_job(run, 137, "7", time.time() - 60) == expected


def test_a_cancelled_elastic_run_that_lost_a_node_is_cancelled(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path, "1..2")
    record_end(run, "interrupted", at=time.time())
    (run.engine_files / CANCEL_FILE).touch()
    assert continuation.end_job(run, 137, "7", time.time() - 60) == 130


def test_an_end_before_this_job_says_nothing(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path, "1..2")
    record_end(run, "finished", at=time.time() - 60)
    assert continuation.end_job(run, 2, "7", time.time()) == 2


@pytest.mark.parametrize(
    ("reason", "requeues"), [("TimeLimit", ["requeue 7"]), ("None", [])], ids=["time limit", "scancel"]
)
def test_a_job_that_slurm_is_ending_goes_on_only_after_its_time_limit(
    reason: str, requeues: list[str], tmp_path: Path, programs: Path
) -> None:
    run = submitted(tmp_path)
    calls = answer(programs, "scontrol", f"echo 'JobId=7 JobState=COMPLETING Reason={reason}'")
    assert continuation.end_job(run, 138, "7", time.time()) == 138
    assert calls.read_text().splitlines()[1:] == requeues


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path)
    unanswered = (
        "echo 'slurm_requeue error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    calls = answer(
        programs, "scontrol", f"[ $(wc -l < {programs}/scontrol.calls) -ge 4 ] || {{ {unanswered}; }}"
    )
    assert continuation.end_job(run, 143, "7", time.time()) == 143
    assert calls.read_text().splitlines() == ["show job 7 --oneliner", *["requeue 7"] * 3]


def save_checkpoint(run: RunDirectory, step: int) -> None:
    with run.events.open("a") as events:
        events.write(json.dumps({"kind": "checkpoint", "step": step, "time": time.time()}) + "\n")


def test_a_run_whose_jobs_end_at_their_time_limit_without_a_newer_checkpoint_is_given_up(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", "echo 'JobId=7 TimeLimit=00:10:00 RunTime=00:08:00'")

    def end(seconds: float, code: int = 143) -> int:
        return continuation.end_job(run, code, "7", time.time() - seconds)

    assert end(480) == 143
    assert end(480) == 143
    save_checkpoint(run, 1200)  # a job that comes further
    assert [end(480), end(480, 138), end(480)] == [143, 138, 143]
    assert end(60) == 143  # makes way for another job
    assert end(480) == 1
    said = capsys.readouterr().err
    assert "3 jobs in succession reached their time limit (00:10:00) without" in said
    assert "raise cluster.slurm.time" in said
    report = read_report(run)
    assert report.state == "failed"
    assert "given up" in report.failure
    assert end(480) == 1  # until it is submitted again


def test_a_script_is_given_up_whose_jobs_end_before_it_starts(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path, command=("launch",))
    answer(programs, "scontrol", "echo 'JobId=7 TimeLimit=00:01:00 RunTime=00:00:30'")
    codes = [138, 138, 143, 138, 138, 138]
    ends = [continuation.end_job(run, code, "7", time.time() - 30) for code in codes]
    assert ends == [*codes[:-1], 1]


@pytest.mark.parametrize("limit", ["UNLIMITED", "Partition_Limit", ""])
def test_without_a_time_limit_no_job_is_counted(limit: str, tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", f"echo 'JobId=7 TimeLimit={limit} RunTime=1-00:00:00'")
    assert [continuation.end_job(run, 143, "7", 0.0) for _ in range(5)] == [143] * 5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("1-02:00:01", 93_601),
        ("UNLIMITED", None),
        ("NONE", None),
        ("90", 5_400),
        ("90:30", 5_430),
        ("2-12", 216_000),
        ("1-02:30", 95_400),
    ],
)
def test_a_time_limit_is_read(text: str, seconds: float | None) -> None:
    assert parse_time_limit(text) == seconds


def test_where_requeue_is_refused_the_saved_script_is_submitted_to_follow(
    tmp_path: Path, programs: Path
) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", REFUSED)
    calls = answer(programs, "sbatch", "echo 8")
    assert continuation.end_job(run, 143, "7", time.time()) == 143
    assert calls.read_text().split()[2:] == ["--dependency=afterany:7", str(run.engine_files / "slurm.sh")]
    handle = json.loads(run.engine.read_text())["handle"]
    assert (handle["jobs"], handle["earlier_jobs"]) == (["8"], ["7"])


def test_a_cancelled_run_gets_no_further_job(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path)
    (run.engine_files / CANCEL_FILE).touch()
    requeues = answer(programs, "scontrol", REFUSED)
    assert continuation.end_job(run, 143, "7", time.time()) == 143
    assert not requeues.exists()


def test_a_further_job_that_the_record_lacks_is_named(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", REFUSED)
    # A folder at the place of the temporary file lets the record be written no more.
    answer(programs, "sbatch", f"mkdir {run.engine.with_name(f'.{run.engine.name}.{os.getpid()}')}; echo 8")
    assert continuation.end_job(run, 143, "7", time.time()) == 143
    said = capsys.readouterr().err
    assert "job 8 is submitted, and the run's record lacks it: cannot write" in said
    assert "`scancel 8`" in said
    assert "nor submitted" not in said


def test_a_further_job_of_a_run_that_was_cancelled_meanwhile_stays_in_the_record_if_it_cannot_be_cancelled(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", REFUSED)
    answer(programs, "sbatch", f"touch {run.engine_files / CANCEL_FILE}; echo 8")
    answer(programs, "scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    assert continuation.end_job(run, 143, "7", time.time()) == 143
    said = capsys.readouterr().err
    assert "the run is cancelled, and its further job 8 is submitted and cannot be cancelled: " in said
    assert "permission denied" in said
    assert "nor submitted" not in said
    assert json.loads(run.engine.read_text())["handle"]["jobs"] == ["8"]


def running_job() -> dict[str, str]:
    return {"JobId": "7", "NodeList": "n[1-3]", "BatchHost": "n1", "NumNodes": "3"}


def test_a_site_that_forbids_jobs_to_shrink_is_not_asked_to(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path)
    answer(programs, "scontrol", "echo 'SchedulerParameters = bf_max_job_test=9,disable_job_shrink'")
    steps = answer(programs, "srun", "exit 1")
    with pytest.raises(WanmaError, match="lets no running job give nodes back"):
        release_nodes(running_job(), 1, submission(run, ClusterSection()))
    assert not steps.exists()


def test_nodes_are_taken_from_the_end_and_never_that_of_the_batch_script(
    tmp_path: Path, programs: Path
) -> None:
    run = submitted(tmp_path)
    hosts = '[ "$2" != hostnames ] || printf "n2\\nn1\\nn3\\n"'
    updates = answer(programs, "scontrol", hosts)
    steps = answer(programs, "srun", "exit 0")
    release_nodes(running_job(), 2, submission(run, ClusterSection()))
    assert "--nodelist=n2,n3" in steps.read_text()
    assert updates.read_text().splitlines()[-1] == "update JobId=7 NodeList=n1"


def test_a_node_whose_supervisor_does_not_leave_stays_in_the_job(tmp_path: Path, programs: Path) -> None:
    run = submitted(tmp_path)
    updates = answer(programs, "scontrol", '[ "$2" != hostnames ] || printf "n1\\nn2\\n"')
    answer(programs, "srun", "echo 'the supervisor has not ended after 45 s' >&2; exit 1")
    with pytest.raises(WanmaError, match=r"n2 did not leave job 7 in order: .*has not ended"):
        release_nodes(running_job(), 1, submission(run, ClusterSection()))
    assert "update" not in updates.read_text()


@pytest.mark.parametrize("starter", [[], ["sh", "-c", 'trap : TERM; "$@"; exit $?', "wanma"]])
def test_only_the_supervisor_of_the_run_is_asked_to_leave(
    starter: list[str], tmp_path: Path, programs: Path
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    run, shell = subprocess.Popen([*starter, *command, str(tmp_path / "run")]), subprocess.Popen(command)
    while starter and not Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text():
        time.sleep(0.01)
    rows = [f"{run.pid} 7 0 0 0", f"{run.pid} 7 1 0 0", f"{shell.pid} 7 2 0 0", f"{shell.pid} 7 0 - -"]
    answer(programs, "scontrol", "printf 'PID JOBID STEPID LOCALID GLOBALID\\n" + "\\n".join(rows) + "\\n'")
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURMD_NODENAME": "n1"}
    try:
        # Without a shell the supervisor is a zombie until it is waited for.
        assert leave_run(tmp_path / "run", 60 if starter else 0.5, environment) == (0 if starter else 1)
        assert run.wait(10) == (143 if starter else -15)
        assert leave_run(tmp_path / "run", 0.5, environment) == 0
        assert shell.poll() is None
    finally:
        run.kill()
        shell.kill()
        run.wait()
        shell.wait()
