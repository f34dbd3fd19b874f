"""Local engine: runs on this node, with one supervisor for each run.

The command line uses `run_local`: in the foreground, in this process. `submit` starts the same in a process
of its own, for a caller that has other work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from wanma.elastic.failure import Failure, explain_sigkill, signal_name
from wanma.elastic.launch_config import LaunchConfig, OnEvent, RunOutcome
from wanma.elastic.supervisor.supervisor import run_supervisor
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.linux_processes import kill_on_parent_exit
from wanma.engines.engine import RunStatus
from wanma.hardware.discovery.resource_limits import count_oom_kills
from wanma.job.errors import EXIT_FAILED, WanmaError


def run_local(
    launch: LaunchConfig, on_event: OnEvent, fork_server: ForkServerHandle | None = None
) -> RunOutcome:
    """Run in the foreground and return when the run has ended and none of its processes is left.

    Args:
        on_event: receives the run's events, in this thread.
        fork_server: fork server started early by `Node.start`, so that its imports overlap other work.
    """
    return run_supervisor(launch, on_event, fork_server)


@dataclass
class _SubmittedRun:
    launch: LaunchConfig
    process: SpawnProcess
    result_pipe: Connection
    oom_kills_at_start: int | None
    """Number of out-of-memory kills, by `count_oom_kills()`, when the run was started."""
    outcome: RunOutcome | None = None
    is_cancelled: bool = False


class LocalEngine:
    """Engine whose runs live in the background of the calling process and end with it.

    As with `multiprocessing`, a script that calls `submit` guards itself by `if __name__ == "__main__"`.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _SubmittedRun] = {}

    def submit(self, launch: LaunchConfig) -> str:
        name = str(launch.run_directory)
        if name in self._runs and self._outcome(self._runs[name], 0) is None:
            raise WanmaError(
                f"a run in {name} is in progress", "wait for it, cancel it, or choose another --run-dir"
            )
        context = multiprocessing.get_context("spawn")
        answer, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_supervisor_process, args=(launch, theirs, os.getpid()))
        kills = count_oom_kills()
        process.start()
        theirs.close()
        self._runs[name] = _SubmittedRun(launch, process, answer, kills)
        return name

    def status(self, run_id: str) -> RunStatus:
        return self.wait(run_id, 0)

    def wait(self, run_id: str, seconds: float | None = None) -> RunStatus:
        """Return the `status` once the run has ended, or after `seconds`; None waits without limit."""
        submitted = self._find_run(run_id)
        outcome = self._outcome(submitted, seconds)
        if outcome is None:
            return RunStatus("running")
        if submitted.is_cancelled:
            return RunStatus("cancelled", outcome.exit_code, outcome.failure_text)
        return RunStatus(
            "failed" if outcome.exit_code else "finished", outcome.exit_code, outcome.failure_text
        )

    def logs(self, run_id: str) -> list[Path]:
        folder = self._find_run(run_id).launch.run_directory / "logs"
        return sorted(folder.glob("rank-*.log"), key=lambda path: int(path.stem.partition("-")[2]))

    def cancel(self, run_id: str) -> None:
        submitted = self._find_run(run_id)
        if self._outcome(submitted, 0) is None:
            submitted.is_cancelled = True
            submitted.process.terminate()

    def _find_run(self, run_id: str) -> _SubmittedRun:
        if run_id not in self._runs:
            raise WanmaError(
                f"this engine has no run {run_id}", f"use one of its runs: {', '.join(self._runs) or 'none'}"
            )
        return self._runs[run_id]

    def _outcome(self, submitted: _SubmittedRun, seconds: float | None) -> RunOutcome | None:
        """Return the outcome of the run, waiting for it up to `seconds`; None while it runs."""
        if submitted.outcome is None and submitted.result_pipe.poll(seconds):
            try:
                submitted.outcome = submitted.result_pipe.recv()
                submitted.process.join()
            except EOFError:
                submitted.process.join()
                code = submitted.process.exitcode or 0
                how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
                hint = explain_sigkill(submitted.oom_kills_at_start) if -code == signal.SIGKILL else ""
                submitted.outcome = RunOutcome(EXIT_FAILED, Failure(f"the supervisor {how}", hint=hint))
        return submitted.outcome


def _run_supervisor_process(launch: LaunchConfig, result_pipe: Connection, parent: int) -> None:
    """Run the supervisor of a submitted run: the main function of that run's own process."""
    kill_on_parent_exit(parent)
    os.setsid()  # the caller decides on a terminal's Ctrl-C
    try:
        outcome = run_supervisor(launch, lambda _event: None)
    except WanmaError as error:
        outcome = RunOutcome(
            error.exit_code, Failure(error.message, hint=error.hint, exit_code=error.exit_code)
        )
    result_pipe.send(outcome)
