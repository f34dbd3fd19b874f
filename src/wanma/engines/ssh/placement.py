"""Placement of supervisors on hosts: files, code, rendezvous address, start."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.engines.code.cache import unpack_program
from wanma.engines.code.snapshot import CodeSnapshot
from wanma.engines.engine import PLACED_BY_VARIABLE, Submission
from wanma.engines.hosts import host_files
from wanma.engines.hosts.connections import Host, HostError, Reply, join_errors
from wanma.engines.ssh import host_network, host_supervision
from wanma.engines.ssh.connection import HeldCall, SshConnections
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory

RENDEZVOUS_PORTS = (29500, 29599)
"""First and last port that is tried; then any free one."""
LISTEN_SECONDS = 60.0
TRANSFER_SECONDS = 1800.0
"""Deadline of the transfer of the code to a host, in seconds."""
START_SECONDS = 30.0
SIGN_OF_LIFE_SECONDS = 10.0


@dataclass(frozen=True)
class PlacedNode:
    """Host of a run, with the place of its files."""

    host: Host
    hostname: str
    """Name that the host gives itself."""
    rank: int
    """Number of the host in the run, which names its files; the node rank of a run of fixed size."""
    folder: str
    """Run directory there."""
    code: str
    """Folder of unpacked code there."""
    is_leaving: bool = False
    """True if the host was asked to leave the run, or has left it."""
    python: str = ""
    """Interpreter of the run's environment there; empty: that of the connections."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host": [self.host.text, self.host.destination, self.host.port]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlacedNode:
        values = {
            name: value[name] for name in ("hostname", "rank", "folder", "code", "is_leaving", "python")
        }
        return cls(Host(*value["host"]), **values)


class HeldRun:
    """Calls that hold the supervisors of a run: they end when this process does.

    Args:
        calls: one for each host.
    """

    def __init__(self, calls: Sequence[HeldCall]) -> None:
        self._calls = list(calls)
        self._is_closed = threading.Event()
        threading.Thread(target=self._say_alive, name="ssh-sign-of-life", daemon=True).start()

    def _say_alive(self) -> None:
        while not self._is_closed.wait(SIGN_OF_LIFE_SECONDS):
            for call in self._calls:
                call.send(b"alive\n")

    def close(self) -> None:
        """End what still runs, in order: each host's supervisor gets a SIGTERM."""
        self._is_closed.set()
        for call in self._calls:
            call.close()


def prepare_hosts(
    connections: SshConnections,
    nodes: Sequence[PlacedNode],
    submission: Submission,
    snapshot: CodeSnapshot,
) -> bool:
    """Write the run's files on each host, and send the code to those that lack it.

    Returns:
        True if all hosts have one run directory in common.

    Raises:
        WanmaError: a host cannot be written to.
    """
    run = RunDirectory(submission.run_directory)
    texts = {path.name: path.read_text(encoding="utf-8") for path in run.engine_files.glob("*.toml")}
    token = secrets.token_hex(8)

    def prepare(node: PlacedNode, *, makes_token: bool) -> Reply:
        request = {
            "operation": "prepare",
            "folder": node.folder,
            "files": texts,
            "origin": [str(run.path), socket.gethostname()],
            "token": token,
            "makes_token": makes_token,
            "code": f"{node.code}/{snapshot.digest}",
        }
        reply = connections.ask(node.host, host_files, request)
        if not reply.value["has_code"]:
            _send_code(connections, node, snapshot)
        return reply

    first, *others = nodes
    answers, failures = connections.ask_all({first.host: partial(prepare, first, makes_token=True)})
    if not failures:
        more, failures = connections.ask_all(
            {node.host: partial(prepare, node, makes_token=False) for node in others}
        )
        answers |= more
    if failures:
        raise join_errors(failures, "hosts of the run cannot be prepared:")
    return all(answer.value["sees_token"] for answer in answers.values())


def _send_code(connections: SshConnections, node: PlacedNode, snapshot: CodeSnapshot) -> None:
    request = {
        "operation": "unpack",
        "folder": node.code,
        "name": snapshot.path.name,
        "bytes": snapshot.path.stat().st_size,
        "unpacker": unpack_program(),
    }
    connections.ask(node.host, host_files, request, snapshot.path, TRANSFER_SECONDS)


def remove_run(connections: SshConnections, nodes: Sequence[PlacedNode], run_directory: Path) -> None:
    """Remove the files of an ended run from its hosts.

    Raises:
        WanmaError: a host does not answer, or its files are of another run.
    """
    request = {"operation": "remove", "origin": [str(run_directory), socket.gethostname()]}
    requests = {node.host: {**request, "folder": node.folder} for node in nodes}
    _, failures = connections.ask_each(host_files, requests)
    if failures:
        raise join_errors(failures, "hosts keep the files of the run:")


def find_rendezvous(
    connections: SshConnections, nodes: Sequence[PlacedNode], addresses: Sequence[str]
) -> str:
    """Return an address of the first host, with a free port, that all others reach.

    Args:
        connections: connections to the hosts.
        nodes: hosts of the run.
        addresses: addresses of the first host, best first.

    Raises:
        WanmaError: there is none; it names the addresses and what happened there.
    """
    first, *others = nodes
    token = secrets.token_hex(16)
    request = {"operation": "listen", "token": token, "seconds": LISTEN_SECONDS, "ports": RENDEZVOUS_PORTS}
    listener = connections.hold(first.host, host_network, request)
    try:
        port = listener.first["port"]
        question = {"operation": "connect", "token": token, "port": port, "addresses": list(addresses)}
        answers, failures = connections.ask_all(
            {
                node.host: partial(connections.ask, node.host, host_network, question, seconds=LISTEN_SECONDS)
                for node in others
            }
        )
    finally:
        listener.close()
        listener.wait(5)
        listener.kill()
    if failures:
        raise join_errors(failures, "hosts of the run do not answer:")
    for address in addresses:
        if all(address in answer.value["reached"] for answer in answers.values()):
            return f"{address}:{port}"
    tried = []
    for host, answer in answers.items():
        if not answer.value["reached"]:
            causes = ", ".join(f"{name} ({cause})" for name, cause in answer.value["failures"].items())
            tried.append(f"{host.text} tried {causes}")
    raise WanmaError(
        f"no address of {first.host.text} is reached by all other hosts at port {port}: "
        f"{'; '.join(tried) or 'each host reaches another one'}",
        "open the port in the firewall, put a host that all reach first in cluster.ssh.hosts, or name the "
        "interface with cluster.network_interface",
    )


def start_supervisors(
    connections: SshConnections,
    nodes: Sequence[PlacedNode],
    submission: Submission,
    digest: str,
    rendezvous: str | None,
    *,
    joins: bool = False,
) -> HeldRun | None:
    """Start the supervisor of each host; on failure those that were started are ended.

    Args:
        connections: connections to the hosts.
        nodes: hosts.
        submission: the run.
        digest: digest of its code.
        rendezvous: rendezvous address; None: the run has one node.
        joins: the hosts join a run that is in progress.

    Returns:
        the calls that hold the run, if this process is to hold it.

    Raises:
        WanmaError: a host could not start it; it names each.
    """
    held: dict[Host, HeldCall] = {}

    def start(node: PlacedNode) -> Reply:
        request = start_request(node, submission, digest, rendezvous, joins=joins)
        if submission.is_held:
            held[node.host] = connections.hold(node.host, host_supervision, request, START_SECONDS)
            return Reply(held[node.host].first)
        return connections.ask(node.host, host_supervision, request, seconds=START_SECONDS)

    _, failures = connections.ask_all({node.host: partial(start, node) for node in nodes})
    if not failures:
        return HeldRun(list(held.values())) if held else None
    failed = {error.host for error in failures}
    started = [node for node in nodes if node.host not in failed]
    stop_supervisors(connections, started, is_immediate=True)
    for call in held.values():
        call.close()
    raise join_errors(failures, "the run could not be started; nothing of it is left running:")


def start_request(
    node: PlacedNode, submission: Submission, digest: str, rendezvous: str | None, *, joins: bool
) -> dict[str, Any]:
    """Return the request that starts a host's supervisor."""
    return {
        "operation": "start",
        "folder": node.folder,
        "rank": node.rank,
        "python": node.python,
        "command": ["-m", "wanma", *command_arguments(node, submission, rendezvous, joins=joins)],
        "environment": {
            **submission.environment,
            PLACED_BY_VARIABLE: "ssh",
            SECRET_VARIABLE: submission.secret,
        },
        "code": {"archive": f"{node.code}/{digest}.tar", "cache": node.code},
        "unpacker": unpack_program(),
        "grace_seconds": submission.settings.grace_seconds,
        "is_held": submission.is_held,
    }


def command_arguments(
    node: PlacedNode, submission: Submission, rendezvous: str | None, *, joins: bool
) -> list[str]:
    """Return the arguments of wanma on a host.

    Paths in the run directory are those of the host. Those in the working directory are relative, as unpacked
    code is the working directory there.
    """
    own, code = str(submission.run_directory), f"{submission.folder}/"
    action, *words = [
        node.folder + word.removeprefix(own)
        if word == own or word.startswith(f"{own}/")
        else word.removeprefix(code)
        for word in submission.command
    ]
    options = [] if rendezvous is None else ["--rendezvous", rendezvous]
    if options and not joins:
        options += ["--node-rank", str(node.rank)]
    return [action, *options, *words]  # what follows a script is the script's own


def stop_supervisors(
    connections: SshConnections, nodes: Sequence[PlacedNode], *, is_immediate: bool
) -> list[HostError]:
    """Ask the supervisors to end in order, or end them at once; return the hosts that do not answer."""
    request = {"operation": "stop", "is_immediate": is_immediate}
    requests = {node.host: {**request, "folder": node.folder, "rank": node.rank} for node in nodes}
    return connections.ask_each(host_supervision, requests)[1]


def let_leave(connections: SshConnections, nodes: Sequence[PlacedNode]) -> None:
    """Ask the supervisors of hosts to leave an elastic run in order, which goes on without them.

    Raises:
        WanmaError: a host does not answer.
    """
    requests = {node.host: {"operation": "leave", "folder": node.folder, "rank": node.rank} for node in nodes}
    _, failures = connections.ask_each(host_supervision, requests)
    if failures:
        raise join_errors(failures, "hosts that are to leave the run do not answer:")


def candidate_addresses(facts: Mapping[str, Any], host: Host, interface: str | None) -> list[str]:
    """Return the addresses of a host at which others may reach it, best first.

    Args:
        facts: its facts.
        host: the host.
        interface: `cluster.network_interface`; if set, only its addresses.

    Raises:
        WanmaError: the host has no such interface.
    """
    named = [(name, address) for name, address in facts["addresses"]]
    if interface is not None:
        chosen = [address for name, address in named if name == interface]
        if not chosen:
            names = ", ".join(dict.fromkeys(name for name, _ in named))
            raise WanmaError(
                f"cluster.network_interface = '{interface}': {host.text} has no such interface with an "
                "IPv4 address",
                f"interfaces there: {names}",
            )
        return chosen
    addresses = [facts["reached_at"], *(address for _, address in named)]
    usable = [address for address in addresses if address and ":" not in address]
    return list(dict.fromkeys(sorted(usable, key=lambda address: address.startswith("127."))))
