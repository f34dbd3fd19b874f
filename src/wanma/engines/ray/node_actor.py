"""Ray actor of one node of a run: it starts the supervisor there, passes signals on, and records its end.

The actor takes JSON text alone, so nothing of a run is unpickled but the name of this class. Two files in the
run's folder `engine` belong to node INDEX: `ray-node-INDEX.json` with host, exit code and problem, and
`ray-node-INDEX.log`, the output of the supervisor.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.engines.engine import CODE_ARCHIVE_VARIABLE, PLACED_BY_VARIABLE
from wanma.engines.environment.shared_folder import environment_in_use
from wanma.engines.ray.node_records import MARKER_FILE, node_file, read_node_records
from wanma.engines.ray.placements import (
    actor_group,
    actor_index,
    find_actors,
    find_groups,
    group_name,
    remove_actor,
    remove_group,
    remove_run,
)
from wanma.engines.rendezvous_lookup import find_living_rendezvous
from wanma.job.run.run_directory import RunDirectory, write_json

WORKER_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "OMP_NUM_THREADS")
"""Environment variables that Ray sets for its own processes."""
REPORT_SECONDS = 30.0
"""Time, in seconds, for which a node that cannot take part waits for the question why."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class NodeActor:
    """Actor of one node.

    Args:
        text: JSON object: `run_directory`, `folder`, `prefix` of the run's names in Ray, `name` of this actor,
            `first`: name of the actor that has the rendezvous, or empty; `is_joining`; `claims`, `command`,
            `interpreter`, `environment`, `code`, `secret`, `timeout_seconds`.
    """

    def __init__(self, text: str) -> None:
        import ray

        self._request: dict[str, Any] = json.loads(text)
        self._name = str(self._request["name"])
        self._host = socket.gethostname()
        self._problem = self._find_problem()
        self._is_reported = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = _free_address(ray.util.get_node_ip_address())
        if not self._problem:
            rendezvous = self._find_rendezvous() if self._request["first"] else None
            if self._request["first"] and rendezvous is None:
                self._problem = "the run has ended meanwhile"
            else:
                self._launch(rendezvous)
        threading.Thread(target=self._watch, daemon=True, name="wanma-watch").start()

    def report(self) -> str:
        """Return JSON: host of this node, and the problem for which it has no supervisor; empty: none."""
        self._is_reported.set()
        return json.dumps({"host": self._host, "problem": self._problem})

    def rendezvous(self) -> str:
        """Return the address at which the supervisors of the run meet, if this is its first node."""
        return self._address

    def stop(self, names: str) -> None:
        """Send signals to the supervisor, by names such as 'SIGTERM SIGINT'."""
        for name in names.split():
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(getattr(signal, name))

    def refuse(self, problem: str) -> None:
        """End the run, as another node cannot take part; its problem is recorded here."""
        self._problem = problem
        self.stop("SIGTERM SIGINT")

    def _find_problem(self) -> str:
        """Return the reason why this node cannot run a supervisor; empty: it can."""
        run = RunDirectory(Path(self._request["run_directory"]))
        try:
            is_seen = (run.engine_files / MARKER_FILE).read_text() == self._request["prefix"]
        except OSError:
            is_seen = False
        if not is_seen:
            return f"the node {self._host} does not see the run directory {run.path}"
        if not Path(self._request["folder"]).is_dir():
            return f"the node {self._host} does not see the working directory {self._request['folder']}"
        return ""

    def _find_rendezvous(self) -> str | None:
        """Return the address of the run; None: a node was to join, and the run has ended."""
        import ray

        first = self._request["first"]
        if first == self._name:
            return self._address
        if self._request["is_joining"] and (living := find_living_rendezvous(self._request["claims"])):
            return living
        try:
            address = ray.get_actor(first).rendezvous.remote()
            return str(ray.get(address, timeout=self._request["timeout_seconds"]))
        except (ValueError, ray.exceptions.RayError):
            return None

    def _launch(self, rendezvous: str | None) -> None:
        """Start the supervisor, which the kernel ends with this process."""
        request, parent = self._request, os.getpid()
        action, *words = request["command"]
        meeting = ["--rendezvous", rendezvous] if rendezvous is not None else []
        environment = {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}
        environment |= {
            PLACED_BY_VARIABLE: "ray",
            SECRET_VARIABLE: request["secret"],
            "PYTHONUNBUFFERED": "1",
        }
        environment |= request["environment"]
        if request["code"]:
            environment[CODE_ARCHIVE_VARIABLE] = request["code"]

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which Ray's processes ignore
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        log = node_file(request["run_directory"], actor_index(self._name), "log")
        with log.open("ab") as output, environment_in_use(request["interpreter"]) as in_use:
            self._process = subprocess.Popen(
                [request["interpreter"] or sys.executable, "-P", "-m", "wanma", action, *meeting, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=request["folder"],
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
                pass_fds=in_use,
            )
        self._record(None)

    def _watch(self) -> None:
        """Wait for the end of the supervisor, and give back what the run no longer needs."""
        import ray

        if self._process is not None:
            code = self._process.wait()
            self._record(code if code >= 0 else 128 - code)
        else:
            self._is_reported.wait(REPORT_SECONDS)
            for name in [] if self._request["is_joining"] else self._others():
                ray.get_actor(name).refuse.remote(self._problem)
        self._leave()

    def _leave(self) -> None:
        """End this actor; the last one of the run gives back everything."""
        prefix, own = self._request["prefix"], actor_group(self._name)
        records = read_node_records(RunDirectory(Path(self._request["run_directory"])))
        groups = find_groups(prefix)
        active = []
        for name in self._others():
            record, group = records.get(actor_index(name)), groups.get(actor_group(name))
            is_granted = group is not None and group["state"] == "CREATED"
            active += [name] if (record is None and is_granted) or (record and record["exit"] is None) else []
        if not active:
            remove_run(prefix, last=self._name)
        elif own != group_name(prefix, 0):
            remove_group(own)
        else:
            remove_actor(self._name)

    def _others(self) -> list[str]:
        return [name for name in find_actors(self._request["prefix"]) if name != self._name]

    def _record(self, code: int | None) -> None:
        value = {"host": self._host, "exit": code, "problem": self._problem}
        write_json(node_file(self._request["run_directory"], actor_index(self._name), "json"), value)


def _free_address(host: str) -> str:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
