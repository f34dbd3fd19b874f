"""Run of a script by `wanma launch` without a session.

Only its ranks, times and exit code are known.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from dataclasses import dataclass
from typing import Any

from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import count_text, duration_text
from wanma.report.run_report import RunState, is_process_alive


@dataclass(frozen=True)
class ScriptRun:
    """Content of script.json; times are unix seconds."""

    run: RunDirectory
    script: str
    arguments: tuple[str, ...]
    ranks: int
    """Number of ranks on all nodes together."""
    nodes: int
    started: float
    ended: float | None
    exit_code: int | None
    failure: str
    state: RunState
    restarts: int = 0
    """Number of starts of the ranks after the first one."""
    restarted_after: str = ""
    """Failure before the newest restart."""

    @property
    def seconds(self) -> float:
        """Return the wall-clock time so far in seconds; for a dead run, until the newest line of a log."""
        end = self.ended
        if end is None:
            end = time.time() if self.state == "running" else self.last_activity
        return max(end - self.started, 0.0)

    @property
    def last_activity(self) -> float:
        """Return the time at which a rank last wrote into its log, or the script ended, in unix seconds."""
        logs = [path.stat().st_mtime for path in self.run.path.glob("logs/rank-*.log")]
        return max([self.started, self.ended or 0.0, *logs])


def read_script_run(run: RunDirectory) -> ScriptRun | None:
    """Read the script run of a directory without a session; None where there is none."""
    if run.job.is_file():
        return None
    try:
        value = json.loads(run.script.read_text(encoding="utf-8"))
        nodes = int(value["nodes"])
        return ScriptRun(
            run=run,
            script=str(value["script"]),
            arguments=tuple(value["arguments"]),
            ranks=nodes * int(value["ranks_per_node"]),
            nodes=nodes,
            started=float(value["started"]),
            ended=value["ended"],
            exit_code=value["exit_code"],
            failure=str(value["failure"]),
            state=_state(value),
            restarts=int(value.get("restarts", 0)),  # runs of older versions have none
            restarted_after=str(value.get("restarted_after", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def script_summary(script: ScriptRun) -> str:
    """Return the summary of a script's run: plain text of some ten lines."""
    duration = duration_text(script.seconds)
    sentences = {
        "running": f"Running for {duration}.",
        "finished": f"Finished after {duration}.",
        "interrupted": f"Stopped on request after {duration}.",
        "failed": f"Failed after {duration}.",
        "crashed": f"Crashed {duration} after its start.",
    }
    nodes_text = "" if script.nodes == 1 else f" on {count_text(script.nodes, 'node')}"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(script.started))
    code = "–" if script.exit_code is None else str(script.exit_code)
    lines = [
        f"{script.run.name}: {sentences[script.state]}",
        f"  {script.run.path}",
        f"  script     {shlex.join([script.script, *script.arguments])}",
        f"  ranks      {script.ranks}{nodes_text}",
        f"  started    {started}",
        f"  restarts   {script.restarts}",
        f"  exit code  {code}",
        f"  logs       {script.run.rank_log(0)}"
        + (f" to {script.run.rank_log(script.ranks - 1).name}" * (script.ranks > 1)),
    ]
    if script.restarted_after:
        lines += [
            "",
            *(f"  {line}" for line in f"restarted after: {script.restarted_after}".splitlines()),
        ]
    if script.failure:
        lines += ["", *(f"  {line}" for line in script.failure.splitlines())]
    lines += ["", "  It opened no wanma.session, so its steps are unknown."]
    return "\n".join(lines)


def _state(value: dict[str, Any]) -> RunState:
    code = value["exit_code"]
    if code is not None:
        return "finished" if code == 0 else "interrupted" if not value["failure"] else "failed"
    is_local = value["host"] == socket.gethostname()
    return "running" if not is_local or is_process_alive(value["process"]) else "crashed"
