"""Local engine: runs on this machine that outlive the command which started them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from wanma.elastic.launch_config import get_hostname
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.elastic.workers.linux_processes import process_start_time
from wanma.engines.engine import (
    PLACED_BY_VARIABLE,
    Engine,
    EngineCluster,
    Explanation,
    Handle,
    RunStatus,
    Submission,
)
from wanma.engines.environment.shared_folder import environment_in_use
from wanma.engines.lease.shell_time import limit_time
from wanma.engines.recorded_state import read_recorded_state
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection

OUTPUT_FILE = "output.log"


class LocalEngine(Engine):
    """Engine whose runs are processes of this machine, each in a session of its own.

    The run directory is here: what the interface does for others does nothing.
    """

    name = "local"
    ends_with_caller = False

    def unusable_reason(self) -> str | None:
        return None

    def discover(
        self, _section: ClusterSection, _data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        return None

    def render(self, submission: Submission) -> str:
        return f"{shlex.join(_command(submission))} > {_output(submission.run_directory)} 2>&1 &\n"

    def submit(self, submission: Submission) -> Handle:
        output, submitted = _output(submission.run_directory), time.time()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("ab") as file, environment_in_use(submission.interpreter) as in_use:
                process = subprocess.Popen(
                    _command(submission),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=submission.folder,
                    env={
                        **os.environ,
                        **submission.environment,
                        PLACED_BY_VARIABLE: self.name,
                        SECRET_VARIABLE: submission.secret,
                    },
                    start_new_session=True,  # Ctrl-C and the end of the terminal do not reach it
                    pass_fds=in_use,  # open until the run ends
                )
        except OSError as error:
            raise WanmaError(
                f"cannot start the run in {submission.run_directory}: {error.strerror or error}",
                "choose another run directory with --run-dir DIR",
                EXIT_USAGE,
            ) from error
        return {
            "host": get_hostname(),
            "process": process.pid,
            "started": process_start_time(process.pid),
            "submitted": submitted,
            "run_directory": str(submission.run_directory),
        }

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        return [_status(handle) for handle in handles]

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        return (str(handle["host"]),)

    def log_files(self, handle: Handle) -> list[Path]:
        output = _output(Path(handle["run_directory"]))
        return [output] if output.exists() else []

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        _check_host(handle)
        if _is_alive(handle):
            with contextlib.suppress(ProcessLookupError):
                if is_immediate:
                    os.kill(handle["process"], signal.SIGTERM)
                os.kill(handle["process"], signal.SIGINT)  # after a SIGTERM it ends the run at once

    def resize(
        self,
        _handle: Handle,
        _submission: Submission,
        _nodes: int,
        /,
        *,
        may_shrink: bool = True,  # noqa: ARG002  # it has one size
    ) -> Handle:
        raise WanmaError(
            "a run of the engine 'local' has one node, this machine",
            "start it on an engine with several nodes, e.g. --engine slurm --nodes 1..4",
            EXIT_USAGE,
        )

    def explain(self, _handle: Handle, /) -> Explanation:
        return Explanation("nothing blocks it: the engine 'local' starts each run at once")

    def shell_command(self, handle: Handle, _node: str | None, minutes: float | None, /) -> list[str]:
        _check_host(handle)
        return [*limit_time(minutes), os.environ.get("SHELL") or "/bin/sh"]


def _command(submission: Submission) -> list[str]:
    return [submission.interpreter or sys.executable, "-m", "wanma", *submission.command]


def _output(run_directory: Path) -> Path:
    return RunDirectory(run_directory).engine_files / OUTPUT_FILE


def _check_host(handle: Handle) -> None:
    if handle["host"] != get_hostname():
        raise WanmaError(
            f"the run is on {handle['host']}, and this is {get_hostname()}",
            f"give the command there: ssh {handle['host']}",
            EXIT_USAGE,
        )


def _is_alive(handle: Handle) -> bool:
    """Return True if the process lives; a later process with the same number has another start time."""
    started = process_start_time(handle["process"])
    return started is not None and started == handle["started"]


def _status(handle: Handle) -> RunStatus:
    identity, host = (f"process {handle['process']}",), (str(handle["host"]),)
    run = RunDirectory(Path(handle["run_directory"]))
    is_here = handle["host"] == get_hostname()
    if is_here and _is_alive(handle):
        return RunStatus("running", None, "", host, identity)
    state, failure, changed = read_recorded_state(run)
    if not is_here and changed <= handle.get("submitted", 0.0):
        reason = f"it is on {host[0]}, and has no record yet: ask there"
        return RunStatus("unknown", None, reason, host, identity)
    if not is_here and state == "running":
        return RunStatus("running", None, f"by its records, as it is on {host[0]}", host, identity)
    if state == "finished":
        return RunStatus("finished", 0, "", (), identity)
    if state in ("interrupted", "aborted"):
        return RunStatus("cancelled", None, "", (), identity)
    what = "it ended before its first record" if state == "new" else "the process ended without a record"
    return RunStatus("failed", None, failure or f"{what}; see {_output(run.path)}", (), identity)
