"""End of a job without its batch script: Slurm's answers are recorded ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.recorded_slurm import answer, submitted
from wanma.engines.slurm import continuation, orphaned_job
from wanma.engines.slurm.engine import SlurmEngine
from wanma.engines.slurm.orphaned_job import end_orphaned_job, exit_code_file
from wanma.job.run.run_directory import RunDirectory

RUNNING = "JobId=7 JobState=RUNNING RunTime=00:01:00 Restarts=0 BatchHost=n1"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_job, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(continuation, "REQUEUE_SECONDS", 0.0)


def controller(programs: Path, *nodes: str, after_requeue: str = RUNNING) -> Path:
    """Let the controller show the job on these nodes, then (the last ones) without those it has lost."""
    shown = [f"echo '{RUNNING} NodeList={one}'" for one in nodes]
    cases = "\n".join(f"{number}) {line};;" for number, line in enumerate(shown[:-1], 1))
    return answer(
        programs,
        "scontrol",
        f"""case "$1 $2" in
"show hostnames") echo "$3" | tr , "\\n";;
"show job")
    [ ! -e {programs}/requeued ] || {{ echo '{after_requeue} NodeList={nodes[-1]}'; exit; }}
    case $(grep -c "show job" {programs}/scontrol.calls) in
    {cases}
    *) {shown[-1]};;
    esac;;
"requeue 7") touch {programs}/requeued;;
esac""",
    )


def recorded(tmp_path: Path, host: str, outcome: str | None = "finished") -> RunDirectory:
    """Return an elastic run of job 7, whose rank 0 is on a host."""
    run, now = submitted(tmp_path, "1..3"), time.time()
    events = [{"kind": "start", "host": host, "time": now - 30}]
    events += [] if outcome is None else [{"kind": "finish", "outcome": outcome, "time": now}]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def end(run: RunDirectory, node: str, code: int = 0) -> None:
    number = str(int(node[1:]) - 1)
    end_orphaned_job(run, code, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": node, "SLURM_NODEID": number})


@pytest.mark.parametrize(("rank_0", "ending"), [("n3", "n3"), ("n2", "n2"), ("n9", "n2")])
def test_one_node_ends_the_job_that_has_lost_its_batch_script(
    rank_0: str, ending: str, tmp_path: Path, programs: Path
) -> None:
    run = recorded(tmp_path, rank_0)
    controller(programs, "n1,n2,n3", "n2,n3")
    answer(programs, "srun", "exit 1")
    cancelled = answer(programs, "scancel", "")
    end(run, "n2" if ending == "n3" else "n3")
    assert not cancelled.exists()
    end(run, ending, code=137)
    assert cancelled.read_text().split() == ["7"]
    assert exit_code_file(run, "7").read_text().strip() == "0"


@pytest.mark.parametrize(("outcome", "state"), [("finished", "finished"), ("failed", "failed")])
def test_the_state_of_such_a_job_is_that_of_its_run(
    outcome: str, state: str, tmp_path: Path, programs: Path
) -> None:
    run = recorded(tmp_path, "n2", outcome)
    controller(programs, "n2")
    answer(programs, "scancel", "")
    end(run, "n2")
    answer(programs, "squeue", "echo '7|7|CANCELLED||'")
    answer(programs, "scontrol", "echo 'JobId=7 JobState=CANCELLED ExitCode=0:15'")
    (status,) = SlurmEngine().statuses([{"jobs": ["7"], "run_directory": str(run.path)}])
    assert status.state == state


def test_a_node_that_answers_ends_its_job_itself(tmp_path: Path, programs: Path) -> None:
    run = recorded(tmp_path, "n1")
    controller(programs, "n1,n2")
    probes = answer(programs, "srun", "")
    cancelled = answer(programs, "scancel", "")
    end(run, "n2")
    assert "--nodelist=n1" in probes.read_text()
    assert not cancelled.exists()


def test_few_nodes_of_a_large_job_ask(tmp_path: Path, programs: Path) -> None:
    run = recorded(tmp_path, "n1")
    probes = answer(programs, "srun", "")
    asked = controller(programs, "n1,n2,n3")
    end(run, "n900")
    assert not asked.exists()
    end(recorded(tmp_path / "2", "n900"), "n900")
    assert probes.exists()


def test_a_job_that_is_requeued_is_not_cancelled(tmp_path: Path, programs: Path) -> None:
    run = recorded(tmp_path, "n2", "interrupted")
    calls = controller(programs, "n2", after_requeue=RUNNING.replace("Restarts=0", "Restarts=1"))
    cancelled = answer(programs, "scancel", "")
    end(run, "n2", code=143)
    assert "requeue 7" in calls.read_text().splitlines()
    assert not cancelled.exists()


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, programs: Path) -> None:
    run = recorded(tmp_path, "n2")
    controller(programs, "n2")
    unanswered = "{ echo 'Unable to contact slurm controller' >&2; exit 1; }"
    calls = answer(programs, "scancel", f"[ $(wc -l < {programs}/scancel.calls) -ge 3 ] || {unanswered}")
    end(run, "n2")
    assert calls.read_text().split() == ["7"] * 3
