"""Program of the processes that connect MPI ranks: guard of a launcher, remote shell, and process of a rank.

    python mpi_process.py guard PID COMMAND...      mpirun or a daemon of it, while process PID lives
    python mpi_process.py remote HOST COMMAND...    in place of ssh: start of a daemon on another node
    python mpi_process.py rank                      what mpirun starts for each rank

wanma's supervisors start the ranks, and mpirun connects them: the process that it starts for a rank hands its
environment over to the rank, and lives as long. The program imports the standard library alone; `mpi_gang`
sets the variables that it reads.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from types import FrameType

RANK_PREFIXES = ("OMPI_", "ORTE_", "PMIX_", "PRTE_", "PMI_")
"""Prefixes of the variables that a launcher sets for each process."""
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Variables of the rank, of which a launcher sets one."""
GANG_VARIABLE = "WANMA_MPI_GANG"
"""Variable with the abstract name of the Unix sockets of this start's ranks, without the rank."""
LEADER_VARIABLE = "WANMA_MPI_LEADER"
"""Variable with the process number of this node's first rank."""
ADDRESSES_VARIABLE = "WANMA_MPI_ADDRESSES"
"""Variable with a JSON list: HOST:PORT at which each node takes the command of its daemon."""
KEY_VARIABLE = "WANMA_MPI_KEY"
"""Variable with the key that signs these commands."""
PYTHON_VARIABLE, PROGRAM_VARIABLE = "WANMA_MPI_PYTHON", "WANMA_MPI_PROGRAM"
"""Variables with the interpreter and the path of this program, on this node."""
LEAVE_SECONDS = 10.0
"""Time, in seconds, that a launcher has to leave by itself after the end of this node's first rank."""
TERMINATE_SECONDS = 5.0
"""Time, in seconds, from SIGTERM to SIGKILL of a launcher."""
ABORT_SECONDS = 0.5
"""Delay, in seconds, of mpirun's request to end a rank, which follows the failure of another one.

The supervisors end all ranks meanwhile, and report the one that failed first.
"""
EXCHANGE_SECONDS = 5.0
"""Deadline, in seconds, of one exchange between nodes."""
RETRY_SECONDS = 0.05
_MAX_ANSWER_BYTES = 256
"""Longest line that a node sends to the one that starts its daemon, in bytes."""
_CREDENTIALS = struct.Struct("3i")
"""Format of SO_PEERCRED: process, user and group id."""


def main() -> int:
    """Run the part that the command line names; return its exit code."""
    part, *arguments = sys.argv[1:]
    if part == "guard":
        return guard_launcher(int(arguments[0]), arguments[1:])
    if part == "remote":
        return start_daemon(arguments[0], " ".join(arguments[1:]))
    return serve_rank()


def guard_launcher(leader: int, command: list[str]) -> int:
    """Run a launcher; after the end of process `leader` end it, too, unless it leaves by itself.

    Signals go to the process group, which this process leads: a shell may be between it and the launcher.
    """
    leader_end = os.pidfd_open(leader)
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    launcher_end = os.pidfd_open(launcher.pid)
    wait_for_end([leader_end, launcher_end])
    if not wait_for_end([launcher_end], LEAVE_SECONDS):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        wait_for_end([launcher_end], TERMINATE_SECONDS)
        os.killpg(0, signal.SIGKILL)
    code = launcher.wait()
    return code if code >= 0 else 128 - code


def start_daemon(host: str, command: str) -> int:
    """Let the node of `host` run a shell command, which starts mpirun's daemon there.

    Args:
        host: name of the node for mpirun, which ends in its node rank.
        command: shell command.
    """
    addresses, key = json.loads(os.environ[ADDRESSES_VARIABLE]), os.environ[KEY_VARIABLE]
    address = split_address(addresses[int(host.rpartition("-")[2])])
    while True:
        try:
            with socket.create_connection(address, EXCHANGE_SECONDS) as connection:
                challenge = receive_line(connection, _MAX_ANSWER_BYTES).decode("ascii", "replace")
                order = {"command": command, "signature": sign_command(key, challenge, command)}
                connection.sendall(json.dumps(order).encode() + b"\n")
                if receive_line(connection, _MAX_ANSWER_BYTES) == b"accepted":
                    return 0
        except OSError:
            pass  # its first rank does not listen yet
        if not is_alive(int(os.environ[LEADER_VARIABLE])):
            return 1
        time.sleep(RETRY_SECONDS)


def serve_rank() -> int:
    """Hand the environment of this process over to its rank, and wait until the rank ends.

    A request to end, which mpirun sends to all processes when one of them fails, is passed on.
    """
    connection = _connect_rank()
    if connection is None:
        return 1
    pid, _ = peer_credentials(connection)
    rank_end = os.pidfd_open(pid)
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        variables = {name: value for name, value in os.environ.items() if name.startswith(RANK_PREFIXES)}
        content = {"variables": variables, "cores": sorted(os.sched_getaffinity(0))}
        connection.sendall(json.dumps(content).encode() + b"\n")
        connection.close()
        wait_for_end([rank_end])
    except TerminatedError:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not wait_for_end([rank_end], ABORT_SECONDS):
            signal.pidfd_send_signal(rank_end, signal.SIGTERM)
            wait_for_end([rank_end])
    return 0


def sign_command(key: str, challenge: str, command: str) -> str:
    """Return the signature by which a node knows that a command comes from a node of the same run.

    Whoever is between the nodes chooses the challenge that the sender signs. JSON keeps the two apart: no
    part of a challenge can count as the beginning of a command.
    """
    content = json.dumps([challenge, command]).encode()
    return hmac.new(key.encode(), content, hashlib.sha256).hexdigest()


def receive_line(connection: socket.socket, most_bytes: int) -> bytes:
    """Return a line without its end, received within `EXCHANGE_SECONDS`, however slowly its bytes come.

    Raises:
        OSError: there is no whole line in that time, or it is longer than `most_bytes`.
    """
    deadline, line = time.monotonic() + EXCHANGE_SECONDS, b""
    while not line.endswith(b"\n"):
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the line did not end in time")
        connection.settimeout(remaining)
        content = connection.recv(most_bytes - len(line)) if len(line) < most_bytes else b""
        if not content:
            raise ConnectionError(f"the line did not end within {most_bytes} bytes")
        line += content
    return line[:-1]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def socket_name(gang: str, rank: int | str) -> str:
    """Return the abstract name of the socket at which a rank waits for its environment."""
    return f"\0{gang}-{rank}"


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user id of the other side."""
    options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(options)
    return pid, uid


def is_alive(pid: int) -> bool:
    """Return True if a process of this user has this number."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def wait_for_end(process_descriptors: Iterable[int], seconds: float | None = None) -> bool:
    """Wait until one of some processes has ended; return False if none has within `seconds`."""
    poll = select.poll()
    for descriptor in process_descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


class TerminatedError(Exception):
    """SIGTERM of mpirun to the process of a rank."""


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise TerminatedError


def _connect_rank() -> socket.socket | None:
    """Return the connection to the rank of this process; None: its node's first rank has ended before."""
    rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)
    name = socket_name(os.environ[GANG_VARIABLE], rank)
    while is_alive(int(os.environ[LEADER_VARIABLE])):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
            if peer_credentials(connection)[1] == os.getuid():
                return connection
        except OSError:
            pass  # it has not begun
        connection.close()
        time.sleep(RETRY_SECONDS)
    return None


if __name__ == "__main__":
    sys.exit(main())
