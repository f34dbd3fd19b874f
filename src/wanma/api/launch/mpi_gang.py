"""Gang of MPI ranks: `mpirun` connects processes that the supervisors have started as ranks.

    if join_gang(worker, settings):     # os.environ now is that of a process of mpirun

The first rank of node 0 starts mpirun, anew for each start of the ranks. For another node mpirun needs a
daemon there: its remote shell hands the command to the first rank of that node, signed, so no ssh between the
nodes is needed. mpirun then starts one process per rank beside it (`mpi_process`), whose environment the rank
takes over. The ranks stay children of their supervisors: logs, failures, restarts and metrics are as ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from wanma.api.launch import mpi_process
from wanma.api.launch.mpi_launcher import MpiLauncher, launcher_environment, mpirun_command
from wanma.elastic.workers.worker_output import read_last_output
from wanma.hardware.discovery.network_interfaces import INTERFACE_VARIABLES
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext

MAX_COMMAND_BYTES = 1 << 20
"""Longest order of a daemon, in bytes."""
_POLL_SECONDS = 0.2
_TCP_INCLUDE, _TCP_EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
"""Variables by which a user chooses the interface of MPI's TCP connections."""


@dataclass(frozen=True)
class MpiSettings:
    """Settings of a gang on one node, as the payload of its ranks holds them."""

    folder: str
    """Folder of mpirun."""
    major_version: int
    """Major version of Open MPI."""
    key: str
    """Key that signs commands between the nodes; empty on one node."""
    start_timeout_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def launcher(self) -> MpiLauncher:
        return MpiLauncher(self.folder, self.major_version)


def make_gang_key(secret: bytes, job_hash: str) -> str:
    """Return the key of a gang from the secret that its supervisors share."""
    return hmac.new(secret, f"wanma mpi {job_hash}".encode(), hashlib.sha256).hexdigest()


def join_gang(worker: WorkerContext, settings: MpiSettings) -> bool:
    """Replace the launcher's variables in this process's environment by those of the rank's MPI process.

    Returns:
        False if the run is asked to stop meanwhile.

    Raises:
        WanmaError: mpirun has ended before, or starts no process for the rank within the start timeout.
    """
    gang = _gang_name(worker)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        ranks_process = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ranks_process.bind(mpi_process.socket_name(gang, worker.rank))
        ranks_process.listen()
        ranks_process.settimeout(mpi_process.EXCHANGE_SECONDS)
        selector.register(ranks_process, selectors.EVENT_READ)
        starter = LauncherStart(worker, settings, gang) if worker.local_rank == 0 else None
        if starter is not None and worker.node_rank == 0:
            starter.start(mpirun_command(settings.launcher, worker.local_world_sizes or (worker.world_size,)))
        elif starter is not None:
            selector.register(stack.enter_context(starter.listen()), selectors.EVENT_READ)
        if starter is not None:
            stack.callback(starter.release)
        deadline = time.monotonic() + settings.start_timeout_seconds
        while not worker.supervisor_client.is_drain_requested():
            for key, _ in selector.select(_POLL_SECONDS):
                if key.fileobj is ranks_process:
                    if (content := _receive_environment(ranks_process)) is not None:
                        _take_over(content, worker)
                        return True
                elif starter is not None and starter.accept_command(key.fileobj):
                    selector.unregister(key.fileobj)
            if starter is not None:
                starter.check()
            if time.monotonic() > deadline:
                raise _timeout_error(worker, settings)
    return False


class LauncherStart:
    """Start of mpirun, or of its daemon, by the first rank of a node."""

    def __init__(self, worker: WorkerContext, settings: MpiSettings, gang: str) -> None:
        self._worker, self._settings, self._gang = worker, settings, gang
        self._log = RunDirectory(worker.run_directory).mpi_log(worker.node_rank)
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str]) -> None:
        """Start the command under a guard, in its own session: what ends a rank does not end it at once."""
        worker = self._worker
        firsts = [sum(worker.local_world_sizes[:node]) for node in range(len(worker.local_world_sizes))]
        interface = os.environ.get(INTERFACE_VARIABLES[0]) if len(firsts) > 1 else None
        environment = launcher_environment(os.environ, self._settings.launcher, interface) | {
            mpi_process.GANG_VARIABLE: self._gang,
            mpi_process.LEADER_VARIABLE: str(os.getpid()),
            mpi_process.ADDRESSES_VARIABLE: json.dumps([worker.rank_addresses[rank] for rank in firsts]),
            mpi_process.KEY_VARIABLE: self._settings.key,
        }
        program = [sys.executable, "-I", "-S", mpi_process.__file__]
        self._log.unlink(missing_ok=True)  # that of an earlier start
        with self._log.open("ab") as log:
            self._guard = subprocess.Popen(
                [*program, "guard", str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self) -> None:
        """Check that the launcher, if it was started, still runs.

        Raises:
            WanmaError: it has ended; with its last lines.
        """
        if self._guard is None or (code := self._guard.poll()) is None:
            return
        name = "mpirun" if self._worker.node_rank == 0 else "mpirun's daemon"
        last_lines = read_last_output(self._log)
        raise WanmaError(
            f"{name} ended with exit code {code} before it had started its processes on this node"
            + (f"; its last lines:\n{last_lines}" if last_lines else ", without output"),
            f"see {self._log}; its own test on this node: `{self._settings.folder}/mpirun -n 1 hostname`",
        )

    def listen(self) -> socket.socket:
        """Return the socket at which the command of the daemon arrives.

        Raises:
            WanmaError: the port is in use.
        """
        worker = self._worker
        address = mpi_process.split_address(worker.rank_addresses[worker.rank])
        try:
            listener = socket.create_server(
                address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            )
        except OSError as error:
            raise WanmaError(
                f"mpirun's daemon cannot be awaited at {worker.rank_addresses[worker.rank]}: {error.strerror}"
            ) from error
        listener.settimeout(mpi_process.EXCHANGE_SECONDS)
        return listener

    def accept_command(self, listener: Any) -> bool:
        """Accept one connection, and run its command if it is signed; return True if it was."""
        command = None
        # Anyone may connect: what arrives may be no JSON, or too deep for it.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(mpi_process.EXCHANGE_SECONDS)
                challenge = secrets.token_hex(16)
                connection.sendall(f"{challenge}\n".encode())
                order = json.loads(mpi_process.receive_line(connection, MAX_COMMAND_BYTES))
                signature = mpi_process.sign_command(self._settings.key, challenge, order["command"])
                if hmac.compare_digest(signature, order["signature"]):
                    connection.sendall(b"accepted\n")
                    command = order["command"]
        if command is not None:
            self.start(["/bin/sh", "-c", command])
        return command is not None

    def release(self) -> None:
        """Let the guard live on without this object."""
        if self._guard is not None:
            self._guard.returncode = 0  # Popen would warn of a process that still runs


def _gang_name(worker: WorkerContext) -> str:
    """Return the name by which the processes of this start of the ranks find each other on a node."""
    parts = [str(os.getuid()), str(worker.generation), *worker.rank_addresses]
    return "wanma-mpi-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _receive_environment(listener: socket.socket) -> dict[str, Any] | None:
    """Return the message of the rank's process of mpirun; None: the connection was of no use."""
    with contextlib.suppress(OSError, ValueError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(mpi_process.EXCHANGE_SECONDS)
            if mpi_process.peer_credentials(connection)[1] == os.getuid():
                content: dict[str, Any] = json.loads(connection.makefile("rb").readline())
                return content
    return None


def _take_over(content: dict[str, Any], worker: WorkerContext) -> None:
    """Take the launcher's variables, and the cores that it has bound its process to."""
    for name in list(os.environ):
        if name.startswith(mpi_process.RANK_PREFIXES):  # mpirun has passed the user's own on
            del os.environ[name]
    os.environ.update(content["variables"])
    interface = os.environ.get(INTERFACE_VARIABLES[0])
    if interface is not None and _TCP_EXCLUDE not in os.environ:
        os.environ.setdefault(_TCP_INCLUDE, interface)
    hosts = {mpi_process.split_address(address)[0] for address in worker.rank_addresses}
    if len(hosts) < len(worker.local_world_sizes):
        # Files of shared memory have the names of host and local rank, as if each host had one node.
        os.environ.setdefault("OMPI_MCA_btl", "tcp,self")
    cores = set(content["cores"])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > len(cores):
        # Ranks that wait would keep others from the cores.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _timeout_error(worker: WorkerContext, settings: MpiSettings) -> WanmaError:
    log = RunDirectory(worker.run_directory).mpi_log(worker.node_rank)
    last_lines = read_last_output(log)
    return WanmaError(
        f"mpirun has started no process for rank {worker.rank} on node {worker.node_rank} within "
        f"{settings.start_timeout_seconds:.0f} s"
        + (f"; its last lines:\n{last_lines}" if last_lines else ""),
        f"see {log.parent}/mpi-*.log on each node; raise cluster.start_timeout_seconds if it is slow",
    )
