"""Runner of a command on each of two nodes of this machine that a slow link joins: network namespaces.

    python -m wanma.bench.programs.limited_link 100 -- wanma train job.toml cluster.node_rank={node}
    python -m wanma.bench.programs.limited_link 100 0.01 -- wanma train ...

The numbers are the rate in Mbit/s and the delay of a packet in seconds, each way. In the words of the command
{node} is 0 or 1. The namespaces have no names: they end with their processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from wanma.bench.programs.link_delay import NEW_NETWORK, TUN, join_with_delay
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.job.run.child_process import kill_on_parent_exit

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29500
INTERFACE = "link0"
BURST_BYTES = 256 << 10
"""Bytes that the limit passes at once: more than the largest packet."""
QUEUE_SECONDS = 1.0
"""Seconds of packets that wait at the limit before more are dropped."""
END_SECONDS = 10.0
"""Seconds for which one node may continue after the other has failed."""


def missing_for_link(delay_seconds: float = 0.0) -> list[str]:
    """Return what this machine lacks for two nodes with a slow link between them."""
    programs = [
        f"`{name}` (Debian: apt-get install iproute2)" for name in ("ip", "tc") if not shutil.which(name)
    ]
    if sys.platform != "linux":
        return ["network namespaces of Linux"]
    return [
        *([] if os.geteuid() == 0 else ["root, to join two network namespaces by a slow link"]),
        *programs,
        *([f"{TUN} (in a container: --device {TUN})"] if delay_seconds and not Path(TUN).exists() else []),
    ]


def require_link() -> None:
    """Check that this machine can have two nodes with a slow link between them.

    Raises:
        WanmaError: it cannot; says what is missing.
    """
    if missing := missing_for_link():
        raise WanmaError(
            f"link_megabits_per_second: a slow link on one machine needs {', '.join(missing)}",
            "as root, or on the links of a cluster: --engine NAME --nodes 2",
            EXIT_USAGE,
        )


def command_over_link(command: Sequence[str], megabits: float) -> list[str]:
    """Return the command that runs `wanma train ...` on two nodes joined by a link of this rate."""
    nodes = [
        "cluster.nodes=2",
        f"cluster.rendezvous={ADDRESSES[0]}:{PORT}",
        "cluster.node_rank={node}",
        "cluster.health_check=never",
    ]
    return [sys.executable, "-P", "-m", __name__, f"{megabits:g}", "--", *command, *nodes]


def main() -> None:
    """Run the command on both nodes; the exit code is the first that is not 0."""
    end = sys.argv.index("--")
    megabits, delay = (*map(float, sys.argv[1:end]), 0.0)[:2]
    command = sys.argv[end + 1 :]
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    starts = [_start_node(node, megabits, command) for node in (0, 1)]
    processes = [process for process, _, _ in starts]

    def pass_on(number: int, _frame: object) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    _await(starts)
    if delay:
        join_with_delay(processes, INTERFACE, delay)
    else:
        first, second = (str(process) for process in processes)
        link = ["ip", "link", "add", INTERFACE, "netns", first, "type", "veth"]
        subprocess.run([*link, "peer", "name", INTERFACE, "netns", second], check=True)
    _release(starts)
    _await(starts)  # a node that ends takes the link with it, which the other may not have set up yet
    _release(starts)
    sys.exit(_wait(processes))


def _await(starts: Sequence[tuple[int, int, int]]) -> None:
    """Wait until all nodes are ready for what comes next, or have failed."""
    for _, ready, _ in starts:
        os.read(ready, 1)


def _release(starts: Sequence[tuple[int, int, int]]) -> None:
    """Let all nodes go on that have not failed."""
    for _, _, go in starts:
        with contextlib.suppress(BrokenPipeError):
            os.write(go, b".")


def _start_node(node: int, megabits: float, command: Sequence[str]) -> tuple[int, int, int]:
    """Fork the process of a node in a network of its own.

    Returns:
        its number, a descriptor with a byte each time it is ready (its network exists; its end of the link is
        set up), and one for a byte each time it may go on.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process:
        os.close(ready_write)
        os.close(go_read)
        return process, ready_read, go_write
    try:
        kill_on_parent_exit(parent)
        os.close(go_write)
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "no network namespace")
        os.write(ready_write, b".")
        os.read(go_read, 1)
        rate = ["tbf", "rate", f"{megabits:g}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_SECONDS}s"]
        for words in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "addr", "add", f"{ADDRESSES[node]}/24", "dev", INTERFACE],
            ["ip", "link", "set", INTERFACE, "up"],
            ["tc", "qdisc", "add", "dev", INTERFACE, "root", *rate],
        ):
            subprocess.run(words, check=True)
        os.write(ready_write, b".")
        os.read(go_read, 1)
        os.execvp(command[0], [word.replace("{node}", str(node)) for word in command])
    except BaseException as error:
        print(f"node {node}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)


def _wait(processes: Sequence[int]) -> int:
    """Wait for both nodes; end one that goes on long after the other has failed."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process] != 0:
                    deadline = min(deadline, time.monotonic() + END_SECONDS)
            elif time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    return next((abs(code) for process in processes if (code := codes[process])), 0)


if __name__ == "__main__":
    main()
