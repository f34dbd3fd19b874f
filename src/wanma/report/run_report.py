"""Content of a run directory as a `Report`, whatever state the run is in: running, ended, or dead.

Files that cannot be read are listed in `Report.problems`; they never stop the rest from being read.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import tomllib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from wanma.job.file.renamed_keys import with_new_names
from wanma.job.plan.plan import Plan
from wanma.job.run.process_state import is_process_alive
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.sinks.jsonl import START_FAILED
from wanma.report.renamed_records import with_new_names as record_with_new_names

RunState = Literal["new", "running", "finished", "interrupted", "aborted", "failed", "crashed"]
"""State of a run.

new: nothing was recorded yet; interrupted: stopped on request, with a checkpoint; aborted: the same without
one, as by a second Ctrl-C; crashed: began, and neither runs nor recorded an end.
"""

TAIL_BYTES = 1 << 16
"""Bytes at the end of metrics.jsonl that a brief report reads: at least a hundred steps."""
DEFAULT_HANG_SECONDS = 300.0


@dataclass(frozen=True)
class Report:
    """Report of one run, as its directory has it; times are unix seconds."""

    run: RunDirectory
    job_text: str
    """Text of job.toml."""
    job: dict[str, Any]
    plan: dict[str, Any]
    forecast: dict[str, Any]
    cluster: dict[str, Any]
    """Cluster for which the run was planned."""
    parameters: int | None
    """Parameters of the whole model; None when the plan does not have them."""
    loader_workers: int | None
    """Loader threads of a rank; None when the plan does not have them."""
    environment: dict[str, Any]
    steps: Mapping[str, Sequence[float]]
    """Columns of metrics.jsonl by key, those of objects as 'phases.NAME'.

    NaN where a step has no number. 'step' is always there; all columns are equally long.
    """
    non_finite: tuple[int, ...]
    """Steps with a NaN or infinite number."""
    starts: tuple[Event, ...]
    validations: tuple[Event, ...]
    """Validations, one per step: a repetition by a resumed run counts once."""
    checkpoints: tuple[Event, ...]
    messages: tuple[Event, ...]
    recoveries: tuple[Event, ...]
    """Failures that did not end the run, and resizes."""
    events: tuple[Event, ...]
    """All events as written, under the names of today."""
    state: RunState
    problems: tuple[str, ...]
    """Messages about files that could not be read."""

    def __repr__(self) -> str:
        return f"<report of {self.run.path}: {self.state}, {self.last_step} of {self.total_steps} steps>"

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the job; 0 when unknown."""
        return (
            int(self.starts[-1]["steps"]) if self.starts else int(self.job.get("train", {}).get("steps", 0))
        )

    @property
    def last_step(self) -> int:
        return int(self.steps["step"][-1]) if self.steps["step"] else 0

    @property
    def plan_text(self) -> str:
        """Return the plan in one line; empty when there is none."""
        try:
            return str(Plan.from_json(self.plan)) if self.plan else ""
        except (TypeError, ValueError):  # written by another version
            return str(self.starts[-1].get("plan", "")) if self.starts else ""

    @property
    def throughput_unit(self) -> str:
        """Return the unit of `tokens_per_second`, which counts targets: "samples/s" if a sample has one."""
        older = "samples/s" if self.job.get("data", {}).get("images") else "tokens/s"
        return str(self.starts[-1].get("rate_unit", older)) if self.starts else older

    def last(self, key: str) -> float | None:
        """Return the newest finite number of a column."""
        return next((value for value in reversed(self.steps.get(key, [])) if math.isfinite(value)), None)

    def median(self, key: str) -> float | None:
        """Return the median of a column's finite numbers, which the first, slow steps do not move."""
        values = [value for value in self.steps.get(key, []) if math.isfinite(value)]
        return median(values) if values else None

    def highest(self, key: str) -> float | None:
        return max((value for value in self.steps.get(key, []) if math.isfinite(value)), default=None)

    @property
    def failure(self) -> str:
        """Return the reason why a failed run failed; empty for any other."""
        ends = [event for event in self.events if event["kind"] == "finish"]
        return str(ends[-1].get("text", "")) if self.state == "failed" else ""

    @property
    def failed_start(self) -> str:
        """Return the reason why the newest start failed before its first step.

        Such a start leaves the run as it was. Empty when the newest start did not fail so.
        """
        newest = [event for event in self.events if event["kind"] in ("start", "finish", START_FAILED)][-1:]
        return "".join(str(event.get("text", "")) for event in newest if event["kind"] == START_FAILED)

    @property
    def best_metric(self) -> str:
        """Return the name of the validation metric by which checkpoints are compared."""
        return str(self.job.get("checkpoint", {}).get("best_metric", "loss"))

    @cached_property
    def best_validation(self) -> Event | None:
        """Return the validation that is best by `checkpoint.best_metric`, by default the loss."""
        name, sign = self.best_metric, -1 if self.job.get("checkpoint", {}).get("best_mode") == "max" else 1
        values = [event.get(name, event.get("metrics", {}).get(name)) for event in self.validations]
        known = [index for index, value in enumerate(values) if value is not None]
        best = min(known, key=lambda index: sign * float(values[index]), default=None)
        return None if best is None else self.validations[best]

    @cached_property
    def last_activity(self) -> float | None:
        """Return the time at which the run last wrote a step or an event, in unix seconds."""
        events = _without_failed_starts(self.events)[-1:]
        times = [*(event["time"] for event in events), *self.steps.get("time", ())[-1:]]
        return max((stamp for stamp in times if math.isfinite(stamp)), default=None)

    @cached_property
    def seconds(self) -> float:
        """Return the wall-clock time of the run in seconds, without the pauses between its starts."""
        stamps = sorted(
            [event["time"] for event in _without_failed_starts(self.events)]
            + [stamp for stamp in self.steps.get("time", []) if math.isfinite(stamp)]
        )
        begins = [event["time"] for event in self.starts]
        total = 0.0
        for begin, end in pairwise([*begins, math.inf]):
            own_stamps = [stamp for stamp in stamps if begin <= stamp < end]
            total += own_stamps[-1] - begin if own_stamps else 0.0
        return total


def read_report(run: RunDirectory, tail_only: bool = False, table: StepTable | None = None) -> Report:
    """Read the report of a run directory.

    Args:
        run: the run directory.
        tail_only: read only the last steps, for lists of many runs.
        table: steps that were read before, to which the new ones are added; the report gets a copy.
    """
    problems: list[str] = []
    job_text = _text(run.job, problems)
    job = with_new_names(_parse(run.job, job_text, tomllib.loads, problems))
    planned = _parse(run.plan, _text(run.plan, problems), json.loads, problems)
    environment = _parse(run.environment, _text(run.environment, problems), json.loads, problems)
    is_shared = table is not None
    table = table or StepTable(run.metrics, TAIL_BYTES if tail_only else None)
    table.update(problems)
    columns = table.columns
    events = _since_fresh_start(_records(run.events, problems))
    validations, checkpoints = _of_current_history(events)
    return Report(
        run=run,
        job_text=job_text,
        job=job,
        plan=planned.get("plan") or {},
        forecast=planned.get("forecast") or {},
        cluster=planned.get("cluster") or {},
        parameters=planned.get("parameters"),
        loader_workers=planned.get("loader_workers"),
        environment=environment,
        steps={key: column[:] for key, column in columns.items()} if is_shared else columns,
        non_finite=tuple(table.non_finite),
        starts=tuple(event for event in events if event["kind"] == "start"),
        validations=validations,
        checkpoints=checkpoints,
        messages=tuple(event for event in events if event["kind"] == "message"),
        recoveries=tuple(event for event in events if event["kind"] in ("recovery", "resize")),
        events=tuple(events),
        state=_state(_without_failed_starts(events), table, job),
        problems=tuple(problems),
    )


def is_finished(run: RunDirectory, since: float) -> bool:
    """Return True if the run has finished all steps since a time in unix seconds."""
    ends = [event for event in _records(run.events, [], TAIL_BYTES) if event["kind"] in ("start", "finish")]
    return bool(ends) and ends[-1].get("outcome") == "finished" and ends[-1]["time"] > since


def _since_fresh_start(events: list[Event]) -> list[Event]:
    """Return the events without those of an earlier run in the same place, before `--fresh`."""
    begins = [
        index
        for index, event in enumerate(events)
        if event["kind"] == "start" and not event.get("step") and not event.get("is_restart")
    ]
    return events[begins[-1] :] if begins else events


def _without_failed_starts(events: Sequence[Event]) -> list[Event]:
    """Return the events without the starts that failed before their first step."""
    return [event for event in events if event["kind"] != START_FAILED]


def _state(events: list[Event], table: StepTable, job: dict[str, Any]) -> RunState:
    ends = [event for event in events if event["kind"] in ("start", "finish")]
    if not ends:
        return "running" if table.has_records else "new"
    newest = ends[-1]
    if newest["kind"] == "finish":
        outcome = newest.get("outcome")
        return outcome if outcome in ("finished", "aborted", "failed") else "interrupted"
    if newest.get("host") == socket.gethostname():
        return "running" if is_process_alive(newest.get("process")) else "crashed"
    newest_step = next((stamp for stamp in table.columns.get("time", [])[-1:] if math.isfinite(stamp)), 0.0)
    silence = time.time() - max(newest["time"], events[-1]["time"], newest_step)
    patience = job.get("cluster", {}).get("hang_timeout_seconds", DEFAULT_HANG_SECONDS)
    return "running" if silence <= patience else "crashed"


def _of_current_history(events: list[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Return validations and checkpoints by step.

    A start from step S overrules events after step S that were recorded before it.
    """
    records: dict[str, dict[int, Event]] = {"validation": {}, "checkpoint": {}}
    for event in events:
        kind = event["kind"]
        if kind == "start":
            done = event.get("step", 0)
            records = {
                name: {s: e for s, e in by_step.items() if s <= done} for name, by_step in records.items()
            }
        elif kind in records and "step" in event:
            records[kind][event["step"]] = event
    validations, checkpoints = (
        tuple(by_step[step] for step in sorted(by_step))
        for by_step in (records["validation"], records["checkpoint"])
    )
    return validations, checkpoints


_GROUPS = (
    "phases",
    "load_seconds",
    "store_requests",
    "store_bytes",
    "cache_blocks",
    "node_requests",
    "node_bytes",
    "exposed_communication_seconds",
    "communication_seconds",
)
"""Keys of a record that hold numbers by name."""


class StepTable:
    """Columns of metrics.jsonl, of which only what is new is read.

    Args:
        path: metrics.jsonl of a run.
        last_bytes: bytes at its end that are read at first; None: all.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._clear()

    def _clear(self) -> None:
        self._offset: int | None = None
        """Offset of the first byte that was not read; None: none was."""
        self._last_line = b""
        """End of the last line that was read; its time is in it, so that no other line is equal."""
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.non_finite: list[int] = []
        self.has_records = False

    def update(self, problems: list[str]) -> None:
        """Read the new records; all of them if a resumed run has dropped some."""
        if self._offset is not None and _bytes_before(self._path, self._offset) != self._last_line:
            self._clear()
        self._offset = _read_records(self._path, problems, self._add, self._offset, self._last_bytes)
        self._last_line = _bytes_before(self._path, self._offset)

    def _add(self, record: Event) -> None:
        self.has_records = True
        index = len(self.columns["step"])
        self._add_numbers(record, "", index)
        for group in _GROUPS:
            if group in record:
                self._add_numbers(record[group] or {}, f"{group}.", index)
        for column in self.columns.values():
            if len(column) <= index:
                column.append(math.nan)
        if record.get("non_finite"):
            self.non_finite.append(record["step"])

    def _add_numbers(self, values: Mapping[str, Any], prefix: str, index: int) -> None:
        """Add the numbers among some values to their columns; a new column has NaN in the rows before."""
        columns = self.columns
        for name, value in values.items():
            if isinstance(value, (int, float)):
                if (key := prefix + name) not in columns:
                    columns[key] = array("d", [math.nan]) * index
                columns[key].append(value)


def _bytes_before(path: Path, offset: int) -> bytes:
    """Return the bytes before an offset, at most 1024; fewer if the file is shorter."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - 1024))
            return file.read(min(1024, offset))
    except OSError:
        return b""


def _records(path: Path, problems: list[str], last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines."""
    records: list[dict[str, Any]] = []
    _read_records(path, problems, records.append, None, last_bytes)
    return records


def _read_records(
    path: Path,
    problems: list[str],
    take: Callable[[dict[str, Any]], object],
    offset: int | None,
    last_bytes: int | None,
) -> int:
    """Read the objects of a file of JSON lines from an offset on; return where the next one begins.

    A torn last line is the result of a kill and no problem.

    Args:
        take: gets each record.
        offset: begin of a line; None: that of the file, or of the first whole line in its last `last_bytes`.
    """
    end = offset or 0
    required_keys = {"step"} if path.name == "metrics.jsonl" else {"kind", "time"}
    damaged = 0
    try:
        with path.open("rb") as file:
            if offset is None and last_bytes is not None:
                end = max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(end)
            if offset is None and end:
                end += len(file.readline())
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    damaged += 1
                    continue
                if isinstance(record, dict) and required_keys <= record.keys():
                    take(record_with_new_names(record))
                else:
                    damaged += 1
    except FileNotFoundError:
        return end
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
    if damaged:
        problems.append(f"{path.name}: {damaged} damaged lines were skipped")
    return end


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
    return ""


def _parse(path: Path, text: str, parse: Any, problems: list[str]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = parse(text)
    except ValueError as error:
        problems.append(f"{path.name}: {error}")
        return {}
    return value if isinstance(value, dict) else {}
