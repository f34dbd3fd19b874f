"""Commands and scripts that Open MPI's mpirun and torchrun start: the real ones."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.command import WANMA, Desk, Running
from support.launcher_environments import tensorflow
from wanma.job.errors import EXIT_USAGE

MPIRUN = ("mpirun", "--oversubscribe")
PATIENT_MPIRUN = (*MPIRUN, "--mca", "odls_base_sigkill_timeout", "20")
"""mpirun that waits so long, and always in full, after one process has failed, before it kills the others."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_LAYOUT = ("text.toml", "parallel.dp_replicate=", "train.steps=8")
"""A job without sizes in [parallel]."""
SERVED = (*OPEN_LAYOUT, "servers.count=2", "train.optimizer=sgd")
"""The same with parameter servers."""
EXPECTED_RANKS = """\
import json, os
names = [name for name in os.environ if name.startswith(("OMPI_COMM", "PMIX"))]
print("told", json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], len(names)]), flush=True)
"""
REMOTE_SHELL = """\
#!/bin/bash
# As ssh: HOST COMMAND...; a process with another host name stands for a host.
host=$1; shift
exec unshare --uts bash -c 'hostname "$0"; exec bash -c "$*"' "$host" "$@"
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, modules=tmp_path)


@pytest.fixture
def reference(desk: Desk) -> list[float]:
    """Losses of the same job in two ranks of wanma's own."""
    ran = desk.run("train", "text.toml", "train.steps=8", "--run-dir", "reference")
    ran.check()
    return desk.training("reference").losses


@pytest.fixture
def alone(desk: Desk) -> list[float]:
    """Losses of the job with servers in one process without servers."""
    words = ("train.steps=8", "train.optimizer=sgd", "parallel.dp_replicate=1", "--run-dir", "alone")
    desk.run("train", "text.toml", *words).check()
    return desk.training("alone").losses


@pytest.fixture
def started(desk: Desk) -> Iterator[Running]:
    """A long training under mpirun, after its first steps."""
    running = desk.start(
        *("train", *OPEN_LAYOUT, "train.steps=100000", "--run-dir", "run"),
        before=(*PATIENT_MPIRUN, "-n", "2"),
        **AS_ROOT,
    )
    assert running.until(lambda: desk.training("run").steps_begun() >= 3)
    running.look()
    yield running
    running.kill_all()


def commands(running: Running) -> list[psutil.Process]:
    """The processes that mpirun itself has started, as their local ranks."""
    children = psutil.Process(running.process.pid).children()
    return sorted(children, key=lambda child: child.environ()["OMPI_COMM_WORLD_RANK"])


def test_a_job_without_sizes_trains_on_the_ranks_of_mpirun(desk: Desk, reference: list[float]) -> None:
    ran = desk.start("train", *OPEN_LAYOUT, "--run-dir", "run", before=(*MPIRUN, "-n", "2"), **AS_ROOT).end()
    ran.check()
    assert ran.out.count("finished at step 8") == 1
    assert "\x1b" not in ran.text, "mpirun's terminal is none"
    assert desk.training("run").losses == reference


def test_a_job_trains_on_the_ranks_of_torchrun_and_of_torch_distributed_launch(
    desk: Desk, reference: list[float]
) -> None:
    for number, module in enumerate(("torch.distributed.run", "torch.distributed.launch")):
        launcher = [sys.executable, "-m", module, "--nproc-per-node", "2", "-m", "wanma"]
        ran = desk.start_program([*launcher, "train", *OPEN_LAYOUT, "--run-dir", f"{number}"]).end()
        ran.check()
        assert ran.out.count("finished at step 8") == 1
        assert desk.training(f"{number}").losses == reference


def test_sizes_that_do_not_fit_are_refused_once(desk: Desk) -> None:
    ran = desk.start("train", "text.toml", before=(*MPIRUN, "-n", "3"), **AS_ROOT).end()
    assert ran.code == EXIT_USAGE
    assert "mpirun started 3 processes on 1 node, and [parallel] of the job needs 2" in ran.told_once()


def test_a_signal_to_mpirun_saves_and_stops_in_order(desk: Desk, started: Running) -> None:
    started.signal(signal.SIGUSR1)  # mpirun passes it on to all
    ran = started.end()
    ran.check(143)
    training = desk.training("run")
    assert training.checkpoints()[-1] == f"step-{len(training.metrics):08d}"
    assert started.left() == []


def test_nothing_is_left_when_the_leader_is_killed(desk: Desk, started: Running) -> None:
    leader, waiting = commands(started)
    assert waiting.memory_info().rss < 100 * 2**20, "no torch"
    leader.kill()
    ran = started.end()
    assert ran.code != 0
    assert started.left() == []


def test_a_script_gets_the_ranks_of_mpirun_and_none_of_its_variables(desk: Desk) -> None:
    (desk.folder / "script.py").write_text(EXPECTED_RANKS)
    ran = desk.start("launch", "script.py", before=(*MPIRUN, "-n", "3"), **AS_ROOT).end()
    ran.check()
    told = sorted(json.loads(line.partition("told ")[2]) for line in ran.out.splitlines() if "told " in line)
    assert told == [["0", "3", 0], ["1", "3", 0], ["2", "3", 0]]
    ran = desk.start("launch", "--ranks", "2", "script.py", before=(*MPIRUN, "-n", "3"), **AS_ROOT).end()
    assert ran.code == EXIT_USAGE
    assert "--ranks 2, and mpirun started 3 processes on this node" in ran.told_once()


def test_a_session_takes_the_ranks_of_mpirun(desk: Desk) -> None:
    source = (Path(__file__).parents[3] / "examples" / "own_loop.py").read_text()
    source = source.replace('"steps": 200', '"steps": 20').replace('_steps": 50', '_steps": 10')
    (desk.folder / "own.py").write_text(source.replace("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    ran = desk.start_program([*MPIRUN, "-n", "2", sys.executable, "own.py"], **AS_ROOT).end()
    ran.check()
    assert ran.out.count("finished at step 20") == 1
    assert len(desk.training("runs/own-loop").metrics) == 20


def test_servers_and_the_workers_of_a_launch_train_as_one_process(desk: Desk, alone: list[float]) -> None:
    ran = desk.start("train", *SERVED, "--run-dir", "mpirun", before=(*MPIRUN, "-n", "2"), **AS_ROOT).end()
    ran.check()
    assert desk.training("mpirun").losses == pytest.approx(alone, abs=2e-6)
    tasks = [tensorflow("worker", index, worker="127.0.0.1:1 127.0.0.1:2")["TF_CONFIG"] for index in (0, 1)]
    both = [desk.start("train", *SERVED, "--run-dir", "tasks", TF_CONFIG=task) for task in tasks]
    for running in both:
        running.end().check()
    assert desk.training("tasks").losses == pytest.approx(alone, abs=2e-6)


@pytest.mark.root
def test_the_nodes_of_mpirun_have_a_supervisor_each_and_servers(desk: Desk, alone: list[float]) -> None:
    shell = desk.folder / "shell"
    shell.write_text(REMOTE_SHELL)
    shell.chmod(0o755)
    mpirun = (*MPIRUN, "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(shell), "-x", "MASTER_ADDR")
    exported = [word for name in ("PYTHONPATH", "XDG_STATE_HOME", "XDG_CACHE_HOME") for word in ("-x", name)]
    hosts = ("-H", "node-a:2,node-b:2", "-n", "4", "--wdir", str(desk.folder))
    command = [*mpirun, *exported, *hosts, *WANMA, "train"]
    ran = desk.start_program(
        [*command, *OPEN_LAYOUT, "--run-dir", "run"], MASTER_ADDR="127.0.0.1", **AS_ROOT
    ).end()
    ran.check()
    assert ran.out.count("finished at step 8") == 1
    assert "as node rank 0 of 2, with ranks 0-1 of 4" in ran.out
    assert "as node rank 1 of 2, with ranks 2-3 of 4" in ran.out
    job = (desk.folder / "run" / "job.toml").read_text()
    assert "dp_replicate = 4" in job
    assert (desk.folder / "run" / "logs" / "rank-3.log").exists()
    served = [*command, *SERVED, "--run-dir", "served"]
    desk.start_program(served, MASTER_ADDR="127.0.0.1", **AS_ROOT).end().check()
    assert desk.training("served").losses == pytest.approx(alone, abs=2e-6)
    assert len(list((desk.folder / "served" / "logs").glob("server-*.log"))) == 2
