"""A real Slurm cluster on one machine: a controller, and nodes in network namespaces of their own.

    with slurm_cluster(tmp_path, nodes=2) as cluster:
        cluster.run("squeue")

Each node has its host name, its address and its own slurmd; the controller has the machine's. They share the
file system, as on most clusters.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from wanma.elastic.workers.linux_processes import process_start_time

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
BRIDGE = "wanmaslurm"
SUBNET = "10.78.7"
CONTROLLER_PORT = 16927
READY_SECONDS = 60.0
LOCK = Path("/run/lock/wanma-test-slurm")


@dataclass
class SlurmCluster:
    """Running cluster; `environment` makes the commands of Slurm find it."""

    folder: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Process of each daemon: 'slurmctld', and each node's name."""

    def run(self, *command: str, seconds: float = 30) -> str:
        """Run a command on the login node, in the folder of the cluster; return its output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return fields of `scontrol show job`."""
        text = self.run("scontrol", "show", "job", job, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.describe()}"
            time.sleep(0.3)

    def describe(self) -> str:
        """Return the queue and the end of the logs, for a failed test."""
        parts = []
        for command in (("squeue", "--states=all"), ("sinfo", "-N", "-l")):
            try:
                parts.append(self.run(*command))
            except (AssertionError, subprocess.TimeoutExpired) as error:  # the controller is gone
                parts.append(str(error))
        parts += [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)

    def processes(self, node: str) -> list[int]:
        """Return the processes in a node's network namespace, its slurmd included."""
        done = subprocess.run(
            ["ip", "netns", "pids", namespace(node)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]

    def kill_node(self, node: str) -> None:
        """Kill everything on a node at once, as a loss of power does.

        All stop first: srun has a second process that cancels the step on all nodes if it outlives the first.
        Children die before their parents: the kernel wakes stopped ones that a parent's death orphans.
        """
        for number in (signal.SIGSTOP, signal.SIGKILL):
            processes = sorted(self.processes(node), key=lambda pid: (process_start_time(pid) or 0, pid))
            for process in processes if number == signal.SIGSTOP else reversed(processes):
                with suppress(ProcessLookupError):
                    os.kill(process, number)
        self.daemons[node].wait()

    def cut_off(self, node: str, *, is_cut: bool = True) -> None:
        """Unplug a node's network cable, or plug it in again; what runs on the node runs on."""
        cable = f"wslurm{self.nodes.index(node) + 1}"
        _ip("link", "set", cable, "down" if is_cut else "up")

    def start_controller(self) -> None:
        """Start the controller of the cluster."""
        self.daemons["slurmctld"] = subprocess.Popen(
            ["slurmctld", "-D", "-L", str(self.folder / "slurmctld.log")],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def has_controller(self) -> bool:
        """Return True if the controller answers."""
        done = subprocess.run(["scontrol", "ping"], env=self.environment, capture_output=True, check=False)
        return done.returncode == 0

    def kill_daemon(self, name: str) -> None:
        """Kill a daemon at once; the jobs that it has started go on."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        log = self.folder / f"slurmd-{node}.log"
        self.daemons[node] = subprocess.Popen(
            [
                *("ip", "netns", "exec", namespace(node), "unshare", "--uts"),
                *("sh", "-c", 'hostname "$0" && exec slurmd -D -N "$0" -L "$1"', node, str(log)),
            ],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def namespace(node: str) -> str:
    return f"wanma-test-{os.getpid()}-{node}"


@contextmanager
def slurm_cluster(
    folder: Path, nodes: int = 2, *, partitions: str = "", settings: str = ""
) -> Iterator[SlurmCluster]:
    """A cluster with nodes n1, n2, ... of two cores, in partitions `main`, and `urgent`, which pre-empts it.

    Args:
        folder: folder for its files.
        nodes: number of nodes.
        partitions: further lines of slurm.conf.
        settings: the same.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"a Slurm cluster needs {', '.join(missing)} (apt-get install slurm-wlm munge iproute2)")
    if os.getuid() != 0:
        pytest.skip("a Slurm cluster needs root for its network namespaces")
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    folder = Path(folder) / "slurm"
    for name in ("state", "munge", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "slurm.conf").write_text(_configuration(folder, names, partitions, settings))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    for name in [
        name for name in environment if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
    ]:
        del environment[name]
    cluster = SlurmCluster(folder, names, environment)
    # Names and addresses are those of one cluster: that of another process is waited for.
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _running(cluster)


def _running(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    names, folder = cluster.nodes, cluster.folder
    _make_network(names)
    try:
        cluster.daemons["munged"] = _start_munge(folder / "munge")
        cluster.start_controller()
        for name in names:
            cluster.start_node(name)
        cluster.wait_for(lambda: _idle_nodes(cluster) == len(names), "idle nodes", READY_SECONDS)
        yield cluster
    finally:
        for name in names:
            for process in cluster.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for daemon in cluster.daemons.values():
            daemon.kill()
            daemon.wait()
        _remove_network(names)


def _idle_nodes(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "--partition=main", "--noheader", "-N", "--format=%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split().count("idle") if done.returncode == 0 else 0


def _configuration(folder: Path, names: tuple[str, ...], partitions: str, settings: str) -> str:
    lines = [
        "ClusterName=wanma",
        f"SlurmctldHost={socket.gethostname()}({SUBNET}.254)",
        f"SlurmctldPort={CONTROLLER_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        # A requeued job waits for this time, in seconds, until its old credentials have expired.
        f"AuthInfo=socket={folder}/munge/socket,cred_expire=10",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0",
        "MpiDefault=none",
        "ReturnToService=2",
        "SwitchType=switch/none",
        "RebootProgram=/bin/true",
        "KillWait=10",
        "SlurmdTimeout=10",
        "MessageTimeout=10",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        settings,
    ]
    for number, name in enumerate(names, 1):
        lines.append(
            f"NodeName={name} NodeAddr={SUBNET}.{number} CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 "
            "ThreadsPerCore=1 RealMemory=2000 Feature=cpu State=UNKNOWN"
        )
    lines.append(
        f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP "
        "OverSubscribe=NO PriorityTier=1 GraceTime=30"
    )
    lines.append(f"PartitionName=urgent Nodes={','.join(names)} MaxTime=10 State=UP PriorityTier=10")
    return "\n".join([*lines, partitions]) + "\n"


def _start_munge(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o711)
    process = subprocess.Popen(
        [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/socket"),
            *(f"--{name}-file={folder}/{name}" for name in ("pid", "log", "seed")),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while not (folder / "socket").exists():
        assert process.poll() is None, "munged did not start"
        assert time.monotonic() < deadline, "munged did not start"
        time.sleep(0.05)
    return process


def _make_network(names: tuple[str, ...]) -> None:
    """Make a bridge with the controller's address, and a namespace for each node, with their names known."""
    _remove_network(names)
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    hosts = ["127.0.0.1 localhost", f"{SUBNET}.254 {socket.gethostname()}"]
    hosts += [f"{SUBNET}.{number} {name}" for number, name in enumerate(names, 1)]
    for number, name in enumerate(names, 1):
        space, cable = namespace(name), f"wslurm{number}"
        folder = Path("/etc/netns") / space  # `ip netns exec` lays these files over those of /etc
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", BRIDGE, "up")
        _ip("-n", space, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _remove_network(names: tuple[str, ...]) -> None:
    for number, name in enumerate(names, 1):
        # A cable goes with its namespace, but not at once.
        subprocess.run(["ip", "link", "del", f"wslurm{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", namespace(name)], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns") / namespace(name), ignore_errors=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")
