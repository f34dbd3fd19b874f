"""Local engine: runs on this node, with one supervisor for each run.

The command line uses `run`: in the foreground, in this process. `submit` starts the same in a process of its
own, for a caller that has other work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from wanma.elastic.failure import Failure, killed_hint, signal_name
from wanma.elastic.launch_config import Launch, OnEvent, Outcome
from wanma.elastic.supervisor.supervisor import run_node
from wanma.elastic.workers.fork_server_handle import Node
from wanma.elastic.workers.linux_processes import die_with_parent
from wanma.engines.engine import Status
from wanma.hardware.discovery.resource_limits import memory_kills
from wanma.job.errors import EXIT_FAILED, WanmaError


def run(launch: Launch, on_event: OnEvent, node: Node | None = None) -> Outcome:
    """Run in the foreground and return when the run has ended and none of its processes is left.

    Args:
        on_event: receives the run's events, in this thread.
        node: fork server started early by `Node.start`, so that its imports overlap other work.
    """
    return run_node(launch, on_event, node)


@dataclass
class _Submitted:
    launch: Launch
    process: SpawnProcess
    answer: Connection
    kills: int | None
    """Number of out-of-memory kills, by `memory_kills()`, when the run was started."""
    outcome: Outcome | None = None
    cancelled: bool = False


class LocalEngine:
    """Engine whose runs live in the background of the calling process and end with it.

    As with `multiprocessing`, a script that calls `submit` guards itself by `if __name__ == "__main__"`.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Submitted] = {}

    def submit(self, launch: Launch) -> str:
        name = str(launch.run_directory)
        if name in self._runs and self._outcome(self._runs[name], 0) is None:
            raise WanmaError(
                f"a run in {name} is going on", "wait for it, cancel it, or choose another --run-dir"
            )
        context = multiprocessing.get_context("spawn")
        answer, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_supervise, args=(launch, theirs, os.getpid()))
        kills = memory_kills()
        process.start()
        theirs.close()
        self._runs[name] = _Submitted(launch, process, answer, kills)
        return name

    def status(self, run: str) -> Status:
        return self.wait(run, 0)

    def wait(self, run: str, seconds: float | None = None) -> Status:
        """Return the `status` once the run has ended, or after `seconds`; None waits without limit."""
        submitted = self._known(run)
        outcome = self._outcome(submitted, seconds)
        if outcome is None:
            return Status("running")
        if submitted.cancelled:
            return Status("cancelled", outcome.exit_code, outcome.message)
        return Status("failed" if outcome.exit_code else "finished", outcome.exit_code, outcome.message)

    def logs(self, run: str) -> list[Path]:
        folder = self._known(run).launch.run_directory / "logs"
        return sorted(folder.glob("rank-*.log"), key=lambda path: int(path.stem.partition("-")[2]))

    def cancel(self, run: str) -> None:
        submitted = self._known(run)
        if self._outcome(submitted, 0) is None:
            submitted.cancelled = True
            submitted.process.terminate()

    def _known(self, run: str) -> _Submitted:
        if run not in self._runs:
            raise WanmaError(f"this engine has no run {run}", f"it knows: {', '.join(self._runs) or 'none'}")
        return self._runs[run]

    def _outcome(self, submitted: _Submitted, seconds: float | None) -> Outcome | None:
        """Return the outcome of the run, waiting for it up to `seconds`; None while it runs."""
        if submitted.outcome is None and submitted.answer.poll(seconds):
            try:
                submitted.outcome = submitted.answer.recv()
                submitted.process.join()
            except EOFError:
                submitted.process.join()
                code = submitted.process.exitcode or 0
                how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"
                hint = killed_hint(submitted.kills) if -code == signal.SIGKILL else ""
                submitted.outcome = Outcome(EXIT_FAILED, Failure(f"the supervisor {how}", hint=hint))
        return submitted.outcome


def _supervise(launch: Launch, answer: Connection, parent: int) -> None:
    """Run the supervisor of a submitted run: the main function of that run's own process."""
    die_with_parent(parent)
    os.setsid()  # the caller decides on a terminal's Ctrl-C
    try:
        outcome = run_node(launch, lambda _event: None)
    except WanmaError as error:
        outcome = Outcome(error.exit_code, Failure(error.message, hint=error.hint, exit_code=error.exit_code))
    answer.send(outcome)
