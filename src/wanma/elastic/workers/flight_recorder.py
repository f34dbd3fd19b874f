"""Current and recent collectives of a rank, from torch's and wanma's flight recorders, for hang reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from wanma.elastic.protocol.local_messages import CollectiveStateReport
from wanma.torch_internals.loaded import flight_recorder_dumps, process_groups

FLIGHT_RECORDER_ENTRIES = "128"
"""Number of entries that torch's recorder keeps; for TORCH_FR_BUFFER_SIZE."""
_MAX_RECENT = 4


def read_collective_state() -> CollectiveStateReport:
    """Return the collectives of this process; empty without torch, or if its recorder is off.

    Of several collectives in flight the oldest one counts: those behind it only wait for their turn.
    Point-to-point messages (pipeline stages) are not in Gloo's record.
    """
    ended, in_flight = _read_shared_memory_groups()
    for dump in flight_recorder_dumps():
        if entries := json.loads(dump).get("entries", []):
            return merge_records(entries, ended, in_flight)
    return merge_records([], ended, in_flight)


def merge_records(
    entries: list[dict[str, Any]],
    shared_memory_ended: Sequence[_TimedText] = (),
    shared_memory_in_flight: Sequence[_TimedText] = (),
) -> CollectiveStateReport:
    """Merge the recorder's entries, oldest first, with the collectives over shared memory."""
    in_flight = [_timed_text(entry) for entry in entries if not entry["retired"]]
    done = [_timed_text(entry) for entry in entries if entry["retired"]]
    # Sorting by start time is stable: entries without a time keep their order.
    in_flight = sorted([*in_flight, *shared_memory_in_flight], key=itemgetter(0))
    done = sorted([*done, *shared_memory_ended], key=itemgetter(0))
    return CollectiveStateReport(
        in_flight[0][1] if in_flight else "", tuple(text for _, text in done[-_MAX_RECENT:])
    )


_TimedText = tuple[int, str]
"""Collective as (nanoseconds since 1970, text)."""


def _read_shared_memory_groups() -> tuple[list[_TimedText], list[_TimedText]]:
    """Return (ended, in flight) collectives of this process's groups over shared memory."""
    groups = sys.modules.get("wanma.collectives.shared_memory.process_group")
    if groups is None:
        return [], []
    ended: list[_TimedText] = []
    in_flight: list[_TimedText] = []
    for group in process_groups():
        if isinstance(group, groups.SharedMemoryProcessGroup):
            for timed, records in zip((ended, in_flight), group.read_flight_records(), strict=True):
                timed += [(record.enqueued_unix_nanoseconds, record.text) for record in records]
    return ended, in_flight


def _timed_text(entry: dict[str, Any]) -> _TimedText:
    return int(entry.get("time_created_ns", 0)), _name(entry)


def _name(entry: dict[str, Any]) -> str:
    """Format a collective: 'all_reduce #17 of group default_pg'."""
    collective = str(entry["profiling_name"]).rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    described, words = entry["process_group"][-1], entry["process_group"][0]
    return f"{collective} #{number} of group {words if described == 'undefined' else described}"
