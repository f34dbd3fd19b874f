"""Supervisors in processes of their own, one per node, as separate machines would have them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUPERVISE = """
import json, sys
from pathlib import Path
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.supervisor.supervisor import run_supervisor
from wanma.job.errors import WanmaError

changes = json.loads(sys.stdin.readline())
changes["run_directory"] = Path(changes["run_directory"])
changes["payload"] = changes.get("payload", "").encode()
changes["preload_modules"] = tuple(changes.get("preload_modules", ()))
try:
    outcome = run_supervisor(LaunchConfig(**changes), lambda event: print(json.dumps(event), flush=True))
except WanmaError as error:
    print(json.dumps({"kind": "refused", "message": error.message, "hint": error.hint}))
    sys.exit(9)
print(json.dumps({"kind": "outcome", "message": outcome.failure_text}))
sys.exit(outcome.exit_code)
"""


class Supervisor:
    """One node's supervisor in a process of its own."""

    def __init__(
        self, folder: Path, entry: str, namespace: str = "", secret: str = "", **changes: Any
    ) -> None:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.folder = folder
        self.errors = folder.with_suffix(".stderr")
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", SUPERVISE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            env={**os.environ, **({"WANMA_SECRET": secret} if secret else {})},
        )
        order = {"run_directory": str(folder), "entry": f"elastic_entries:{entry}", "nodes": 2, **changes}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"start_timeout_seconds": 200, **order}) + "\n")
        self.process.stdin.flush()
        self.lines: list[dict[str, Any]] = []

    def until(self, kind: str) -> dict[str, Any]:
        """Read what it prints up to the first event of `kind`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if self.lines[-1]["kind"] == kind:
                return self.lines[-1]
        raise AssertionError(f"no {kind} in {self.lines}")

    def wait_for_ranks(self) -> None:
        """Wait until this node has started its ranks: from then on a signal stops them in order."""
        deadline = time.monotonic() + 200
        while not list((self.folder / "logs").glob("rank-*.log")):
            assert self.process.poll() is None, f"it ended\n{self.errors.read_text()}"
            assert time.monotonic() < deadline, "no rank was started"
            time.sleep(0.01)

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += [json.loads(line) for line in self.process.stdout]
        return self.process.wait(200)

    @property
    def message(self) -> str:
        return str(self.lines[-1]["message"])

    @property
    def texts(self) -> list[str]:
        """Messages to its user beside rank 0's events."""
        return [line["text"] for line in self.lines if line["kind"] in ("message", "joined")]

    def logs(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "logs").glob("rank-*.log")}


def wait_for_listener(rendezvous: str) -> None:
    host, _, port = rendezvous.rpartition(":")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"nobody listens at {rendezvous}")
