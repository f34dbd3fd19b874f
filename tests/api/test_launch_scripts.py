"""wanma launch: scripts that were written for torchrun, and know nothing of wanma."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from contextvars import copy_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.command import LIMIT_SECONDS, Desk
from support.networks import free_address
from support.slowness import patient
from wanma.api.launch import script_worker
from wanma.job.run.worker import NullSupervisorClient, WorkerContext
from wanma.report.script_run import read_script_run

SCRIPTS = Path(__file__).parents[1] / "scripts"
VARIABLES = """\
import json, os, sys
names = [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]
names += [name for name in os.environ if name.startswith(("TORCHELASTIC", "TORCH_NCCL", "ROLE", "OMP_NUM"))]
print("told " + json.dumps({name: os.environ[name] for name in names}), flush=True)
print("words " + json.dumps(sys.argv[1:]), "torch" in sys.modules, __name__, flush=True)
"""
"""Program that prints what a launcher tells a script; without torch, so that it starts at once."""
ENDINGS = """\
import os, signal, sys, time
rank, how = int(os.environ["RANK"]), sys.argv[1]
print("before", flush=True)
open(f"said-{rank}", "w").close()
if rank == 1:
    while not os.path.exists("said-0"):
        time.sleep(0.02)
    if how == "raise":
        def deep():
            raise ValueError("no such column: prize")
        deep()
    if how == "exit":
        sys.exit(7)
    if how == "usage":
        sys.exit(2)
    if how == "silently":
        os._exit(5)
    if how == "done":
        os._exit(0)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
elif how not in ("done", "crash"):
    time.sleep(60)
"""
WAITS = """\
import signal, sys, time
def leave(number, frame):
    print("saved by", signal.Signals(number).name, flush=True)
    sys.exit(3)
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, leave)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
words = ["waiting"]
while True:
    try:
        if words:  # a signal may follow at once
            print(words.pop(), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        if "stubborn" not in sys.argv:
            raise
"""
SPAWNS = """\
import multiprocessing, pickle, threading, time
class Thing: pass
def double(x): return 2 * x
def later():
    time.sleep(0.3)
    import __main__
    print("a thread:", __main__.LAST, flush=True)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
    print(type(pickle.loads(pickle.dumps(Thing()))).__name__)
    threading.Thread(target=later).start()
LAST = 1
"""
AGAIN = """\
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}: {int(total)} ranks", flush=True)
dist.barrier()
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("the first time only")
dist.destroy_process_group()
"""
SPEAKS = """\
import sys, time
import torch, wanma
import torch.nn.functional as F
with wanma.session({"train": {"steps": 3, "global_batch": 4}, "observe": {"console": "plain"}}) as session:
    model = session.prepare(torch.nn.Linear(8, 4))
    for batch in session.batches([(torch.ones(8), 1) for _ in range(16)]):
        if "inside" in sys.argv and batch.samples[0] >= 8:
            time.sleep(60)
        session.step(F.cross_entropy(model(*batch.inputs), batch.targets, reduction="none"))
if "afterwards" in sys.argv:
    time.sleep(8)
print("evaluated", flush=True)
"""


def write(desk: Desk, name: str, source: str) -> str:
    (desk.folder / name).write_text(source)
    return name


def told(text: str) -> dict[str, Any]:
    found = re.search(r"told (\{.*?\})", text)
    assert found is not None, text
    return dict(json.loads(found[1]))


# ------------------------------------------------------------------ the place of a rank


def test_a_script_is_told_what_torchrun_tells(desk: Desk) -> None:
    name = write(desk, "told.py", VARIABLES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2"]
    theirs = told(desk.start_program([*torchrun, name]).end().out)
    words = ("--nproc-per-node", "1", "--max-restarts", "2")
    ran = desk.run("launch", *words, name, "--ranks", "7", "--", "x").check()
    ours = told(ran.out)
    # The file into which torch's own `@record` writes an error for torchrun is its affair.
    assert theirs.keys() - ours.keys() <= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    places = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert {name: ours[name] for name in theirs.keys() & ours.keys() - places} == {
        name: theirs[name] for name in theirs.keys() & ours.keys() - places
    }
    assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert int(ours["MASTER_PORT"]) > 0
    assert ran.lines(0)[1] == 'words ["--ranks", "7", "--", "x"] False __main__'


def test_each_rank_of_two_machines_is_told_its_own_place(desk: Desk) -> None:
    name = write(desk, "told.py", VARIABLES)
    place = free_address()
    words = ("launch", "--ranks", "2", "--nodes", "2", "--rendezvous", place, "--run-dir", "both", name)
    ended = [one.end() for one in [desk.start(*words) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    ranks = [told("\n".join(one.lines(rank))) for rank in range(4) for one in ended if one.lines(rank)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [[one[name] for name in names] for one in ranks] == [
        [str(rank), str(rank % 2), str(rank // 2), "4", "2", "2"] for rank in range(4)
    ]
    for common in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert len({one[common] for one in ranks}) == 1


@pytest.mark.parametrize(
    "option", ["--local-rank", pytest.param("--local_rank", marks=pytest.mark.exhaustive)]
)
def test_the_local_rank_as_an_option_for_scripts_of_torch_distributed_launch(desk: Desk, option: str) -> None:
    name = write(desk, "told.py", VARIABLES)
    ran = desk.run("launch", "--ranks", "2", option, name, "--lr", "1")
    assert [ran.lines(rank)[1].partition("]")[0] for rank in (0, 1)] == [
        f'words ["{option}={rank}", "--lr", "1"' for rank in (0, 1)
    ]
    ran = desk.run("launch", "--ranks", "1", "--use-env", option, name)
    assert ran.lines(0)[1].startswith("words []")


def test_a_module_runs_as_with_python_m(desk: Desk) -> None:
    (desk.folder / "package").mkdir()
    write(desk, "package/__init__.py", "")
    write(desk, "package/told.py", "from . import __name__ as package\nprint(package)\n" + VARIABLES)
    ran = desk.run("launch", "--ranks", "1", "-m", "package.told", "x").check()
    assert ran.lines(0)[0] == "package"
    assert ran.lines(0)[2].startswith('words ["x"] ')
    assert (desk.folder / "runs" / "told" / "script.json").exists()


def test_a_script_is_main_for_whatever_it_starts(desk: Desk) -> None:
    name = write(desk, "spawns.py", SPAWNS)
    ran = desk.run("launch", "--ranks", "1", name).check()
    assert ran.lines(0) == ["[2, 4]", "Thing", "a thread: 1"]


# ------------------------------------------------------------------ scripts of torch


@pytest.mark.full
def test_ddp_runs_unchanged_on_two_machines(desk: Desk) -> None:
    place = free_address()
    ddp = str(SCRIPTS / "ddp.py")
    words = ("launch", "--ranks", "1", "--nodes", "2", "--rendezvous", place, "--run-dir", "both", ddp)
    ended = [one.end() for one in [desk.start(*words) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    said = sorted(line for rank in (0, 1) for one in ended for line in one.lines(rank))
    assert [line.partition(": ")[0] for line in said] == ["rank 0 (0 here) of 2", "rank 1 (0 here) of 2"]
    assert len({line.partition(": ")[2] for line in said}) == 1


@pytest.mark.full
def test_fsdp_runs_unchanged_and_may_be_silent_for_longer_than_a_hang(desk: Desk) -> None:
    limits = ("--set", "cluster.hang_timeout_seconds=1", "--set", "cluster.start_timeout_seconds=1")
    ran = desk.run("launch", "--ranks", "2", *limits, str(SCRIPTS / "fsdp.py"), "4").check()
    for rank in (0, 1):
        assert re.fullmatch(rf"rank {rank}: loss 0\.\d+, DTensor", ran.lines(rank)[-1])


@pytest.mark.full
def test_ranks_that_are_started_again_meet_anew(desk: Desk) -> None:
    name = write(desk, "again.py", AGAIN)
    ran = desk.run("launch", "--ranks", "2", "--set", "cluster.max_restarts=1", name).check()
    assert ran.lines(0) == ["attempt 0 of 1: 2 ranks", "attempt 1 of 1: 2 ranks"]
    assert ran.out.count("warning: rank 1 (") == 1
    assert "the first time only" in ran.out
    shown = desk.run("show", "again").out
    assert re.search(r"^  restarts +1$", shown, re.MULTILINE), shown
    assert "restarted after: rank 1 (" in shown
    assert ", 1 restart" in " ".join(desk.run("runs").out.split())


def test_a_terminal_that_is_not_read_stops_neither_the_script_nor_its_supervisor(desk: Desk) -> None:
    """Ctrl-S: the ranks go on, are watched, and the exit code comes."""
    script = "for number in range(20_000):\n    print(f'line {number} of many', '.' * 80)\n"
    running = desk.start("launch", "--ranks", "1", write(desk, "chatty.py", script))
    assert running.process.wait(LIMIT_SECONDS) == 0
    ran = running.end()
    assert "[rank 0] line 0 of many" in ran.out
    shown = desk.call("show", "chatty").out
    assert "chatty: Finished after " in shown


# ------------------------------------------------------------------ how a script ends


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("raise", 1, "ValueError: no such column: prize"),
        ("exit", 7, "ends.py exited: exit code 7"),
        pytest.param("usage", 2, "ends.py exited: exit code 2", marks=pytest.mark.exhaustive),
        pytest.param("silently", 5, "its process exited with code 5", marks=pytest.mark.exhaustive),
        ("crash", 1, "its process was killed by SIGSEGV"),
        ("done", 0, ""),
    ],
)
def test_the_end_names_the_rank_and_the_exit_code_is_the_scripts(
    desk: Desk, how: str, code: int, cause: str
) -> None:
    ran = desk.run("launch", "--ranks", "2", write(desk, "ends.py", ENDINGS), how).check(code)
    assert ran.lines(0) == ran.lines(1) == ["before"]
    errors = [line for line in ran.out.splitlines() if line.startswith("error: ")]
    assert (
        len(errors) == 1 and f"rank 1 (node 0, {socket.gethostname()}) failed: {cause}" in errors[0]
    ) or not code
    frames = re.findall(r'File ".*/(\w+\.py)", line \d+, in (\S+)', ran.out)
    assert frames == ([("ends.py", "<module>"), ("ends.py", "deep")] if how == "raise" else [])
    shown = desk.call("show", "ends").out
    assert shown.startswith(f"ends: {'Failed' if code else 'Finished'} after ")
    assert f"  script     ends.py {how}\n" in shown
    assert f"  exit code  {code}\n" in shown
    assert cause in shown
    assert "rank-0.log to rank-1.log" in shown


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        pytest.param(signal.SIGINT, [], 130, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, [], 143, marks=pytest.mark.exhaustive),
        (signal.SIGTERM, ["handles"], 143),
        (signal.SIGINT, ["stubborn"], 130),
        (signal.SIGTERM, ["deaf"], 143),
    ],
)
def test_a_request_to_stop_reaches_the_script(
    desk: Desk, number: signal.Signals, words: list[str], code: int
) -> None:
    seconds = {"stubborn": 1.5, "deaf": 2.5}
    grace = [f"cluster.grace_seconds={seconds[word]}" for word in words if word in seconds]
    grace = ["--set", *grace] if grace else []
    going = desk.start("launch", "--ranks", "2", *grace, write(desk, "waits.py", WAITS), *words)
    logs = [desk.folder / "runs" / "waits" / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    assert going.until(lambda: all(log.exists() and "waiting" in log.read_text() for log in logs))
    going.look()
    going.signal(number)
    ran = going.end().check(code)
    assert going.left() == []
    assert "stopping the script: " in ran.out
    assert ("(cluster.grace_seconds) ended before" in ran.out) == (words == ["deaf"])
    assert "checkpoint" not in ran.out
    assert "Traceback" not in ran.out
    assert "error: " not in ran.out
    after = ["saved by SIGTERM"] if words == ["handles"] else []
    assert ran.lines(0) == ran.lines(1) == ["waiting", *after]
    assert desk.call("show", "waits").out.startswith("waits: Stopped on request after ")


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_script_that_is_asked_to_stop_before_it_begins_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """Its process has ignored the signal: until then it is one of wanma's, which stop by other means."""
    executed: list[str] = []
    monkeypatch.setattr(script_worker, "restore_stop_signals", lambda: None)
    monkeypatch.setattr(script_worker, "_execute", lambda script, _: executed.append(script))
    monkeypatch.setattr(NullSupervisorClient, "is_drain_requested", lambda _: is_asked)
    order = {
        "script": "train.py",
        "arguments": [],
        "local_rank_option": "",
        "framework": "torch",
        "interpreter": "",
        "is_program": False,
        "mpi": None,
        "has_session": False,
        "cluster": {},
        "run_id": "train",
        "max_restarts": 0,
        "unset": [],
    }
    worker = WorkerContext.single_process(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with mock.patch.dict(os.environ):
        copy_context().run(script_worker.run_script_worker, worker, json.dumps(order).encode())
    assert executed == ([] if is_asked else ["train.py"])


def test_the_list_of_runs_knows_scripts_and_what_needs_a_training_says_so(desk: Desk) -> None:
    desk.run("launch", "--ranks", "1", write(desk, "told.py", VARIABLES))
    going = desk.start("launch", "--ranks", "1", write(desk, "waits.py", WAITS))
    assert going.until(lambda: (desk.folder / "runs" / "waits" / "logs" / "rank-0.log").exists())
    listed = [line.split()[:3] for line in desk.call("runs").out.splitlines()[1:]]
    assert listed == [["waits", "running", "script,"], ["told", "finished", "script,"]]
    going.kill_all()
    going.end()
    assert desk.call("show", "waits").out.startswith("waits: Crashed ")
    refused = desk.call("report", "told")
    assert refused.code == 2
    assert "did not open a wanma.session" in refused.told_once()


def test_only_the_ranks_that_are_asked_for_are_shown(desk: Desk) -> None:
    name = write(desk, "told.py", VARIABLES)
    ran = desk.run("launch", "--ranks", "2", "--show", "1", name)
    assert [bool(ran.lines(rank)) for rank in (0, 1)] == [False, True]
    assert desk.run("launch", "--ranks", "2", "--show", "none", name).out == "run directory: runs/told\n"


# ------------------------------------------------------------------ scripts that speak to wanma


LIMITS = ("--set", f"cluster.hang_timeout_seconds={patient(5)}", "--set", "cluster.start_timeout_seconds=200")


def test_a_script_may_be_silent_once_its_session_is_closed(desk: Desk) -> None:
    name = write(desk, "speaks.py", SPEAKS)
    ran = desk.run("launch", "--ranks", "1", *LIMITS, name, "afterwards").check()
    assert "finished at step 3" in ran.out
    assert ran.lines(0) == ["evaluated"]


@pytest.mark.exhaustive
def test_a_script_that_is_silent_in_its_session_is_a_hang(desk: Desk) -> None:
    name = write(desk, "speaks.py", SPEAKS)
    ran = desk.run("launch", "--ranks", "1", *LIMITS, "--set", "cluster.max_restarts=0", name, "inside")
    assert ran.code == 1
    assert "no rank reported progress for" in ran.told_once()


def test_a_session_takes_ranks_that_torchrun_has_started(desk: Desk) -> None:
    source = (Path(__file__).parents[2] / "examples" / "own_loop.py").read_text()
    write(desk, "own.py", source.replace('"steps": 200', '"steps": 20').replace('_steps": 50', '_steps": 10'))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "own.py"]
    ran = desk.start_program(torchrun).end().check()
    assert ran.out.count("finished at step 20") == 1
    assert "`wanma launch --ranks 2`" in ran.out
    training = desk.training("runs/own-loop")
    assert [step["step"] for step in training.metrics] == list(range(1, 21))
    assert training.checkpoints() == ["step-00000020"]


def test_a_training_that_starts_its_ranks_itself_says_so_to_another_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import wanma

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(wanma.JobError, match="started this process as rank 1 of 2") as refused:
        wanma.train({"train": {"steps": 1}})
    assert "run the script with `python`" in refused.value.hint


def test_a_damaged_record_of_a_script_is_no_run(tmp_path: Path) -> None:
    from wanma.job.run.run_directory import RunDirectory

    (tmp_path / "script.json").write_text("{")
    assert read_script_run(RunDirectory(tmp_path)) is None
