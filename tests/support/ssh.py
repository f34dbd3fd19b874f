"""Real hosts on one machine: an sshd in each of several network namespaces, with private files.

    with ssh_hosts(tmp_path, 2) as site:
        site.section(...)          # keys of [cluster.ssh]

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import wanma
from support.command import share_compiled

PROGRAMS = ("ssh", "ssh-keygen", "ssh-keyscan", "ip", "unshare")
SSHD = "/usr/sbin/sshd"
BRIDGE = "wanmassh"
SUBNET = "10.79.7"
CALLER_ADDRESS = f"{SUBNET}.254"
"""Address of this machine at which the hosts reach it."""
NOWHERE = "02:00:00:00:00:fe"
"""Hardware address that no host has."""
PORT = 2222
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

    def section(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of `[cluster.ssh]`."""
        return {
            "hosts": [host.text for host in self.hosts],
            "python": sys.executable,
            "options": self.options,
            **keys,
        }

    def cut(self) -> None:
        """Let no packet of a host reach another host, while all reach this machine."""
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    entry = [other.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"]
                    subprocess.run(["ip", "-n", host.namespace, "neigh", "replace", *entry], check=True)

    def mend(self) -> None:
        """Undo `cut`."""
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    entry = [other.address, "dev", "eth0"]
                    subprocess.run(["ip", "-n", host.namespace, "neigh", "del", *entry], check=True)

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until no process of a run is left on any host."""
        deadline = time.monotonic() + seconds
        while left := [(host.name, process) for host in self.hosts for process in host.processes()]:
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
        f"Port {PORT}\nListenAddress {host.address}\nHostKey {host.folder}/host_key\n"
        f"AuthorizedKeysFile {site.folder}/key.pub\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
        f"PidFile none\n{configuration}\n"
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
