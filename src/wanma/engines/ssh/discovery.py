"""Discovery of the engine's hosts: their versions, hardware, clock and disk, as the planner's cluster."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from wanma.engines.engine import EngineCluster
from wanma.engines.environment.archive import EnvironmentArchive
from wanma.engines.hosts.connections import Host, HostError, Reply, join_errors
from wanma.engines.ssh import host_probe
from wanma.engines.ssh.connection import SshConnections
from wanma.engines.ssh.environments import install_environments
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import WanmaError
from wanma.observe.units import bytes_text

MAX_SKEW_SECONDS = 5.0
"""Difference of two clocks, in seconds, from which times in records mislead."""
LOW_DISK_BYTES = 1 << 30
PROBE_SECONDS = 60.0
"""Deadline of the facts of a host, in seconds: its GPU driver may be loaded on demand."""


@dataclass(frozen=True)
class HostFacts:
    """Facts of a host."""

    host: Host
    values: Mapping[str, Any]
    """Reply of `host_probe`."""
    skew_seconds: float
    """Offset of its clock from this one's, as far as it is certain."""
    python: str = ""
    """Interpreter of the run's environment there; empty: that of the connections."""

    @property
    def node(self) -> NodeGroup:
        """Hardware of the host."""
        (group,) = Cluster.from_json(self.values["cluster"]).nodes
        return group


@dataclass(frozen=True)
class ProbedHosts:
    """Hosts that a run can use, and the reasons why others are left out."""

    usable: tuple[HostFacts, ...]
    failures: tuple[HostError, ...]
    notes: tuple[str, ...]
    """Warnings for the user: clocks and disks."""


def probe_hosts(
    connections: SshConnections,
    hosts: Sequence[Host],
    folder: str,
    archive: EnvironmentArchive | None = None,
    data: Mapping[str, str] | None = None,
) -> ProbedHosts:
    """Ask all hosts for their facts; those that lack the environment of the run make it.

    Args:
        connections: connections to the hosts.
        hosts: the hosts, in order.
        folder: `cluster.ssh.folder`.
        archive: the environment; None: the interpreter has wanma and torch.
        data: see `Engine.discover`.
    """
    data = data or {}
    if archive is None:
        return _probe(connections, dict.fromkeys(hosts, ""), folder, data)
    bases, failures = _check_interpreters(connections, hosts, folder)
    pythons, failed = install_environments(connections, bases, archive, folder)
    probed = _probe(connections, pythons, folder, data)
    order = {host: number for number, host in enumerate(hosts)}
    failures = sorted([*failures, *failed, *probed.failures], key=lambda error: order[error.host])
    return replace(probed, failures=tuple(failures))


def _check_interpreters(
    connections: SshConnections, hosts: Sequence[Host], folder: str
) -> tuple[list[Host], list[HostError]]:
    """Return the hosts whose interpreter can make an environment for this wanma, and the failures."""
    request = {"folder": folder, "has_hardware": False}
    answers, failures = connections.ask_all(
        {host: partial(connections.ask, host, host_probe, request, seconds=PROBE_SECONDS) for host in hosts}
    )
    problems = {host: _interpreter_problem(host, answer.value) for host, answer in answers.items()}
    failures += [problem for problem in problems.values() if problem is not None]
    return [host for host, problem in problems.items() if problem is None], failures


def _probe(
    connections: SshConnections, pythons: Mapping[Host, str], folder: str, data: Mapping[str, str]
) -> ProbedHosts:
    """Ask hosts for their facts, each by the interpreter of the run; empty: that of the connections."""
    hosts = list(pythons)
    found: dict[Host, HostFacts] = {}

    def ask(host: Host) -> Reply:
        began, clock = time.monotonic(), time.time()
        request = {"folder": folder, "has_hardware": True, "data": dict(data)}
        reply = connections.ask(host, host_probe, request, seconds=PROBE_SECONDS, python=pythons[host])
        round_trip = time.monotonic() - began
        skew = reply.value["time"] - clock - round_trip / 2
        certain = max(0.0, abs(skew) - round_trip / 2)
        found[host] = HostFacts(host, reply.value, certain if skew > 0 else -certain, pythons[host])
        return reply

    answers, failures = connections.ask_all({host: partial(ask, host) for host in hosts})
    usable, notes = [], []
    for host in answers:
        facts = found[host]
        if (problem := _version_problem(facts)) is not None:
            failures.append(problem)
            continue
        usable.append(facts)
        if abs(facts.skew_seconds) > MAX_SKEW_SECONDS:
            way = "ahead of" if facts.skew_seconds > 0 else "behind"
            notes.append(
                f"the clock of {host.text} is {abs(facts.skew_seconds):.0f} s {way} this machine's: times in "
                "records mislead; synchronise it, e.g. `timedatectl set-ntp true`"
            )
        if facts.values["free_bytes"] < LOW_DISK_BYTES:
            notes.append(
                f"{host.text}: {bytes_text(facts.values['free_bytes'])} are free for "
                f"{facts.values['folder']} (cluster.ssh.folder)"
            )
    notes += _place_notes(usable, data)
    order = {host: number for number, host in enumerate(hosts)}
    failures.sort(key=lambda error: order[error.host])
    usable.sort(key=lambda facts: -len(facts.values["data"]))  # else in the user's order
    return ProbedHosts(tuple(usable), tuple(failures), tuple(notes))


def _place_notes(usable: Sequence[HostFacts], data: Mapping[str, str]) -> list[str]:
    """Return a note on each entry of the data that some host lacks; remote ones may be cached nowhere."""
    notes = []
    for name, path in data.items():
        lacking = [facts.host.text for facts in usable if name not in facts.values["data"]]
        is_remote = name != path
        if lacking and len(lacking) < len(usable):
            place = " in the cache" if is_remote else ""
            notes.append(f"{', '.join(lacking)} lack {name}{place}: hosts that have the data are taken first")
        elif lacking and not is_remote:
            notes.append(f"no host has {name}, which the job's data names")
    return notes


def make_engine_cluster(probed: ProbedHosts, nodes: int) -> EngineCluster:
    """Return the usable hosts as the planner's cluster, one group for each kind, hosts in order.

    Args:
        probed: the hosts.
        nodes: nodes that the run wants; fewer usable ones are an error.

    Raises:
        WanmaError: too few hosts are usable; it names each failure.
    """
    require_hosts(probed, nodes)
    groups: dict[tuple[object, ...], list[HostFacts]] = {}
    for facts in probed.usable:
        groups.setdefault(_kind(facts.node), []).append(facts)
    kinds = [
        replace(
            members[0].node,
            count=len(members),
            hosts=tuple(member.host.text for member in members),
        )
        for members in groups.values()
    ]
    notes = [*probed.notes]
    notes += [f"left out: {error.message}" for error in probed.failures]
    listed = len(probed.usable) + len(probed.failures)
    return EngineCluster(Cluster(tuple(kinds)), len(probed.usable), listed, tuple(notes))


def require_hosts(probed: ProbedHosts, nodes: int) -> None:
    """Refuse a run for which too few hosts are usable.

    Raises:
        WanmaError: it names each failure.
    """
    if len(probed.usable) >= nodes:
        return
    if not probed.failures:
        raise WanmaError(
            f"cluster.nodes = {nodes}, and the engine 'ssh' has {len(probed.usable)} hosts",
            "list more in cluster.ssh.hosts, or lower the number of nodes",
        )
    raise join_errors(
        list(probed.failures), f"{len(probed.usable)} hosts are usable, and the run needs {nodes}:"
    )


def _kind(node: NodeGroup) -> tuple[object, ...]:
    """Return a value that equal hosts share; measured rates and free memory differ a little between them."""
    return tuple(device.name for device in node.devices), node.cores, round(node.memory_bytes / 2**30)


def _version_problem(facts: HostFacts) -> HostError | None:
    """Return the error of a host whose Python, wanma or torch is missing or another than here."""
    host, values = facts.host, facts.values
    text, executable = host.text, values["executable"]
    if (problem := _interpreter_problem(host, values)) is not None:
        return problem
    for name in ("wanma", "torch"):
        there, own = values["versions"][name], _own_version(name)
        if there is None:
            package = f"{name}=={own.partition('+')[0]}" if own else name
            return HostError(
                host,
                f"{text}: {name} is not installed for {executable}",
                f"add {package} to the lock file, cluster.environment"
                if facts.python
                else f"`ssh {text} {executable} -m pip install {package}`, or set cluster.ssh.python or "
                "cluster.environment",
            )
        if own is not None and there.partition("+")[0] != own.partition("+")[0]:
            return HostError(
                host,
                f"{text}: {name} {there} is installed for {executable}, and {name} {own} here",
                f"lock {name}=={own.partition('+')[0]}, or install {name} {there.partition('+')[0]} here"
                if facts.python
                else "install the same version on all machines",
            )
    if values["cluster"] is None:
        return HostError(
            host,
            f"{text}: its hardware cannot be read: {values['discovery_problem']}",
            f"see `ssh {text} {executable} -m wanma doctor`",
        )
    return None


def _interpreter_problem(host: Host, values: Mapping[str, Any]) -> HostError | None:
    """Return the error of a host whose interpreter has another version than this one."""
    here = platform.python_version()
    if values["python"].split(".")[:2] == here.split(".")[:2]:
        return None
    return HostError(
        host,
        f"{host.text}: {values['executable']} is Python {values['python']}, and this is {here}",
        "set cluster.ssh.python to an interpreter of the same version",
    )


def _own_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
