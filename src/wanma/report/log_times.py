"""Times of the lines of rank logs: the supervisors note the size of each log from time to time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wanma.job.errors import JobError
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import parse_duration
from wanma.report.rank_work import read_node_records

MAX_SIZES_BYTES = 1 << 26
"""Most bytes of a node's records that are searched for sizes: days of a node with eight ranks."""


@dataclass(frozen=True)
class LogPiece:
    """Piece of a log that was written in one interval."""

    path: Path
    begin: int
    end: int | None
    """Offset of its end; None: that of the file."""


def log_pieces(run: RunDirectory, ranks: Sequence[int], since: float = 0.0) -> list[LogPiece]:
    """Return the logs of ranks in pieces, in the order of their time.

    Lines of the same few seconds are in the order of ranks. A log whose times are unknown is one piece.

    Args:
        since: unix time before which nothing is wanted; a piece may begin a few seconds earlier.
    """
    sizes = _sizes(run)
    pieces = []
    for rank in ranks:
        known = [entry for entry in sizes.get(rank, ()) if entry[1] > 0]
        times, offsets = [entry[0] for entry in known], [entry[1] for entry in known]
        first = bisect_right(times, since)
        begin = offsets[first - 1] if first else 0
        for at, end in zip(times[first:], offsets[first:], strict=True):
            if end > begin:
                pieces.append((at, rank, LogPiece(run.rank_log(rank), begin, end)))
                begin = end
        pieces.append((time.time(), rank, LogPiece(run.rank_log(rank), begin, None)))
    return [piece for _, _, piece in sorted(pieces, key=lambda entry: entry[:2])]


def _sizes(run: RunDirectory) -> Mapping[int, list[tuple[float, int]]]:
    """Return times with the size of the log then, by rank, in their order, since it was last emptied."""
    sizes: dict[int, list[tuple[float, int]]] = {}
    for records in read_node_records(run, MAX_SIZES_BYTES).values():
        for record in records:
            for entry in record.get("ranks", ()):
                if isinstance(entry.get("log_bytes"), int):
                    sizes.setdefault(entry["rank"], []).append((record["time"], entry["log_bytes"]))
    return {rank: _rising(sorted(entries)) for rank, entries in sizes.items()}


def _rising(entries: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    rising: list[tuple[float, int]] = []
    for entry in entries:
        if rising and entry[1] < rising[-1][1]:
            rising.clear()  # the log was emptied
        rising.append(entry)
    return rising


def parse_since(text: str) -> float:
    """Return the unix time of '10m', '2h', '1d' ago, or of '2026-11-28T18:00'.

    Raises:
        JobError: neither.
    """
    if (seconds := parse_duration(text)) is not None and text.strip()[-1] in "smhd":
        return time.time() - seconds
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise JobError(f"--since {text}: no time", "give 30s, 10m, 2h, 1d, or 2026-11-28T18:00") from None
