"""Real hosts on one machine: an sshd in each of several network namespaces, with private files.

    with ssh_hosts(tmp_path, 2) as site:
        run, _ = submit_job(site.job(steps=100_000))
        site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2)

Each host has its host name, its address, its home folder and its own sshd. It sees neither the folder of the
caller's project, nor the home folders of the others, nor their shared memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import wanma
from support.command import Training, share_compiled
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.sections.job import Job

PROGRAMS = ("ssh", "ssh-keygen", "ip", "ss", "unshare", "nsenter")
SSHD = "/usr/sbin/sshd"
BRIDGE = "wanmassh"
SUBNET = "10.79.7"
CALLER_ADDRESS = f"{SUBNET}.254"
"""Address of this machine at which the hosts reach it."""
NOWHERE = "02:00:00:00:00:fe"
"""Hardware address that no host has."""
PORT = 2222
RUN = "gpt"
"""Name of the run of `SshSite.job`."""
CORPUS = "the quick brown fox jumps over the lazy dog\n" * 400
READY_SECONDS = 30.0
LOCK = Path("/run/lock/wanma-test-ssh")


@dataclass
class SshHost:
    """One host."""

    number: int
    folder: Path
    """Folder of its files, with its home folder."""
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"gpu{self.number}"

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    @property
    def text(self) -> str:
        """Host as a job names it."""
        return f"root@{self.name}:{PORT}"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def namespace(self) -> str:
        return f"wanma-test-{os.getpid()}-ssh-{self.number}"

    @property
    def run_folder(self) -> Path:
        return self.home / ".wanma" / "runs" / RUN

    @property
    def training(self) -> Training:
        """Run directory there."""
        return Training(self.run_folder)

    @property
    def output(self) -> str:
        """Output of the supervisors there."""
        return "\n".join(path.read_text() for path in sorted(self.home.glob(".wanma/runs/*/engine/output-*")))

    @property
    def cable(self) -> str:
        """Interface of this machine by which the host is reached."""
        return f"wssh{self.number}"

    def processes(self) -> list[psutil.Process]:
        """Return the processes in its network namespace that are not of its sshd."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        found = []
        for word in done.stdout.split():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(word))
                if not process.name().startswith("sshd") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks there."""
        return [one for one in self.processes() if "rank" in one.name()]

    def left(self) -> list[object]:
        """Return what a run has left there: processes, ports that are listened to, shared memory."""
        words = ["ip", "netns", "exec", self.namespace, "ss", "--no-header", "--listening", "--tcp", "-n"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        ports = [line for line in done.stdout.splitlines() if f":{PORT} " not in line]
        assert self.daemon is not None
        memory = Path(f"/proc/{self.daemon.pid}/root/dev/shm")
        return [*self.processes(), *ports, *(memory.iterdir() if memory.exists() else ())]

    def enter(self, *command: str) -> None:
        """Run a command there."""
        assert self.daemon is not None
        target = f"--target={self.daemon.pid}"
        subprocess.run(["nsenter", target, "--mount", "--net", "--uts", *command], check=True)

    def kill(self) -> None:
        """Kill everything on it at once, as a loss of power does, and take it from the network."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", "eth0", "down"], check=True)
        self.stop_sshd()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def isolate(self) -> None:
        """Pull its cable: nothing comes through any more, and neither side is told."""
        subprocess.run(["ip", "link", "set", self.cable, "down"], check=True)

    def lose(self, address: str) -> None:
        """Let no packet of it reach an address."""
        entry = [address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"]
        subprocess.run(["ip", "-n", self.namespace, "neigh", "replace", *entry], check=True)

    def reconnect(self) -> None:
        """Plug its cable in again."""
        subprocess.run(["ip", "link", "set", self.cable, "up"], check=True)

    def stop_sshd(self) -> None:
        """End its sshd with all connections."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        for word in done.stdout.split():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if psutil.Process(int(word)).name().startswith("sshd"):
                    os.kill(int(word), signal.SIGKILL)
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()


@dataclass
class SshSite:
    """Hosts, and the folder of the caller's project."""

    folder: Path
    hosts: list[SshHost]
    project: Path
    """Folder that no host sees."""
    options: list[str] = field(default_factory=list)
    """Options of ssh by which the caller reaches them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of logins, beside those of every host."""
    commands: list[subprocess.Popen[str]] = field(default_factory=list)
    """Commands that the caller has started."""

    def section(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of `[cluster.ssh]`."""
        return {
            "hosts": [host.text for host in self.hosts],
            "python": sys.executable,
            "options": self.options,
            **keys,
        }

    def job(self, *, nodes: int | str = 2, steps: int = 4, **sections: dict[str, Any]) -> Job:
        """Return a small job on the hosts, with the keys of `sections` besides."""
        values: dict[str, Any] = {
            "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
            "data": {"text": ["corpus.txt"], "sequence_length": 16},
            "train": {"steps": steps, "global_batch": 4, "deterministic": True},
            "parallel": {"dp_shard": 2},
            "checkpoint": {"every_steps": 1000},
            "observe": {"name": RUN, "console": "plain", "log_every_steps": 1},
            "cluster": {"engine": "ssh", "nodes": nodes, "ssh": self.section()},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return to_job(values)

    def start(self, job: Job, **environment: str) -> subprocess.Popen[str]:
        """Start `wanma train` as a user does, in its foreground."""
        (self.project / "job.toml").write_text(job_to_toml(job))
        return self.call("train", "job.toml", **environment)

    def call(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command of wanma in the folder of the project."""
        command = subprocess.Popen(
            [sys.executable, "-m", "wanma", *words],
            cwd=self.project,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # What a shell has started in the background ignores it, and all that this starts.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.commands.append(command)
        return command

    def output(self) -> str:
        """Return the last output of the supervisors."""
        return "\n".join(f"{host.name}:\n{host.output[-3000:]}" for host in self.hosts)

    def wait_for(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.3)

    def cut(self) -> None:
        """Let no packet of a host reach another host, while all reach this machine."""
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    host.lose(other.address)

    def mend(self) -> None:
        """Undo `cut`."""
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    entry = [other.address, "dev", "eth0"]
                    subprocess.run(["ip", "-n", host.namespace, "neigh", "del", *entry], check=True)

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until nothing of a run is left on any host: no process, port or shared memory."""
        deadline = time.monotonic() + seconds
        while left := [(host.name, thing) for host in self.hosts for thing in host.left()]:
            assert time.monotonic() < deadline, f"left after {seconds} s: {left}"
            time.sleep(0.1)


@contextmanager
def ssh_hosts(
    folder: Path,
    count: int = 2,
    *,
    configuration: str = "",
    environment: Mapping[str, str] | None = None,
    has_wanma: bool = True,
) -> Iterator[SshSite]:
    """Hosts gpu1, gpu2, ...

    Args:
        folder: folder for their files.
        count: number of hosts.
        configuration: further lines of sshd_config.
        environment: environment variables of logins, beside those of every host.
        has_wanma: False: an interpreter there finds this wanma only where it is installed.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    missing += [] if Path(SSHD).exists() else ["sshd"]
    if missing:
        pytest.skip(
            f"hosts need {', '.join(missing)} (apt-get install openssh-server openssh-client iproute2)"
        )
    if os.getuid() != 0:
        pytest.skip("hosts need root for their network namespaces")
    Path("/run/sshd").mkdir(exist_ok=True)
    # Names and addresses are those of one site: that of another process is waited for.
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _running(folder, count, configuration, environment or {}, has_wanma=has_wanma)


def _running(
    folder: Path, count: int, configuration: str, environment: Mapping[str, str], *, has_wanma: bool
) -> Iterator[SshSite]:
    project = folder / "project"
    project.mkdir()
    (project / "corpus.txt").write_text(CORPUS)
    hosts = [SshHost(number, folder / f"host{number}") for number in range(1, count + 1)]
    _keygen(folder / "key")
    site = SshSite(folder, hosts, project, environment=environment)
    _make_network(hosts)
    try:
        for host in hosts:
            host.home.mkdir(parents=True)
            share_compiled(host.home / "cache")
            _keygen(host.folder / "host_key")
            start_sshd(host, site, configuration, has_wanma=has_wanma)
        known = folder / "known_hosts"
        known.write_text("".join(f"[{host.name}]:{PORT} {_public_key(host)}\n" for host in hosts))
        config = folder / "ssh_config"
        config.write_text(
            f"IdentityFile {folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile {known}\n"
            "GlobalKnownHostsFile /dev/null\n"
            "StrictHostKeyChecking yes\nHashKnownHosts no\n"
            + "".join(
                f"Host {host.name}\n  HostName {host.address}\n  HostKeyAlias [{host.name}]:{PORT}\n"
                for host in hosts
            )
        )
        site.options = ["-F", str(config)]
        yield site
    finally:
        for command in site.commands:
            command.kill()
        for host in hosts:
            host.stop_sshd()
            for process in host.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        _remove_network(hosts)


def start_sshd(host: SshHost, site: SshSite, configuration: str = "", *, has_wanma: bool = True) -> None:
    """Start the sshd of a host and wait until it listens."""
    path = host.folder / "sshd_config"
    environment = {
        "HOME": str(host.home),
        **({"PYTHONPATH": str(Path(wanma.__file__).parents[1])} if has_wanma else {}),
        "OMP_NUM_THREADS": "1",
        "WANMA_MEASURE_CPU": "0",
        "XDG_CACHE_HOME": str(host.home / "cache"),
        "XDG_STATE_HOME": str(host.home / "state"),
        **site.environment,
    }
    path.write_text(
        f"{configuration}\n"  # the first value of a key counts
        f"Port {PORT}\nListenAddress {host.address}\nHostKey {host.folder}/host_key\n"
        f"AuthorizedKeysFile {site.folder}/key.pub {host.home}/.ssh/authorized_keys\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
        "PidFile none\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in environment.items())}\n"
    )
    hidden = [site.project, *(other.folder for other in site.hosts if other is not host)]
    script = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; config=$1; shift\n'
    script += 'for folder in "$@"; do mkdir -p "$folder"; mount -t tmpfs tmpfs "$folder"; done\n'
    script += f'exec {SSHD} -D -e -f "$config"'
    with (host.folder / "sshd.log").open("wb") as log:
        host.daemon = subprocess.Popen(
            [
                *("ip", "netns", "exec", host.namespace, "unshare", "--uts", "--mount"),
                *("sh", "-c", script, host.name, str(path), *map(str, hidden)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + READY_SECONDS
    while "Server listening" not in (text := (host.folder / "sshd.log").read_text()):
        assert host.daemon.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def _public_key(host: SshHost) -> str:
    return " ".join((host.folder / "host_key.pub").read_text().split()[:2])


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _make_network(hosts: list[SshHost]) -> None:
    """Make a bridge with the caller's address, and a namespace for each host."""
    _remove_network(hosts)
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{CALLER_ADDRESS}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for host in hosts:
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("link", "set", host.cable, "master", BRIDGE, "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")


def _remove_network(hosts: list[SshHost]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", host.cable], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")
