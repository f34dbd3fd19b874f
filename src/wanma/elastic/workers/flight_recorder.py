"""Current and recent collectives of a rank, from torch's and wanma's flight recorders, for hang reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from wanma.elastic.protocol.local_messages import Whereabouts

RECORDED = "128"
"""Number of entries that torch's recorder keeps; for TORCH_FR_BUFFER_SIZE."""
_RECENT = 4


def whereabouts() -> Whereabouts:
    """Return the collectives of this process; empty without torch, or if its recorder is off.

    Of several collectives in flight the oldest one counts: those behind it only wait for their turn.
    Point-to-point messages (pipeline stages) are not in Gloo's record.
    """
    ended, under_way = _over_shared_memory()
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        entries = json.loads(dump() or b"{}").get("entries", []) if dump is not None else []
        if entries:
            return read(entries, ended, under_way)
    return read([], ended, under_way)


def read(
    entries: list[dict[str, Any]], shared_ended: Sequence[_Told] = (), shared_under_way: Sequence[_Told] = ()
) -> Whereabouts:
    """Merge the recorder's entries, oldest first, with the collectives over shared memory."""
    under_way = [_told(entry) for entry in entries if not entry["retired"]]
    done = [_told(entry) for entry in entries if entry["retired"]]
    # Sorting by start time is stable: entries without a time keep their order.
    under_way = sorted([*under_way, *shared_under_way], key=itemgetter(0))
    done = sorted([*done, *shared_ended], key=itemgetter(0))
    return Whereabouts(under_way[0][1] if under_way else "", tuple(text for _, text in done[-_RECENT:]))


_Told = tuple[int, str]
"""Collective as (nanoseconds since 1970, text)."""


def _over_shared_memory() -> tuple[list[_Told], list[_Told]]:
    """Return (ended, in flight) collectives of this process's groups over shared memory."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    groups = sys.modules.get("wanma.collectives.shared_memory.process_group")
    if distributed is None or groups is None:
        return [], []
    ended: list[_Told] = []
    under_way: list[_Told] = []
    for group in list(distributed._world.pg_map):
        if isinstance(group, groups.SharedGroup):
            for told, entries in zip((ended, under_way), group.standing(), strict=True):
                told += [(entry.asked_nanoseconds, entry.text) for entry in entries]
    return ended, under_way


def _told(entry: dict[str, Any]) -> _Told:
    return int(entry.get("time_created_ns", 0)), _name(entry)


def _name(entry: dict[str, Any]) -> str:
    """Format a collective: 'all_reduce #17 of group default_pg'."""
    what = str(entry["profiling_name"]).rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    described, words = entry["process_group"][-1], entry["process_group"][0]
    return f"{what} #{number} of group {words if described == 'undefined' else described}"
