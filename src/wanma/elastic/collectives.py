"""Which collectives a rank is in and was in, by torch's flight recorder; for the hang report."""

from __future__ import annotations

import json
import sys
from typing import Any

from wanma.elastic.local_messages import Whereabouts

RECORDED = "128"
"""Entries that the recorder keeps; for TORCH_FR_BUFFER_SIZE."""
_RECENT = 4


def whereabouts() -> Whereabouts:
    """Of this process; empty without torch, and where its recorder is off.

    Of several collectives under way the oldest one counts: those behind it only wait for their turn. What is
    sent from rank to rank (pipeline stages) is not in Gloo's record.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        entries = json.loads(dump() or b"{}").get("entries", []) if dump is not None else []
        if entries:
            return read(entries)
    return Whereabouts("")


def read(entries: list[dict[str, Any]]) -> Whereabouts:
    """From the recorder's entries, oldest first."""
    under_way = [_name(entry) for entry in entries if not entry["retired"]]
    done = [_name(entry) for entry in entries if entry["retired"]]
    return Whereabouts(under_way[0] if under_way else "", tuple(done[-_RECENT:]))


def _name(entry: dict[str, Any]) -> str:
    """'all_reduce #17 of group default_pg'."""
    what = str(entry["profiling_name"]).rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    described, words = entry["process_group"][-1], entry["process_group"][0]
    return f"{what} #{number} of group {words if described == 'undefined' else described}"
