"""Kinds and fields of recorded steps and events that have been renamed; older runs have the old names."""

from __future__ import annotations

from typing import Any

KINDS = {
    "growth": "resize",
    "shares": "batch_shares",
    "slow_rank": "straggler",
    "health": "health_check",
}
"""Renamed kinds of events in events.jsonl, old to new."""
METRICS = {
    "waited": "exposed_communication_seconds",
    "under_way": "communication_seconds",
    "outer_norm": "pseudo_gradient_norm",
    "expert_load": "expert_load_imbalance",
}
"""Renamed metrics in metrics.jsonl, old to new."""
FIELDS = {
    "start": {"again": "is_restart"},
    "batch_shares": {"before": "previous_batch_shares"},
}
"""Renamed fields of events, old to new, by the new kind of their event."""


def with_new_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of events.jsonl, or (without a kind) of metrics.jsonl, under the names of today."""
    kind = record.get("kind")
    if kind is None:
        if METRICS.keys().isdisjoint(record) and "non_finite" not in record:
            return record
        renamed = {METRICS.get(name, name): value for name, value in record.items()}
        if isinstance(non_finite := record.get("non_finite"), dict):
            renamed["non_finite"] = {_metric(name): value for name, value in non_finite.items()}
        return renamed
    kind = KINDS.get(kind, kind)
    fields = FIELDS.get(kind, {})
    return {**{fields.get(name, name): value for name, value in record.items()}, "kind": kind}


def _metric(path: str) -> str:
    """Return the path of a number, such as 'waited.data', under the names of today."""
    name, dot, subpath = path.partition(".")
    return f"{METRICS.get(name, name)}{dot}{subpath}"
