"""Sink of JSON Lines files: metrics.jsonl (one line per step) and events.jsonl (all other events).

A continued run first drops torn lines. Records of steps that it repeats are dropped when the first of them is
made again, so that metrics.jsonl has every step once, and a start that completes no step loses none. Dropped
records wait in a second file until the steps are repeated (`restore_steps`). events.jsonl is a history and
keeps everything, the lost steps' validations included (readers see the `start` that overruled them).

JSON knows no NaN or infinity: such a number is written as null, and its name and value go into `non_finite`,
such as {"loss": null, "non_finite": {"loss": "nan"}}.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event

BLOCK_BYTES = 1 << 16
START_FAILED = "start_failed"
"""Kind of the event of a start that failed before it began; the earlier records keep their meaning."""


class JsonLinesSink:
    """Sink of step records into `run.metrics`, without their kind, and other events into `run.events`."""

    output_name = "metrics.jsonl and events.jsonl"

    def __init__(self) -> None:
        self._files: dict[Path, AppendFile] = {}

    def open(self, run: RunDirectory, first_step: int) -> None:
        self._run, self._metrics, self._events = run, run.metrics, run.events
        self._first_step: int | None = first_step
        try:
            drop_torn_lines(run.metrics)
            drop_torn_lines(run.events)
            self._files = {path: AppendFile(path) for path in (run.metrics, run.events)}
        except OSError as error:
            raise WanmaError(
                f"cannot write {error.filename or run.path}: {error.strerror or error}",
                "choose another run directory with --run-dir DIR, or free space on its disk",
            ) from error

    def write(self, event: Event) -> None:
        if event["kind"] == "step":
            record = {key: value for key, value in event.items() if key != "kind"}
            if self._first_step is not None:
                drop_steps(self._run, self._first_step)
                self._first_step = None
            self._files[self._metrics].write(to_json_line(record))
        else:
            self._files[self._events].write(to_json_line(event))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


class AppendFile:
    """Append-only file with one `write` system call per record, and no buffer.

    A kill can tear only the last record, and a full disk tears none.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: bytes) -> None:
        """Append `record`.

        Raises:
            OSError: the record did not fit; the file is unchanged.
        """
        start = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(record):
                written += os.write(self._descriptor, record[written:])
        except OSError:
            os.ftruncate(self._descriptor, start)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def append_final_event(run: RunDirectory, kind: str, **fields: Any) -> None:
    """Add one event to a run that no longer has a recorder: its end, as seen by the supervisor.

    Raises:
        OSError: the event could not be written.
    """
    drop_torn_lines(run.events)
    append_concurrent_event(run, kind, **fields)


def append_concurrent_event(run: RunDirectory, kind: str, **fields: Any) -> None:
    """Add one event beside those of a recorder that is active in another process.

    Raises:
        OSError: the event could not be written.
    """
    with contextlib.closing(AppendFile(run.events)) as file:
        file.write(to_json_line({"kind": kind, "time": time.time(), **fields}))


def to_json_line(record: dict[str, Any]) -> bytes:
    """Return `record` as one line of strict JSON; non-finite numbers become null, named in `non_finite`."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        non_finite: dict[str, str] = {}
        text = json.dumps(
            {**_replace_non_finite(record, "", non_finite), "non_finite": non_finite}, ensure_ascii=False
        )
    return text.encode() + b"\n"


def _replace_non_finite(value: Any, name: str, non_finite: dict[str, str]) -> Any:
    """Return `value` with null for non-finite numbers, whose names and values are added to `non_finite`."""
    if isinstance(value, dict):
        return {
            key: _replace_non_finite(item, f"{name}.{key}" if name else key, non_finite)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[name] = str(value)
        return None
    return value


def drop_steps(run: RunDirectory, first_step: int) -> None:
    """Move the records of steps from `first_step` on out of the metrics, into a file beside them."""
    lines = _read_records_backwards(run.metrics)
    end = next((end for record, end in lines if record.get("step", 0) < first_step), 0)
    if not run.metrics.exists() or end == run.metrics.stat().st_size:
        return
    with run.metrics.open("rb") as file:
        file.seek(end)
        records = file.read()
    with contextlib.suppress(OSError):  # no room; the steps are repeated anyway
        _dropped_steps_file(run).write_bytes(records)
    os.truncate(run.metrics, end)


def restore_steps(run: RunDirectory, last_step: int) -> None:
    """Restore dropped records that were not made again, up to step `last_step`, whose state was saved.

    Raises:
        OSError: a file cannot be read or written.
    """
    dropped_file = _dropped_steps_file(run)
    if not dropped_file.exists():
        return
    newest = last_record(run.metrics)
    last_recorded_step = newest["step"] if newest is not None else 0
    lines = dropped_file.read_bytes().splitlines()
    with contextlib.closing(AppendFile(run.metrics)) as file:
        for line in lines:
            record = parse_record(line)
            if record is not None and last_recorded_step < record["step"] <= last_step:
                file.write(line + b"\n")
    dropped_file.unlink()


def _dropped_steps_file(run: RunDirectory) -> Path:
    return run.path / ".metrics-dropped.jsonl"


def drop_torn_lines(path: Path) -> None:
    """Cut the file after its last complete line that parses.

    It reads backwards, so the cost is that of the dropped part; one `truncate` makes the cut, so a kill
    leaves the file either as it was or as it should be.
    """
    end = next((end for _, end in _read_records_backwards(path)), 0)
    if path.exists() and end < path.stat().st_size:
        os.truncate(path, end)


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the record of the last complete line that parses; None if there is none."""
    return next((record for record, _ in _read_records_backwards(path)), None)


def _read_records_backwards(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, offset of its line's end) for all complete lines that parse, the last one first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        block = b""  # content from `start` to `end`
        while end > 0:
            while (newline := block.rfind(b"\n", 0, -1)) < 0 and start > 0:
                size = min(BLOCK_BYTES, start)
                start = file.seek(start - size)
                block = file.read(size) + block
            line, block = block[newline + 1 :], block[: newline + 1]
            record = parse_record(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record, end
            end -= len(line)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None: the line is torn, as by a kill, or no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
