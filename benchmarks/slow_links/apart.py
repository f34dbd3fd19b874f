"""Runner of one command on each of two nodes joined by a slow link: network namespaces of this machine.

    python -m benchmarks.slow_links.apart --megabits 100 --delay 0.01 -- torchrun --node-rank={node} ...

In the command's words {node} is 0 or 1. It needs root, `ip` and `tc` (Debian: iproute2), and for a delay
/dev/net/tun. Nothing is left behind; the exit code is the first one that is not 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.slow_links.interface import ADDRESSES, NAME

BURST_BYTES = 256 << 10
"""Bytes that the limit passes at once: more than the largest packet."""
QUEUE_SECONDS = 1.0
"""Seconds of packets that wait at the limit before more are dropped."""
END_SECONDS = 10.0
"""Seconds for which one command may continue after the other has failed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabits", type=float, required=True, help="a second, each way")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="of a packet, each way")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if missing := what_is_missing(options.delay):
        sys.exit(f"error: {missing}")
    with two_machines(options.megabits, options.delay) as names:
        sys.exit(run_on(names, options.command))


def what_is_missing(delay_seconds: float) -> str | None:
    """Return the reason why there can be no such network here, and the way out; None if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need `{program}` (apt-get install iproute2)"
    if delay_seconds > 0 and not Path("/dev/net/tun").exists():
        return "a delay needs /dev/net/tun (in a container: --device /dev/net/tun)"
    return None


def run_on(names: Sequence[str], command: Sequence[str]) -> int:
    """Run `command` in each namespace; return the first code that is not 0."""
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *(word.replace("{node}", str(node)) for word in command)]
        )
        for node, name in enumerate(names)
    ]
    deadline = float("inf")
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                deadline = min(deadline, time.monotonic() + END_SECONDS)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return next((code for process in running if (code := process.poll())), 0)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


@contextmanager
def two_machines(megabits: float, delay_seconds: float) -> Iterator[tuple[str, str]]:
    """Create two namespaces joined by a cable of this rate and delay."""
    names = (f"wanma-test-{os.getpid()}-slow-a", f"wanma-test-{os.getpid()}-slow-b")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        with _long_cable(names, delay_seconds) if delay_seconds > 0 else _short_cable(names):
            for name in names:
                limit(name, megabits)
            yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def limit(name: str, megabits: float) -> None:
    """Limit the outgoing rate of a namespace; its incoming traffic leaves the other one."""
    words = (
        "root",
        "tbf",
        "rate",
        f"{megabits:g}mbit",
        "burst",
        str(BURST_BYTES),
        "latency",
        f"{QUEUE_SECONDS}s",
    )
    subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", NAME, *words], check=True)


@contextmanager
def _short_cable(names: Sequence[str]) -> Iterator[None]:
    first = ("link", "add", NAME, "netns", names[0], "type", "veth")
    ip(*first, "peer", "name", NAME, "netns", names[1])
    for name, address in zip(names, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", NAME)
        ip("-n", name, "link", "set", NAME, "up")
    yield


@contextmanager
def _long_cable(names: Sequence[str], delay_seconds: float) -> Iterator[None]:
    relay = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_links.relay", *names, *ADDRESSES, str(delay_seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert relay.stdout is not None
        if relay.stdout.readline() != "up\n":
            sys.exit("error: the relay that delays packets did not start")
        yield
    finally:
        relay.kill()
        relay.communicate()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
