"""Runs on a real Slurm: two nodes with a slurmd each, in network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from support.command import Training, assert_bitwise_equal
from support.frameworks import SCRIPTS
from support.paced_run import ENDLESS, FACTORY, Pace, last_start
from support.run_state import describe_processes, describe_run
from support.slurm import SlurmCluster, slurm_cluster
from support.wheels import make_wheel
from wanma.engines.slurm.batch_script import CANCEL_FILE
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report

# A fixture waits for the cluster of another file.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300, func_only=True)]

JOB = """
[model]
preset = "gpt-1m"
[data]
text = ["{text}"]
sequence_length = 32
[train]
steps = {steps}
global_batch = 4
[parallel]
dp_shard = 2
[checkpoint]
every_steps = 100000
[cluster]
engine = "slurm"
nodes = 2
[observe]
runs = "{folder}/runs"
console = "plain"
"""
STEPS = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(autouse=True)
def restore_cluster(cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    """Give each test both nodes, also after one that failed half-way or killed a node."""
    wait_until_idle(cluster)
    yield
    if cluster.daemons["slurmctld"].poll() is not None:
        cluster.start_controller()
        cluster.wait_for(cluster.has_controller, "the controller")
    for node in cluster.nodes:
        if cluster.daemons[node].poll() is not None:
            cluster.start_node(node)
    if jobs := queue(cluster):
        for files in (tmp_path / "runs").glob("*/engine"):
            (files / CANCEL_FILE).touch()  # no job is requeued
        cluster.run("scancel", "--quiet", *jobs)
        wait_until_idle(cluster)


class Login:
    """The user's terminal on the login node."""

    def __init__(self, cluster: SlurmCluster, folder: Path, name: str, steps: int) -> None:
        self.cluster, self.folder = cluster, folder
        self.job = folder / f"{name}.toml"
        self.job.write_text(JOB.format(text=__file__, steps=steps, folder=folder))
        self.run = RunDirectory(folder / "runs" / name)

    def wanma(self, *words: str, code: int = 0, seconds: float = 240) -> str:
        with self.describe_failure():
            done = subprocess.run(
                [sys.executable, "-m", "wanma", *words],
                cwd=self.folder,
                env=self.cluster.environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def train(self, *words: str, code: int = 0, seconds: float = 240) -> str:
        return self.wanma("train", str(self.job), *words, code=code, seconds=seconds)

    def ask(self, command: str, *words: str, code: int = 0) -> str:
        return self.wanma(command, str(self.run.path), *words, code=code)

    def start(self, command: str, *words: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command on the run, whose output goes to a file."""
        with output.open("w") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "wanma", command, str(self.run.path), *words],
                env=self.cluster.environment,
                stdout=file,
                stderr=file,
            )

    @property
    def steps(self) -> list[float]:
        return list(read_report(self.run).steps["step"]) if self.run.metrics.exists() else []

    def wait_for_step(self, step: int = 1, seconds: float = 120) -> None:
        with self.describe_failure():
            self.cluster.wait_for(lambda: self.steps and self.steps[-1] >= step, f"step {step}", seconds)

    def wait_for_state(self, *states: str, seconds: float = 120) -> None:
        with self.describe_failure():
            self.cluster.wait_for(
                lambda: self.ask("status").split(":")[1].split()[0].rstrip(",") in states,
                f"one of {states}",
                seconds,
            )

    @contextlib.contextmanager
    def describe_failure(self) -> Iterator[None]:
        """Add the state of the run to a failure, and that of the cluster to a time-out."""
        try:
            yield
        except AssertionError as error:
            problem, _, more = str(error).partition("\n")
        except subprocess.TimeoutExpired as error:
            parts = [part for part in (error.stdout, error.stderr) if part]
            output = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
            problem = f"not within {error.timeout:.0f} s: {error.cmd}"
            more = f"{output.decode(errors='replace')}\n{self.cluster.describe()}"
        else:
            return
        for node in self.cluster.nodes:
            more = f"processes on {node}:\n{describe_processes(self.cluster.processes(node))}\n{more}"
        raise AssertionError(f"{problem}\n{describe_run(self.run)}\n{more}")

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.engine_files.glob("slurm-*.log")))

    @property
    def jobs(self) -> list[str]:
        return json.loads(self.run.engine.read_text())["handle"]["jobs"]


class PacedLogin(Login):
    """Login with a run whose ranks wait, without computing, before a step that the test has not allowed."""

    def __init__(self, cluster: SlurmCluster, folder: Path, name: str, forwards: int = 4) -> None:
        super().__init__(cluster, folder, name, STEPS)
        self.pace = Pace(folder, forwards)

    def train(self, *words: str, code: int = 0, seconds: float = 240) -> str:
        return super().train("model.preset=", f"model.factory={FACTORY}", *words, code=code, seconds=seconds)

    def wait_for_nodes(self, nodes: int, starts: int = 1) -> None:
        """Wait until the run computes on so many nodes, after so many starts."""

        def is_reached() -> bool:
            current, is_there = last_start(self.run, nodes, starts)
            if 0 < current < nodes:  # another node joins the run after a step
                self.pace.allow_more(1)
            return is_there

        with self.describe_failure():
            self.cluster.wait_for(is_reached, f"start {starts}, on {nodes} nodes", 180)

    def wait_for_output(self, text: str) -> None:
        with self.describe_failure():
            self.cluster.wait_for(lambda: text in self.output, text)

    def finish(self) -> dict[str, torch.Tensor]:
        """Let the run go on to its end; return its weights and other state."""
        self.pace.allow()
        with self.describe_failure():
            self.cluster.wait_for(
                lambda: read_report(self.run).state == "finished", "the end of the run", 180
            )
        wait_until_idle(self.cluster)
        return Training(self.run.path).state(STEPS)


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """State of the paced run after its last step on two ranks of this machine."""
    login = PacedLogin(cluster, tmp_path_factory.mktemp("undisturbed"), "undisturbed", ENDLESS)
    login.train("--engine", "local", "--nodes", "1")
    return Training(login.run.path).state(STEPS)


def queue(cluster: SlurmCluster) -> list[str]:
    """Return the jobs that wait, run or end; a heterogeneous job, or an array, is one."""
    names = cluster.run("squeue", "--noheader", "--format=%i").split()
    return sorted({re.split("[+_]", name)[0] for name in names})


def wait_until_idle(cluster: SlurmCluster) -> None:
    cluster.wait_for(lambda: not queue(cluster), "an empty queue")
    cluster.wait_for(
        lambda: cluster.run("sinfo", "-pmain", "--noheader", "-N", "--format=%T").split() == ["idle", "idle"],
        "idle nodes",
    )
    for node in cluster.nodes:
        cluster.wait_for(lambda node=node: not supervisors(cluster, node), f"{node} without supervisors")


def ranks(cluster: SlurmCluster, node: str) -> list[int]:
    """Return the processes of ranks on a node."""
    found = []
    for process in cluster.processes(node):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().startswith("wanma rank"):
                found.append(process)
    return found


def supervisors(cluster: SlurmCluster, node: str) -> list[int]:
    """Return the processes of wanma on a node."""
    found = []
    for process in cluster.processes(node):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if any(word == b"wanma" or word.startswith(b"wanma.") for word in command.split(b"\0")):
            found.append(process)
    return found


def test_a_run_is_submitted_shown_and_equal_to_one_here(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "two", 6)
    plan = login.train("--dry-run")
    assert "#SBATCH --nodes=2" in plan
    assert "2 of 2 usable nodes are free now" in plan
    assert not login.run.path.exists()
    shown = login.train()
    assert "step 6/6" in shown
    assert "finished at step 6" in shown
    assert "finished" in login.ask("status")
    assert "two" in login.wanma("runs", "--runs", str(login.run.path.parent))
    assert "network interface of collectives: eth0" in login.ask("logs")
    assert "loss" in login.ask("logs", "--rank", "1")
    here = Login(cluster, tmp_path, "here", 6)
    here.train("--engine", "local", "--nodes", "1", "parallel.dp_shard=1")
    losses = [read_report(run).steps["loss"] for run in (login.run, here.run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    wait_until_idle(cluster)


def test_a_cancelled_run_saves_leaves_nothing_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "cancelled", ENDLESS)
    login.train("-d")
    login.wait_for_step(2)
    assert "is running already" in login.train(code=2)
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)
    report = read_report(login.run)
    assert report.state == "interrupted"
    stopped = report.checkpoints[-1]["step"]
    again = login.train(f"train.steps={stopped + 2}")
    assert f"resuming from step {stopped:,} of {stopped + 2:,}" in again
    assert "finished" in again
    wait_until_idle(cluster)


def test_servers_and_workers_train_as_one_process_and_save_when_slurm_signals_all_processes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    login = Login(cluster, tmp_path, "served", ENDLESS)
    alone = ("parallel.dp_shard=1", "train.optimizer=sgd", "train.schedule=constant")
    words = (*alone, "parallel.dp_replicate=2", "servers.count=2")
    login.train("-d", *words)
    login.wait_for_step(2)
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)
    stopped = read_report(login.run).checkpoints[-1]["step"]
    assert stopped == login.steps[-1]
    assert "ended by signal" not in login.output
    login.train(*words, f"train.steps={stopped + 2}")
    here = Login(cluster, tmp_path, "here", int(stopped) + 2)
    here.train("--engine", "local", "--nodes", "1", *alone)
    losses = [read_report(run).steps["loss"] for run in (login.run, here.run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    wait_until_idle(cluster)


@pytest.mark.full(always=True)
def test_a_run_stopped_by_its_time_limit_and_by_a_pre_emption_ends_with_equal_weights(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    login = PacedLogin(cluster, tmp_path, "chained")
    login.train("-d", "cluster.slurm.time=10", "cluster.slurm.signal_seconds=30")
    (job,) = login.jobs
    login.wait_for_nodes(2)
    minutes, _ = map(int, cluster.job(job)["RunTime"].split(":")[1:])
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 1}")
    login.wait_for_output("stopping after this step: SIGUSR1")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    login.pace.allow(5)
    login.wait_for_nodes(2, starts=2)
    assert cluster.job(job)["Restarts"] == "1"
    urgent = cluster.run("sbatch", "--parsable", "-purgent", "-N2", "--exclusive", "--wrap=true").strip()
    login.wait_for_output("stopping after this step: SIGTERM")
    login.pace.allow()
    cluster.wait_for(lambda: cluster.job(urgent)["JobState"] == "COMPLETED", "the urgent job")
    assert_bitwise_equal(login.finish(), undisturbed)
    assert cluster.job(job)["Restarts"] == "2"
    steps = [start["step"] for start in read_report(login.run).starts]
    assert 0 == steps[0] < steps[1] < steps[2]
    assert login.steps == list(range(1, STEPS + 1)), "none is lost or repeated"


SLOW_START = """
import os, time, wanma
class Slow(wanma.Callback):
    def __init__(self):
        if "SLURM_JOB_ID" in os.environ:
            with open({starts!r}, "a") as file:
                file.write("start\\n")
            while True:
                time.sleep(0.05)
"""


@pytest.mark.full(always=True)
def test_a_run_whose_start_takes_longer_than_its_time_limit_ends_with_one_error(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    login = Login(cluster, tmp_path, "slow", 2)
    starts = tmp_path / "starts"
    (tmp_path / "slow.py").write_text(SLOW_START.format(starts=str(starts)))
    words = ("--nodes", "1", "parallel.dp_shard=1", 'observe.callbacks=["slow:Slow"]')
    refused = login.train("--dry-run", *words, "cluster.slurm.time=1", code=2)
    assert "cluster.slurm.signal_seconds" in refused
    login.train("-d", *words, "cluster.slurm.time=1", "cluster.slurm.signal_seconds=30")
    (job,) = login.jobs
    signalled = 1  # the first signal comes from Slurm itself, which looks every 30 s: at the start, or later

    def is_failed() -> bool:
        nonlocal signalled
        started = starts.read_text().count("start") if starts.exists() else 0
        if started > signalled:
            signalled = started
            with contextlib.suppress(AssertionError):  # Slurm was faster, and the job has ended
                cluster.run("scancel", "--signal=USR1", job)
        return read_report(login.run).state == "failed"

    with login.describe_failure():
        cluster.wait_for(is_failed, "the end of the run", 240)
    login.wait_for_state("failed")
    assert cluster.job(job)["Restarts"] == "2"
    assert 1 <= login.output.count("before the start of the ranks: SIGUSR1") <= 3
    assert login.output.count("raise cluster.slurm.time") == 1
    wait_until_idle(cluster)


@pytest.mark.full(always=True)
def test_a_supervisor_that_is_killed_starts_again_in_its_job(
    cluster: SlurmCluster,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    request: pytest.FixtureRequest,
) -> None:
    login = PacedLogin(cluster, tmp_path, "killed")
    login.train("-d")
    login.wait_for_nodes(2)
    followed = tmp_path / "followed.log"
    follower = login.start("logs", "-f", "--rank", "1", output=followed)
    request.addfinalizer(follower.kill)
    shell = subprocess.run(
        [sys.executable, "-m", "wanma", "shell", str(login.run.path), "--node", "n2"],
        input="hostname; exit 5\n",
        env={**cluster.environment, "SHELL": "/bin/sh"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (shell.returncode, "n2" in shell.stdout.split()) == (5, True), shell.stdout + shell.stderr
    assert re.search(r"^slurm +usable$", login.wanma("engines"), re.MULTILINE)
    (supervisor,) = [
        process
        for process in supervisors(cluster, "n2")
        if b"-P\0-m\0wanma\0train\0" in Path(f"/proc/{process}/cmdline").read_bytes()
        and Path(f"/proc/{process}/comm").read_text() != "sh\n"
    ]
    os.kill(supervisor, signal.SIGKILL)
    login.wait_for_nodes(2, starts=2)
    assert_bitwise_equal(login.finish(), undisturbed)
    assert cluster.job(login.jobs[0])["Restarts"] == "0"
    assert login.steps == list(range(1, STEPS + 1)), "none is lost or repeated"
    assert follower.wait(60) == 0
    assert followed.read_text() == login.run.rank_log(1).read_text()


def test_a_run_that_waits_says_for_what(cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=bad fan")
    try:
        login = Login(cluster, tmp_path, "waiting", 2)
        login.train("-d")
        login.wait_for_state("pending")
        text = login.ask("explain")
        assert "waits for 2 nodes of the partition 'main'" in text
        assert "n2: bad fan" in text
        assert "with 1 node" in text
        assert "cancelled" in login.ask("cancel")
        login.wait_for_state("cancelled")
        refused = login.train("cluster.slurm.partition=mian", code=2)
        assert "no such partition. Did you mean 'main'?" in refused
        plan = login.train("--dry-run")
        assert "1 of the 2 nodes of 'main' are down or drained: 1 × bad fan" in " ".join(plan.split())
        assert "a run may have 2 nodes there" in login.train("--dry-run", "--nodes", "4", code=2)
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    wait_until_idle(cluster)


@pytest.mark.full(always=True)
def test_a_lost_node_is_replaced_through_slurm_and_its_job_ends_without_its_batch_script(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    login = PacedLogin(cluster, tmp_path, "elastic")
    login.train("-d", "--nodes", "1..2")
    login.wait_for_nodes(2)
    (job,) = login.jobs
    assert cluster.job(job)["BatchHost"] == "n1"
    cluster.kill_node("n1")
    login.wait_for_nodes(1, starts=2)
    cluster.wait_for(lambda: login.jobs != [job], "a job for another node")
    cluster.start_node("n1")
    log = login.run.engine_files / f"slurm-{login.jobs[-1]}.log"
    cluster.wait_for(lambda: log.exists() and "rendezvous of" in log.read_text(), "the other node")
    login.wait_for_nodes(2, starts=3)
    assert_close(login.finish(), undisturbed, rtol=1e-3, atol=1e-4)
    assert login.steps == list(range(1, STEPS + 1)), "one history"
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert login.ask("status").split(":")[1].split()[0] == "finished"


def test_a_node_that_is_cut_off_stops_computing_and_comes_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "cut", ENDLESS)
    login.train("-d", "--nodes", "1..2", "cluster.hang_timeout_seconds=20")
    login.wait_for_step(2)
    assert read_report(login.run).starts[-1]["nodes"] == 2
    assert ranks(cluster, "n2")
    cluster.cut_off("n2")
    try:
        cluster.wait_for(lambda: read_report(login.run).starts[-1]["nodes"] == 1, "a start on one node", 180)
        step = login.steps[-1]
        login.wait_for_step(int(step) + 3)
        steps = login.steps
        assert steps == sorted(set(steps)), "one history: the node that is cut off writes nothing into it"
        cluster.wait_for(lambda: not ranks(cluster, "n2"), "the end of the ranks on n2", 60)
    finally:
        cluster.cut_off("n2", is_cut=False)
    cluster.wait_for(lambda: read_report(login.run).starts[-1]["nodes"] == 2, "a start on two nodes", 180)
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)


def test_a_run_changes_its_number_of_nodes_on_request(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "resized", ENDLESS)
    login.train("-d", "--nodes", "1..2")
    login.wait_for_step(2)

    def wait_for_nodes(nodes: int) -> None:
        cluster.wait_for(
            lambda: read_report(login.run).starts[-1]["nodes"] == nodes, f"a start on {nodes} nodes", 180
        )

    def resize(nodes: int) -> None:
        login.wanma("resize", str(login.run.path), "--nodes", str(nodes))
        wait_for_nodes(nodes)

    wait_for_nodes(2)  # the second may join when the first trains already
    resize(1)  # a node of the first job
    assert cluster.run("sinfo", "-pmain", "--noheader", "-N", "--format=%T").split() == ["allocated", "idle"]
    assert not supervisors(cluster, "n2")
    resize(2)
    assert len(login.jobs) == 2
    resize(1)  # the job that has joined
    assert len(login.jobs) == 1
    steps = login.steps
    assert steps == sorted(set(steps)), "nodes that leave in order cost no step"
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)


def test_a_run_goes_on_in_a_further_job_where_requeue_is_forbidden(
    cluster: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    login = Login(cluster, tmp_path, "resubmitted", ENDLESS)
    login.train("-d")
    login.wait_for_step(2)

    (first,) = login.jobs
    shown, followed = tmp_path / "shown.log", tmp_path / "followed.log"
    attached = login.start("attach", output=shown)
    request.addfinalizer(attached.kill)
    follower = login.start("logs", "-f", output=followed)
    request.addfinalizer(follower.kill)
    cluster.wait_for(lambda: f"slurm {first}: running on n[1-2]" in shown.read_text(), "the console")

    # The controller goes and comes back: the run does not notice.
    cluster.kill_daemon("slurmctld")
    before = login.steps[-1]
    assert "the Slurm controller does not answer" in login.ask("status", code=1)
    login.wait_for_step(int(before) + 2)
    cluster.wait_for(lambda: "tried again" in shown.read_text(), "a warning")
    cluster.start_controller()
    cluster.wait_for(cluster.has_controller, "the controller")
    assert login.ask("status").split(":")[1].split()[0] == "running"

    cluster.run("scontrol", "update", f"JobId={first}", "Requeue=0")
    cluster.run("scancel", "--signal=USR1", first)  # as before the time limit
    cluster.wait_for(lambda: login.jobs != [first], "a further job")
    (second,) = login.jobs
    assert cluster.job(second)["Dependency"] in (f"afterany:{first}(unfulfilled)", "(null)")
    cluster.wait_for(lambda: len(read_report(login.run).starts) == 2, "the second start")
    stopped = read_report(login.run).checkpoints[-1]["step"]
    assert read_report(login.run).starts[-1]["step"] == stopped
    assert f"the run goes on in job {second}" in login.ask("logs")
    assert login.ask("status").split(":")[1].split()[0] == "running"
    login.wait_for_step(stopped + 1)

    # Neither is a submission from the nodes allowed: the end says how it goes on.
    cluster.run("scontrol", "update", f"JobId={second}", "Requeue=0")
    cluster.run("scontrol", "update", "PartitionName=main", f"AllocNodes={socket.gethostname()}")
    try:
        cluster.run("scancel", "--signal=USR1", second)
        login.wait_for_state("failed")
        assert login.jobs == [second]
        assert attached.wait(60) == 143
        assert f"slurm {second}: running on n[1-2]" in shown.read_text()
        assert follower.wait(60) == 0  # a controller that does not answer ended nothing
        text = followed.read_text()
        assert "its job can neither be requeued nor submitted from here" in text
        assert "the same `wanma train` command on a login node resumes it" in text
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "AllocNodes=ALL")
    stopped = read_report(login.run).checkpoints[-1]["step"]
    assert "finished" in login.train(f"train.steps={stopped + 2}")
    wait_until_idle(cluster)


def test_tasks_of_an_array_are_runs_with_names_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "array", 4)
    train = f"{sys.executable} -m wanma train {login.job} --engine local --nodes 1 parallel.dp_shard=1"

    def submit(*options: str, command: str) -> str:
        job = cluster.run(
            *("sbatch", "--parsable", "--array=1-2", "-N1", "--exclusive", *options),
            *(f"--output={tmp_path}/%x-%a.log", f"--wrap=srun {command}"),
        ).strip()
        cluster.wait_for(lambda: not cluster.run("squeue", "--noheader", f"--job={job}").strip(), "its end")
        return "".join((tmp_path / f"wrap-{task}.log").read_text() for task in (1, 2))

    submit(command=f"{train} observe.name=array-$SLURM_ARRAY_TASK_ID")
    for task in (1, 2):
        assert read_report(RunDirectory(tmp_path / "runs" / f"array-{task}")).state == "finished"
    both = submit(command=f"{train} train.steps=200")
    assert "each task of a job array needs a run of its own: observe.name=NAME-$SLURM_ARRAY_TASK_ID" in both
    assert read_report(login.run).state == "finished"
    wait_until_idle(cluster)


def test_a_run_of_fixed_size_is_requeued_when_a_node_is_lost(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "fixed", ENDLESS)
    login.train("-d", "checkpoint.every_steps=5")
    login.wait_for_step(8)
    cluster.kill_daemon("n2")  # what runs on the node goes on without its slurmd, until that starts again
    cluster.wait_for(lambda: cluster.job(login.jobs[0])["Restarts"] == "1", "a requeue")
    cluster.start_node("n2")
    cluster.wait_for(lambda: len(read_report(login.run).starts) >= 2, "the second start")
    assert read_report(login.run).starts[-1]["step"] >= 5
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)


COMPONENTS = """
[[cluster.slurm.components]]
nodes = 1
constraint = "slow"
[[cluster.slurm.components]]
nodes = 1
constraint = "fast"
"""


def test_nodes_of_several_kinds_are_one_heterogeneous_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    for node, feature in (("n1", "fast"), ("n2", "slow")):
        features = f"cpu,{feature}"
        cluster.run("scontrol", "update", f"NodeName={node}", f"AvailableFeatures={features}")
        cluster.run("scontrol", "update", f"NodeName={node}", f"ActiveFeatures={features}")
    login = Login(cluster, tmp_path, "mixed", ENDLESS)
    login.job.write_text(login.job.read_text() + COMPONENTS)
    login.train("-d", "parallel.dp_shard=1", "parallel.dp_replicate=2", "parallel.batch_shares=[1, 3]")
    login.wait_for_step(2)
    status = login.ask("status")
    assert status.split()[-1] == "n2,n1"
    plan = json.loads(login.run.plan.read_text())
    assert [(group["name"], group["count"]) for group in plan["cluster"]["nodes"]] == [
        ("slow", 1),
        ("fast", 1),
    ]
    assert plan["plan"]["batch_shares"] == [1, 3]
    starts = read_report(login.run).starts
    assert (starts[0]["world_size"], starts[0]["nodes"], starts[0]["host"]) == (2, 2, "n2")
    login.ask("cancel")
    login.wait_for_state("cancelled")
    wait_until_idle(cluster)
    assert read_report(login.run).state == "interrupted"


MODEL = """
import torch, helper
class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 8)
        self.head = torch.nn.Linear(8, 512)
    def forward(self, tokens):
        import helper
        print("model of", helper.AUTHOR, flush=True)
        return self.head(self.embedding(tokens))
"""


def test_code_that_changes_while_the_run_waits_changes_nothing(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "own", 2)
    (tmp_path / "mine.py").write_text(MODEL)
    helper = tmp_path / "helper.py"
    helper.write_text("AUTHOR = 'the submission'\n")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=later")
    try:
        login.train("-d", "model.preset=", "model.factory=mine:Tiny")
        login.wait_for_state("pending")
        helper.write_text("AUTHOR = 'an edit'\n")
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    login.wait_for_state("finished")
    logs = [login.run.rank_log(rank).read_text() for rank in (0, 1)]
    assert all("model of the submission" in log for log in logs)
    assert not any("model of an edit" in log for log in logs)
    wait_until_idle(cluster)


def test_a_shell_with_an_allocation_runs_the_job_in_it(
    cluster: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    login = Login(cluster, tmp_path, "allocated", 4)
    command = [sys.executable, "-m", "wanma", "train", str(login.job)]
    with login.describe_failure():
        shown = cluster.run("salloc", "--nodes=2", "--exclusive", *command, seconds=240)
    assert "finished at step 4" in shown
    assert read_report(login.run).starts[-1]["nodes"] == 2
    tasks = Login(cluster, tmp_path, "tasks", 4)
    srun = ("env", f"WANMA_SECRET={'s' * 32}", "srun", "--ntasks=4", "--ntasks-per-node=2")
    srun += (*command[:-1], str(tasks.job), "parallel.dp_shard=4")
    with tasks.describe_failure():
        shown = cluster.run("salloc", "--nodes=2", "--exclusive", *srun, seconds=240)
    assert shown.count("finished at step 4") == 1
    start = read_report(tasks.run).starts[-1]
    assert (start["world_size"], start["nodes"]) == (4, 2)
    wait_until_idle(cluster)
    endless = Login(cluster, tmp_path, "interrupted", ENDLESS)
    shell = subprocess.Popen(
        ["salloc", "--nodes=2", "--exclusive", *command[:-1], str(endless.job)],
        cwd=tmp_path,
        env=cluster.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    request.addfinalizer(shell.kill)
    endless.wait_for_step(2)
    (bash,) = [process for process in children(shell.pid) if process != shell.pid]
    os.kill(bash, signal.SIGINT)
    assert shell.wait(60) == 130
    assert read_report(endless.run).state == "interrupted"
    wait_until_idle(cluster)


def children(parent: int) -> list[int]:
    text = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in text.split()]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_ranks_of_mpi_are_one_gang_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "mpi", 1)
    (tmp_path / "script.py").write_bytes((SCRIPTS / "mpi_sum.py").read_bytes())
    options = ("--framework", "mpi", "--ranks", "2", "--nodes", "2", "--engine", "slurm")
    shown = login.wanma("launch", *options, "--dry-run", "script.py")
    assert "2 nodes of" in shown
    assert "2 ranks on each" in shown
    assert not login.run.path.exists()
    login.wanma("launch", *options, "--run-dir", str(login.run.path), "script.py")
    for rank in range(4):
        text = login.run.rank_log(rank).read_text()
        assert f"process {rank} of 4: sum 10\nlocal rank {rank % 2}, hidden []\n" in text
    wait_until_idle(cluster)


def test_a_run_has_the_environment_of_its_lock_file(cluster: SlurmCluster, tmp_path: Path) -> None:
    login = Login(cluster, tmp_path, "locked", 2)
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    (tmp_path / "requirements.lock").write_text("--no-index\n--find-links wheels\ntiny==1.0\n")
    words = ["cluster.environment=requirements.lock", "cluster.system_site_packages=true"]
    words += [f"cluster.slurm.folder={tmp_path}/shared"]
    plan = login.train(*words, "--dry-run")
    (python,) = set(re.findall(rf"{tmp_path}/shared/environments/[\w-]+/bin/python", plan))
    assert not (tmp_path / "shared").exists()
    shown = login.train(*words)
    assert "installing 1 package of requirements.lock on" in shown
    assert "finished at step 2" in shown
    assert json.loads(login.run.environment.read_text())["executable"] == python
    wait_until_idle(cluster)
