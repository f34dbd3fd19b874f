"""Ray actor of one node of a run: it starts the supervisor there, passes signals on, and records its end.

The actor takes JSON text alone, so that nothing of a run is pickled. `find_groups` and the like need a
connection to Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.engines.engine import CODE_ARCHIVE_VARIABLE, PLACED_BY_VARIABLE
from wanma.engines.engine_record import EngineRecord
from wanma.engines.environment.shared_folder import environment_in_use
from wanma.engines.ray.node_records import MARKER_FILE, group_of, index_of, node_file, read_node_records
from wanma.engines.rendezvous_lookup import find_living_rendezvous
from wanma.job.run.run_directory import RunDirectory, write_json

WORKER_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "OMP_NUM_THREADS")
"""Environment variables that Ray sets for its own processes."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class NodeActor:
    """Actor of one node.

    Args:
        text: JSON object: `submission` as in engine.json, its `secret`, `prefix` of the run's names, `name`
            of this actor, `first`: name of the actor that has the rendezvous, or empty; `is_joining`.

    Raises:
        RuntimeError: this node cannot run a supervisor.
    """

    def __init__(self, text: str) -> None:
        import ray

        request: dict[str, Any] = json.loads(text)
        self._prefix, self._name, self._first = request["prefix"], request["name"], request["first"]
        self._submission = EngineRecord("ray", {}, request["submission"], 0).read_submission(
            request["secret"]
        )
        self._host, self._problem = socket.gethostname(), ""
        self._process: subprocess.Popen[bytes] | None = None
        if problem := self._find_problem():
            if self._first not in ("", self._name) and not request["is_joining"]:
                with contextlib.suppress(ValueError):
                    ray.get_actor(self._first).refuse.remote(problem)
            raise RuntimeError(problem)
        with socket.create_server((ray.util.get_node_ip_address(), 0)) as server:
            self._address = "{}:{}".format(*server.getsockname())
        self._process = self._launch(self._find_rendezvous(is_joining=request["is_joining"]))
        self._record(None)
        threading.Thread(target=self._watch, daemon=True, name="wanma-watch").start()

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
        run, folder = RunDirectory(self._submission.run_directory), self._submission.folder
        with contextlib.suppress(OSError):
            if (run.engine_files / MARKER_FILE).read_text() == self._prefix and folder.is_dir():
                return ""
        return f"the node {self._host} does not see the run directory {run.path}, or the folder {folder}"

    def _find_rendezvous(self, *, is_joining: bool) -> list[str]:
        """Return the option with the address of the run; empty: it has one node."""
        import ray

        submission, address = self._submission, None
        if is_joining:
            address = find_living_rendezvous(submission.settings.claims or str(submission.run_directory))
        if address is None and self._first == self._name:
            address = self._address
        elif address is None and self._first:
            answer = ray.get_actor(self._first).rendezvous.remote()
            address = ray.get(answer, timeout=submission.settings.start_timeout_seconds)
        return ["--rendezvous", address] if address is not None else []

    def _launch(self, meeting: list[str]) -> subprocess.Popen[bytes]:
        """Start the supervisor, which the kernel ends with this process."""
        submission, parent = self._submission, os.getpid()
        action, *words = submission.command
        environment = {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}
        environment |= {
            PLACED_BY_VARIABLE: "ray",
            SECRET_VARIABLE: submission.secret,
            "PYTHONUNBUFFERED": "1",
        }
        environment |= submission.environment
        environment |= {CODE_ARCHIVE_VARIABLE: str(submission.code)} if submission.code else {}

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's processes block SIGINT
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with self._file("log").open("ab") as output, environment_in_use(submission.interpreter) as in_use:
            return subprocess.Popen(
                [submission.interpreter or sys.executable, "-P", "-m", "wanma", action, *meeting, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=submission.folder,
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
                pass_fds=in_use,
            )

    def _watch(self) -> None:
        """Wait for the end of the supervisor; the last node of the run then gives back everything."""
        assert self._process is not None
        code = self._process.wait()
        self._record(code if code >= 0 else 128 - code)
        records, groups = read_node_records(self._submission.run_directory), find_groups(self._prefix)
        granted = {name for name, group in groups.items() if group["state"] == "CREATED"}
        is_last = not any(
            name != self._name
            and records.get(index_of(name), {"exit": None})["exit"] is None
            and (index_of(name) in records or group_of(name) in granted)
            for name in find_actors(self._prefix)
        )
        own = group_of(self._name)
        ended = sorted(groups, key=own.__eq__) if is_last else [own] if own != f"{self._prefix}g0" else []
        remove_groups(ended, last=self._name)
        remove_actor(self._name)

    def _record(self, code: int | None) -> None:
        write_json(self._file("json"), {"host": self._host, "exit": code, "problem": self._problem})

    def _file(self, suffix: str) -> Path:
        return node_file(self._submission.run_directory, index_of(self._name), suffix)


def find_groups(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the placement groups of a run by name: `state`, such as PENDING, `is_infeasible`, `bundles`."""
    import ray

    return {
        group["name"]: {
            "state": group["state"],
            "is_infeasible": group["stats"].get("scheduling_state") == "INFEASIBLE",
            "bundles": list(group["bundles"].values()),
        }
        for group in ray.util.placement_group_table().values()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def find_actors(prefix: str) -> list[str]:
    """Return the names of the actors of a run that live or wait."""
    import ray

    return [name for name in ray.util.list_named_actors() if name.startswith(prefix)]


def remove_groups(names: Collection[str], *, last: str = "") -> None:
    """Remove placement groups and their actors, the actor `last` at the end; what is gone stays so."""
    import ray

    for actor in find_actors(""):
        if group_of(actor) in names and actor != last:
            remove_actor(actor)
    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.util.remove_placement_group(ray.util.get_placement_group(name))


def remove_actor(name: str) -> None:
    """End an actor that lives or waits; one that has ended stays as it is."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(name))
