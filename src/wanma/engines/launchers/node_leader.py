"""Choice of one process of a node to supervise its ranks, among those that another launcher has started.

    run_on_node(placement, command)     # local rank 0: runs the command; the others: wait for its exit code

The processes of a node meet at an abstract Unix socket, whose name only they can derive, and which vanishes
with its process. Each tells its cores and devices, so that the ranks have all that the launcher gave to the
node. Who waits ignores the signals that launchers send to every process: the supervisor decides what follows.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from wanma.elastic.supervisor.stop_signals import STOP_SIGNALS, ReceivedSignals, StopRequest
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.launchers.placement import launcher_process
from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, WanmaError

MEETING_SECONDS = 300.0
"""Longest time, in seconds, between the starts of two processes of a node."""
VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_RETRY_SECONDS = 0.05
_CREDENTIALS = struct.Struct("3i")
"""Format of SO_PEERCRED: process, user and group id."""


def run_on_node(placement: LauncherPlacement | None, command: Callable[[], int]) -> int:
    """Run `command` in one process of this node; return its exit code in all.

    The command then finds the cores and devices of all these processes, and none of the launcher's variables
    for single processes, which would be wrong in the ranks that it starts.

    Raises:
        WanmaError: the processes of this node did not meet; in the leader, errors of the command.
    """
    if placement is None:
        return command()
    mark_output_as_forwarded(placement)
    if placement.local_world_size == 1:
        release_default_binding(placement)
        return command()
    name = _socket_name(placement)
    return _lead(placement, name, command) if placement.leads_node else _follow(placement, name)


def mark_output_as_forwarded(placement: LauncherPlacement) -> None:
    """Let standard output be no terminal where the launcher passes it on, perhaps to a file.

    mpirun gives a process a terminal of its own, whatever reads the output of mpirun.
    """
    if placement.forwards_output:
        for stream in (sys.stdout, sys.stderr):
            stream.isatty = lambda: False  # type: ignore[method-assign]


def release_default_binding(placement: LauncherPlacement) -> None:
    """Use all cores again, where the launcher has bound this process to a few without a request.

    mpirun binds each process to one core or socket, which is wrong for one that starts the node's ranks.
    """
    if placement.has_default_binding:
        _use_cores(range(os.cpu_count() or 1))


def _lead(placement: LauncherPlacement, name: str, command: Callable[[], int]) -> int:
    """Run the command with the resources of all processes of the node, and tell them its exit code."""
    exit_code = EXIT_FAILED
    with contextlib.ExitStack() as stack:
        followers = _meet_followers(placement, name, stack)
        resources = [_own_resources(placement), *followers.values()]
        _take_resources(placement, resources)
        for variable in list(os.environ):
            if any(fnmatch.fnmatchcase(variable, pattern) for pattern in placement.process_variables):
                del os.environ[variable]
        try:
            exit_code = command()
        except WanmaError as error:
            exit_code = error.exit_code
            raise
        except KeyboardInterrupt as request:
            exit_code = request.exit_code if isinstance(request, StopRequest) else EXIT_INTERRUPTED
            raise
        finally:
            for connection in followers:
                with contextlib.suppress(OSError):
                    connection.sendall(f"{exit_code}\n".encode())
    return exit_code


def _meet_followers(
    placement: LauncherPlacement, name: str, stack: contextlib.ExitStack
) -> dict[socket.socket, dict[str, Any]]:
    """Return the connections of the node's other processes, with the resources of each."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        listener.bind(name)
    except OSError as error:
        raise WanmaError(
            f"another process of this node already leads the processes of this {placement.launcher}: "
            f"{error.strerror}",
            "end it; several trainings of one launch need `wanma train` with one process per node",
        ) from error
    listener.listen(placement.local_world_size)
    deadline = time.monotonic() + MEETING_SECONDS
    followers: dict[socket.socket, dict[str, Any]] = {}
    while len(followers) < placement.local_world_size - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
            stack.enter_context(connection)
            if _peer(connection)[1] != os.getuid():
                continue
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            followers[connection] = json.loads(connection.makefile("rb").readline())
        except (TimeoutError, ConnectionError, json.JSONDecodeError):
            if time.monotonic() >= deadline:
                raise _missing_error(placement, followers) from None
    listener.close()  # the next command of these processes may meet at the same name
    return followers


def _missing_error(
    placement: LauncherPlacement, followers: dict[socket.socket, dict[str, Any]]
) -> WanmaError:
    present = {0, *(resources["local_rank"] for resources in followers.values())}
    missing = sorted(set(range(placement.local_world_size)) - present)
    return WanmaError(
        f"{placement.launcher} started {placement.local_world_size} processes on this node, and after "
        f"{MEETING_SECONDS:.0f} s local rank {', '.join(map(str, missing))} is missing",
        "start the same command in all of them; if they are in containers, let them share one network "
        "namespace",
    )


def _follow(placement: LauncherPlacement, name: str) -> int:
    """Wait for the node's leader, and return its exit code; ignore signals that ask the run to stop."""
    try:
        with _stop_signals_deferred(), _connect(placement, name) as connection:
            connection.sendall(json.dumps(_own_resources(placement)).encode() + b"\n")
            pid = _peer(connection)[0]
            answer = _read_answer(connection, pid)
    except _SecondRequestError as second:
        return EXIT_INTERRUPTED if second.number == signal.SIGINT else 128 + second.number
    if answer:
        return int(answer)
    print(
        f"error: the process of local rank 0 (pid {pid}), which supervised the ranks of this node, has died",
        file=sys.stderr,
    )
    return EXIT_FAILED


def _connect(placement: LauncherPlacement, name: str) -> socket.socket:
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
            if _peer(connection)[1] == os.getuid():
                return connection
            problem = f"process {_peer(connection)[0]} of another user has its place"
        except OSError as error:
            problem = f"none has come within {MEETING_SECONDS:.0f} s ({error.strerror})"
        connection.close()
        if time.monotonic() >= deadline:
            raise WanmaError(
                f"local rank {placement.local_rank} of {placement.launcher} finds no process with local rank "
                f"0 on this node: {problem}",
                "start the same command in all processes; if they are in containers, let them share one "
                "network namespace",
            )
        time.sleep(_RETRY_SECONDS)


def _read_answer(connection: socket.socket, pid: int) -> bytes:
    """Return the leader's line; empty if it has died, also if a child of it still holds the connection."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    leader = None
    with contextlib.suppress(OSError):  # in another process namespace
        leader = os.pidfd_open(pid)
        poll.register(leader, select.POLLIN)
    try:
        poll.poll()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return connection.recv(16).strip()
        return b""
    finally:
        if leader is not None:
            os.close(leader)


class _SecondRequestError(Exception):
    """Second request to stop: a process that waits leaves, as its leader aborts."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _stop_signals_deferred() -> Iterator[None]:
    """Ignore the first stop signal of each kind, as the supervisor drains; raise at the second."""
    received = ReceivedSignals()

    def note(number: int, _frame: FrameType | None) -> None:
        if not received.is_repeat(number) and received.add(number):
            raise _SecondRequestError(number)

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _own_resources(placement: LauncherPlacement) -> dict[str, Any]:
    return {
        "local_rank": placement.local_rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "devices": os.environ.get(VISIBLE_DEVICES_VARIABLE),
    }


def _take_resources(placement: LauncherPlacement, resources: list[dict[str, Any]]) -> None:
    """Give this process the cores and devices of all processes of the node."""
    ordered = sorted(resources, key=lambda process: process["local_rank"])
    _use_cores({core for process in ordered for core in process["cores"]})
    release_default_binding(placement)
    if all(process["devices"] is not None for process in ordered):
        devices = [device for process in ordered for device in process["devices"].split(",") if device]
        os.environ[VISIBLE_DEVICES_VARIABLE] = ",".join(dict.fromkeys(devices))


def _use_cores(cores: range | set[int]) -> None:
    with contextlib.suppress(OSError):  # the batch system may forbid more
        os.sched_setaffinity(0, cores)


def _socket_name(placement: LauncherPlacement) -> str:
    """Return the abstract name at which the processes of this launch on this node meet."""
    launch = placement.launch_id or f"process {launcher_process(placement.variables[0])}"
    node = socket.gethostname() if placement.node_rank is None else f"{placement.node_rank}"
    parts = [placement.launcher, launch, node, f"{placement.restart_count}"]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"\0wanma-{os.getuid()}-{digest}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process and user id of the other side."""
    options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(options)
    return pid, uid
