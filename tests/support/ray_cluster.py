"""Ray cluster of two nodes on this machine, each by `ray start`, from the environment of `make ray`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.networks import free_port
from support.waiting import wait_until

PYTHON = Path(__file__).parents[2] / ".venv-ray" / "bin" / "python"
"""Interpreter with ray and wanma; it exists after `make ray`."""
needs_ray = pytest.mark.skipif(not PYTHON.exists(), reason="without ray: make ray")
CORES = 1
"""CPUs that Ray counts for each node: a rank of the tests needs one."""


class RayCluster:
    """Two nodes of Ray; `nodes[0]` is the head.

    Args:
        folder: folder of its sessions, with a short path: sockets are in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.nodes: list[psutil.Popen] = []
        self.environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            # A lost node is noticed after seconds; by default it takes half a minute.
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "4",
        }

    def start_node(self) -> None:
        """Start a node, and wait until the cluster has it."""
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        place = head if not self.nodes else [f"--address={self.address}"]
        options = [f"--num-cpus={CORES}", "--object-store-memory=80000000", "--disable-usage-stats"]
        self.nodes.append(
            psutil.Popen(
                [
                    PYTHON.with_name("ray"),
                    "start",
                    "--block",
                    *place,
                    *options,
                    "--node-ip-address=127.0.0.1",
                ],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=(self.folder / "output").open("ab"),
                stderr=subprocess.STDOUT,
            )
        )
        count = sum(node.is_running() for node in self.nodes)
        wait_until(lambda: len(self.ask("nodes") or ()) == count, f"{count} nodes of Ray")

    def lose_node(self, number: int) -> None:
        """SIGKILL to all processes of a node."""
        node = self.nodes[number]
        for process in [*node.children(recursive=True), node]:
            process.kill()
        node.wait()

    def ask(self, operation: str, **values: Any) -> Any:
        """Return the answer of wanma's bridge; None: there is none."""
        lines = [{"operation": "connect", "address": self.address}, {"operation": operation, **values}]
        done = subprocess.run(
            [PYTHON, "-P", "-m", "wanma.engines.ray.bridge"],
            input="".join(f"{json.dumps(line)}\n" for line in lines),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1]).get("value")

    def wanma(self, folder: Path, *words: str, code: int = 0) -> str:
        """Run a command; return what it prints."""
        done = subprocess.run(
            [PYTHON, "-m", "wanma", *words],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def assert_nothing_is_left(self, run_directory: Path) -> None:
        """Wait until Ray has everything back, and no process of the run lives."""
        wait_until(lambda: self.ask("groups", prefix="") == {}, "no placement group")
        assert self.ask("actors", prefix="") == []
        wait_until(lambda: not _processes(run_directory), f"no process of {run_directory}")


def _processes(run_directory: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(run_directory) in (process.info["cmdline"] or ())
    ]


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Yield a cluster of two nodes, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # as sockets need a short path
    cluster = RayCluster(folder)
    try:
        cluster.start_node()
        cluster.start_node()
        yield cluster
    finally:
        for number, node in enumerate(cluster.nodes):
            if node.is_running():
                cluster.lose_node(number)
        shutil.rmtree(folder, ignore_errors=True)
