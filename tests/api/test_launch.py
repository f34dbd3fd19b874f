"""wanma launch: a user's own script on several ranks, as a command of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import Desk
from support.networks import free_address
from wanma.api.launch.script_launch import Program, _launch_fingerprint, _ScriptConsole, launch_script
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import load_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection

SCRIPT = """\
import json, os, sys, time
import torch, wanma
import torch.nn.functional as F

print("arguments", json.dumps(sys.argv[1:]), "threads", torch.get_num_threads())
options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if options.get("before"):
    raise SystemExit(options["before"])
job = {
    "train": {"steps": 4, "global_batch": 4},
    "parallel": {"dp_replicate": int(os.environ["WORLD_SIZE"])},
    "observe": {"console": "plain", "log_every_steps": 3},
    **options.get("job", {}),
}
torch.manual_seed(0)
data = [(torch.randn(8), 1) for _ in range(16)]
with wanma.session(job, run_directory=options.get("run_directory")) as session:
    model = session.prepare(torch.nn.Linear(8, 4))
    for batch in session.batches(data):
        if options.get("fails") and session.worker.rank == 1 and batch.samples[0] >= 8:
            raise ValueError("no such column: prize")
        if options.get("wait") and batch.samples[0] >= 4:
            while not os.path.exists(options["wait"]):
                time.sleep(0.02)
        session.step(F.cross_entropy(model(*batch.inputs), batch.targets, reduction="none"))
print("compiler", "torch._dynamo" in sys.modules)
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path, modules=tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    return made


def log(desk: Desk, run: str, rank: int) -> str:
    return (desk.folder / run / "logs" / f"rank-{rank}.log").read_text()


def test_the_scripts_words_are_its_own_and_its_jobs_console_is_used(desk: Desk) -> None:
    options = json.dumps({"job": {"cluster": {"hang_timeout_seconds": 77.0}}, "run_directory": "elsewhere"})
    words = [options, "--ranks", "7", "--", "x"]
    ran = desk.run("launch", "--ranks", "2", "--set", "cluster.threads_per_rank=1", "mine.py", *words).check()
    assert f"arguments {json.dumps(words)} threads 1\n" in log(desk, "runs/mine", 1)
    lines = ran.out.splitlines()
    assert lines.count("run directory: runs/mine") == 1
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/4", "3/4", "4/4"]
    told = [line for line in lines if line.startswith("[rank ")]
    printed = (f"arguments {json.dumps(words)} threads 1", "compiler False")
    assert sorted(told) == [f"[rank {rank}] {text}" for rank in (0, 1) for text in printed]
    assert "cluster.hang_timeout_seconds = 77.0 in" in ran.out
    assert "wanma launch --set cluster.hang_timeout_seconds=77.0" in ran.out
    assert "run_directory = 'elsewhere' is ignored" in ran.out
    training = desk.training("runs/mine")
    assert [step["step"] for step in training.metrics] == [1, 2, 3, 4]
    plan = json.loads((training.path / "plan.json").read_text())["plan"]
    assert (plan["dp_replicate"], plan["threads_per_rank"]) == (2, 1)
    job = load_job(training.path / "job.toml")
    assert (job.cluster.hang_timeout_seconds, job.cluster.threads_per_rank) == (300.0, 1)
    assert (training.path / "report.html").exists()
    assert not (desk.folder / "elsewhere").exists()


@pytest.mark.full
def test_a_second_launch_in_the_same_place_is_refused_and_the_first_goes_on(desk: Desk) -> None:
    command = ("launch", "--ranks", "1", "--run-dir", "busy", "mine.py", json.dumps({"wait": "go"}))
    first = desk.start(*command)
    assert first.until(lambda: desk.training("busy").steps_begun() >= 1)
    second = desk.run(*command)
    assert second.code == 2
    assert second.told_once().startswith("error: another process is training in busy\n")
    (desk.folder / "go").touch()
    assert first.end().code == 0
    assert len(desk.training("busy").metrics) == 4


@pytest.mark.full
def test_a_script_that_ends_before_its_session_leaves_the_run_as_it_was(desk: Desk) -> None:
    command = ("launch", "--ranks", "1", "--run-dir", "run", "mine.py")
    ran = desk.run(*command, json.dumps({"before": 3}))
    assert ran.code == 3
    assert "mine.py exited: exit code 3" in ran.told_once()
    assert "run directory: run" in ran.out.splitlines()
    left = {path.name for path in (desk.folder / "run").iterdir()}
    assert left == {".lock", "checkpoints", "logs", "script.json"}

    assert desk.run(*command).code == 0
    before = (desk.folder / "run" / "job.toml").read_bytes()
    ran = desk.run(*command, json.dumps({"before": "no licence for this"}))
    assert ran.code == 1
    assert "mine.py exited: no licence for this" in ran.told_once()
    assert (desk.folder / "run" / "job.toml").read_bytes() == before
    assert desk.training("run").events[-1]["kind"] == "start_failed"


@pytest.mark.full
def test_a_rank_that_fails_is_told_once_and_recorded(desk: Desk) -> None:
    ran = desk.run("launch", "--ranks", "2", "mine.py", json.dumps({"fails": True}))
    assert ran.code == 1
    assert ran.text.count("error: rank 1 (") == 1
    end = desk.training("runs/mine").events[-1]
    assert (end["kind"], end["outcome"]) == ("finish", "failed")
    assert "ValueError: no such column: prize" in end["text"]


@pytest.mark.full
def test_two_commands_on_loopback_train_as_one(desk: Desk) -> None:
    place = free_address()
    command = (
        "launch",
        "--ranks",
        "1",
        "--nodes",
        "2",
        "--rendezvous",
        place,
        "--run-dir",
        "both",
        "mine.py",
    )
    ended = [one.end() for one in [desk.start(*command) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    assert sum("finished at step 4" in one.out for one in ended) == 1, "the node of rank 0 shows the run"
    training = desk.training("both")
    assert len(training.metrics) == 4
    assert [f"on node {rank} " in log(desk, "both", rank) for rank in (0, 1)] == [True, True]
    plan = json.loads((training.path / "plan.json").read_text())["plan"]
    assert plan["threads_per_rank"] == discover_node().nodes[0].cores, "each has a machine of its own"


def test_machines_agree_on_the_scripts_content_and_words_wherever_it_lies(tmp_path: Path) -> None:
    scripts = [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"]
    for script, text in zip(scripts, ("one", "one", "two"), strict=True):
        script.write_text(text)
    first, same, other = scripts

    def agreed(script: Path, *words: str, node_rank: int = 0, ranks: int = 2, met_at: str = "here:1") -> str:
        section = ClusterSection(nodes=2, node_rank=node_rank, rendezvous=met_at)
        return _launch_fingerprint(Program(str(script), words), ranks, section)

    assert agreed(first, "x") == agreed(same, "x", node_rank=1, met_at="there:1")
    assert len({agreed(first, "x"), agreed(other, "x"), agreed(first, "y"), agreed(first, "x", ranks=1)}) == 4


def test_keys_of_other_sections_belong_in_the_script(tmp_path: Path) -> None:
    program = Program(str(tmp_path / "absent.py"))
    with pytest.raises(JobError, match=r"train\.steps") as refused:
        launch_script(program, 1, run_directory=tmp_path / "run", overrides=["train.steps=3"])
    assert "set other keys in the script's job" in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_a_launch_that_cannot_start_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise WanmaError("no place to run")

    monkeypatch.setattr("wanma.api.launch.script_launch.run_local", refuse)
    (tmp_path / "plain.py").write_text("")
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(WanmaError, match="no place to run"):
        launch_script(Program(str(tmp_path / "plain.py")), 2, run_directory=run.path)
    record = json.loads(run.script.read_text())
    assert (record["exit_code"], record["failure"]) == (1, "no place to run")


def test_a_straggler_and_a_hang_are_recorded_once_a_session_has_made_it_a_training(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with _ScriptConsole(run, None) as console:
        console.write({"kind": "straggler", "rank": 0})
        assert not run.events.exists()
        run.job.write_text("")
        for kind in ("straggler", "hang", "message"):
            console.write({"kind": kind, "rank": 1, "level": "info", "text": "late"})
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(event["kind"], event["rank"]) for event in events] == [("straggler", 1), ("hang", 1)]
