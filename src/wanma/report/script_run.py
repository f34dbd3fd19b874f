"""Run of a script by `wanma launch` without a session.

Only its ranks, times and exit code are known.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wanma.job.run.process_state import is_process_alive
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import last_record
from wanma.observe.units import (
    MISSING_TEXT,
    bytes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
)
from wanma.report.run_report import RunState

MAX_SHOWN_RANKS = 8
SILENCE_LIMIT_SECONDS = 120.0
"""Silence, in seconds, of all nodes after which a script on another host counts as crashed.

The supervisor of each node writes a record every 5 s (`RunDirectory.node_usage`). A network file system may
show it a minute later, and clocks differ.
"""


@dataclass(frozen=True)
class RankUsage:
    """Use of one rank's processes, as in its node's newest record."""

    rank: int
    cpu_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class GpuUsage:
    """Use of one GPU by all programs, as in its node's newest record. None: it does not report this."""

    node: int
    gpu: int
    utilization: float | None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_bytes: float | None


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
    framework: str = "torch"
    tasks: tuple[str, ...] = ()
    """Task of each rank in its framework; empty: none."""
    newest_metrics: Mapping[str, Any] = field(default_factory=dict)
    """Newest record of `wanma.log` on rank 0; empty: there is none."""
    usage: tuple[RankUsage, ...] = ()
    gpus: tuple[GpuUsage, ...] = ()
    newest_usage: float = 0.0
    """Time of the newest record of a node's supervisor; 0: there is none."""

    @property
    def seconds(self) -> float:
        """Return the wall-clock time so far in seconds; for a dead run, until its last sign of life."""
        end = self.ended
        if end is None:
            end = time.time() if self.state == "running" else max(self.last_activity, self.newest_usage)
        return max(end - self.started, 0.0)

    @property
    def last_activity(self) -> float:
        """Return the time at which a rank last wrote into its log, or the script ended, in unix seconds."""
        return max(self.started, self.ended or 0.0, _last_output(self.run))


def read_script_run(run: RunDirectory) -> ScriptRun | None:
    """Read the script run of a directory without a session; None where there is none."""
    if run.job.is_file():
        return None
    try:
        value = json.loads(run.script.read_text(encoding="utf-8"))
        nodes = int(value["nodes"])
        records = {rank: last_record(run.node_usage(rank)) for rank in range(nodes)}
        found = {rank: record for rank, record in records.items() if record is not None}
        newest_usage = max((float(record["time"]) for record in found.values()), default=0.0)
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
            state=_state(value, newest_usage, _last_output(run)),
            restarts=int(value.get("restarts", 0)),  # runs of older versions have none
            restarted_after=str(value.get("restarted_after", "")),
            framework=str(value.get("framework", "torch")),
            tasks=tuple(value.get("tasks", ())),
            newest_metrics=last_record(run.metrics) or {},
            usage=_rank_usages(found.values()),
            gpus=tuple(
                GpuUsage(node, one["gpu"], one["utilization"], one["memory_bytes"])
                for node, record in found.items()
                for one in record.get("gpus", ())
            ),
            newest_usage=newest_usage,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_output(run: RunDirectory) -> float:
    """Return the time at which a rank last wrote into its log, in unix seconds; 0: none has."""
    return max((path.stat().st_mtime for path in run.path.glob("logs/rank-*.log")), default=0.0)


def _rank_usages(records: Iterable[Mapping[str, Any]]) -> tuple[RankUsage, ...]:
    """Return the use of each rank, from the newest record of each node."""
    ranks = [one for record in records for one in record["ranks"]]
    usages = [RankUsage(one["rank"], one["cpu_seconds"], one["peak_memory_bytes"]) for one in ranks]
    return tuple(sorted(usages, key=lambda usage: usage.rank))


def _metric_lines(script: ScriptRun) -> list[str]:
    values = {name: value for name, value in script.newest_metrics.items() if name != "time"}
    if not values:
        return []
    texts = [
        f"{name} {number_text(value) if isinstance(value, float) else value}"
        for name, value in values.items()
    ]
    return [f"  metrics    {', '.join(texts)}"]


def _usage_lines(script: ScriptRun) -> list[str]:
    lines = []
    for usage in script.usage[:MAX_SHOWN_RANKS]:
        task = f" ({script.tasks[usage.rank]})" if usage.rank < len(script.tasks) else ""
        cpu, memory = duration_text(usage.cpu_seconds), bytes_text(usage.peak_memory_bytes)
        lines.append(f"  rank {usage.rank}{task}: processor time {cpu}, peak memory {memory}")
    if len(script.usage) > MAX_SHOWN_RANKS:
        lines.append(f"  and {len(script.usage) - MAX_SHOWN_RANKS} more ranks")
    for gpu in script.gpus[:MAX_SHOWN_RANKS]:
        place = f"GPU {gpu.gpu}" if script.nodes == 1 else f"GPU {gpu.gpu} of node {gpu.node}"
        utilization, memory = percent_text(gpu.utilization), bytes_text(gpu.memory_bytes)
        lines.append(f"  {place}: utilization {utilization}, memory in use {memory}")
    if len(script.gpus) > MAX_SHOWN_RANKS:
        lines.append(f"  and {len(script.gpus) - MAX_SHOWN_RANKS} more GPUs")
    return ["", *lines] if lines else []


def script_cells(script: ScriptRun) -> tuple[str, str, str, str, str, str]:
    """Return steps, loss, throughput, MFU, memory and last activity as texts, for a list of runs."""
    steps = f"script, {duration_text(script.seconds)}"
    if script.restarts:
        steps += f", {count_text(script.restarts, 'restart')}"
    metrics = script.newest_metrics
    if "step" in metrics:
        steps = f"{metrics['step']:,}, {steps}"
    loss = metrics.get("loss")
    loss_text = number_text(loss) if isinstance(loss, float | int) else MISSING_TEXT
    memory = bytes_text(max((one.peak_memory_bytes for one in script.usage), default=None))
    age = f"{duration_text(time.time() - script.last_activity)} ago"
    return steps, loss_text, MISSING_TEXT, MISSING_TEXT, memory, age


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
        *_metric_lines(script),
        *_usage_lines(script),
    ]
    if script.restarted_after:
        lines += [
            "",
            *(f"  {line}" for line in f"restarted after: {script.restarted_after}".splitlines()),
        ]
    if script.failure:
        lines += ["", *(f"  {line}" for line in script.failure.splitlines())]
    if not script.newest_metrics:
        lines += ["", "  It opened no wanma.session and called no wanma.log, so its steps are unknown."]
    return "\n".join(lines)


def _state(value: dict[str, Any], newest_usage: float, last_output: float) -> RunState:
    """Return the state: of a script on this host by its process, on another by its signs of life.

    Until its ranks start, nothing is written, while the nodes may wait for each other.
    """
    code = value["exit_code"]
    if code is not None:
        return "finished" if code == 0 else "interrupted" if not value["failure"] else "failed"
    if value["host"] == socket.gethostname():
        return "running" if is_process_alive(value["process"]) else "crashed"
    started, limit = float(value["started"]), SILENCE_LIMIT_SECONDS
    if newest_usage < started:
        limit += float(value.get("start_timeout_seconds", 0.0))  # unknown for runs of older versions
    return "running" if time.time() - max(started, newest_usage, last_output) <= limit else "crashed"
