"""Readers of a run's records: those that another process writes meanwhile, and those of earlier starts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.sinks.jsonl import parse_record

READ_BYTES = 1 << 22
"""Most bytes of one file that are read at a time."""


class RecordFollower:
    """Reader of the events that have been added to metrics.jsonl and events.jsonl since the last call.

    Args:
        run: run directory; its files may not exist yet.
        from_start: also return the records that are there already.
    """

    def __init__(self, run: RunDirectory, *, from_start: bool) -> None:
        self._offsets = dict.fromkeys((run.events, run.metrics), 0)
        self._metrics = run.metrics
        if not from_start:
            self._offsets = {path: _size(path) for path in self._offsets}

    def read(self) -> list[Event]:
        """Return the new events, oldest first; a step has the kind 'step'."""
        events: list[Event] = []
        for path in self._offsets:
            for record in self._read_file(path):
                events.append({"kind": "step", **record} if path == self._metrics else record)
        return sorted(events, key=lambda event: event.get("time") or 0.0)

    def _read_file(self, path: Path) -> list[Event]:
        offset = self._offsets[path]
        size = _size(path)
        if size <= offset:  # smaller: a resumed run has dropped steps that it repeats
            self._offsets[path] = size
            return []
        with path.open("rb") as file:
            file.seek(offset)
            block = file.read(READ_BYTES)
        complete = block[: block.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line)) is not None]


def read_records(run: RunDirectory, before: float) -> Iterator[Event]:
    """Yield the events recorded before a time in unix seconds, oldest first; a step has the kind 'step'."""
    steps = ({"kind": "step", **record} for record in _read_lines(run.metrics, "step"))
    for record in heapq.merge(_read_lines(run.events, "kind"), steps, key=lambda record: record["time"]):
        if record["time"] < before:
            yield record


def _read_lines(path: Path, key: str) -> Iterator[Event]:
    """Yield the records of a file that have a key and a time; there may be no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = parse_record(line)
            if record is not None and key in record and isinstance(record.get("time"), int | float):
                yield record


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
