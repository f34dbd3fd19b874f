"""Output of checkpoint operations: tables and text for a terminal, JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from wanma.checkpoint.inspection.integrity_scan import Scan
from wanma.checkpoint.inspection.inventory import Entry
from wanma.observe.units import NONE, bytes_text, count_text, duration_text, number_text

if TYPE_CHECKING:
    from wanma.checkpoint.inspection.comparison import Comparison, Difference

SHOWN = 20
"""Maximum tensors shown in a comparison, unless all are requested."""


def inventory_table(entries: Sequence[Entry]) -> Table:
    """Return a table with one row per checkpoint."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "age", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("whole", overflow="fold")
    table.add_column("metric", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("uploaded", overflow="fold")
    now = time.time()
    for entry in entries:
        manifest = entry.manifest
        files = NONE if manifest is None else count_text(len(manifest.files), "file")
        table.add_row(
            f"{entry.step:,}",
            NONE if entry.time is None else duration_text(max(now - entry.time, 0)),
            bytes_text(entry.bytes),
            Text("yes", "green") if entry.problem is None else Text(f"no: {entry.problem}", "red"),
            NONE if manifest is None else number_text(manifest.metric),
            "best" if entry.is_best else "",
            NONE if manifest is None else f"{count_text(manifest.world_size, 'rank')}, {files}",
            entry.uploaded or NONE,
        )
    return table


def inventory_json(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the inventory as JSON; times in Unix seconds."""
    return [
        {
            "step": entry.step,
            "name": entry.name,
            "time": entry.time,
            "bytes": entry.bytes,
            "problem": entry.problem,
            "metric": None if entry.manifest is None else entry.manifest.metric,
            "is_best": entry.is_best,
            "world_size": None if entry.manifest is None else entry.manifest.world_size,
            "files": None if entry.manifest is None else len(entry.manifest.files),
            "tensors": None if entry.manifest is None else len(entry.manifest.tensors),
            "uploaded": entry.uploaded,
        }
        for entry in entries
    ]


def scan_text(scan: Scan) -> Text:
    """Return one line for a complete checkpoint; for a damaged one, a line for each problem too."""
    text = Text(f"{scan.name}  ")
    if scan.is_whole and (manifest := scan.manifest) is not None:
        text.append("whole", "green")
        text.append(
            f"  {count_text(len(manifest.tensors), 'tensor')} in {count_text(len(manifest.files), 'file')}, "
            f"{bytes_text(manifest.bytes)}"
        )
        return text
    text.append("damaged", "red")
    for problem in scan.problems:
        text.append(f"\n  {problem.file}: {problem.cause}")
    return text


def scan_json(scan: Scan) -> dict[str, Any]:
    return {
        "name": scan.name,
        "step": None if scan.manifest is None else scan.manifest.step,
        "whole": scan.is_whole,
        "files": None if scan.manifest is None else len(scan.manifest.files),
        "tensors": None if scan.manifest is None else len(scan.manifest.tensors),
        "bytes": None if scan.manifest is None else scan.manifest.bytes,
        "problems": [{"file": problem.file, "cause": problem.cause} for problem in scan.problems],
    }


def comparison_tables(found: Comparison, limit: int | None = SHOWN) -> list[Text | Table]:
    """Return the differences of names, then of values by size, then of the state.

    Args:
        limit: maximum tensors in each list; None: all.
    """
    parts: list[Text | Table] = []
    for names, where in ((found.only_a, "A"), (found.only_b, "B")):
        if names:
            parts.append(Text(f"only in {where}: {_some(names, limit)}"))
    if found.tensors:
        parts.append(_tensor_table(found.tensors, limit))
    parts.append(Text(f"{count_text(found.equal, 'tensor')} equal, {len(found.tensors):,} differ"))
    if found.state:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("state", "A", "B"):
            table.add_column(name, overflow="fold")
        for key, a, b in found.state:
            table.add_row(Text(key), Text(_value(a)), Text(_value(b)))
        parts.append(table)
    if found.ranks:
        parts.append(
            Text(
                "what ranks keep for themselves, the generators of random numbers, differs: ranks "
                + _some([str(rank) for rank in found.ranks], limit)
            )
        )
    return parts


def comparison_json(found: Comparison) -> dict[str, Any]:
    return {
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "equal": found.equal,
        "tensors": [
            {
                "name": one.name,
                "dtypes": list(one.dtypes),
                "shapes": [list(shape) for shape in one.shapes],
                "differing": one.differing,
                "non_finite": one.non_finite,
                "largest": one.largest,
                "relative": one.relative,
            }
            for one in found.tensors
        ],
        "state": {key: [a, b] for key, a, b in found.state},
        "ranks": list(found.ranks),
    }


def _tensor_table(tensors: Sequence[Difference], limit: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("differing", "largest", "relative"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(tensors, key=_weight)
    for one in ordered[:limit]:
        same_shape = one.shapes[0] == one.shapes[1]
        table.add_row(
            Text(one.name),
            _kind(one),
            f"{one.differing:,}" + (f" ({one.non_finite:,} not finite)" if one.non_finite else "")
            if same_shape
            else NONE,
            number_text(one.largest) if same_shape else NONE,
            number_text(one.relative),
        )
    if limit is not None and len(ordered) > limit:
        table.add_row(Text(f"and {len(ordered) - limit:,} more", "dim"))
    return table


def _weight(one: Difference) -> tuple[bool, bool, float, str]:
    """Return the sort key: other shapes, then non-finite values, then large relative differences first."""
    relative = float("inf") if one.relative is None else one.relative
    return one.shapes[0] == one.shapes[1], not one.non_finite, -relative, one.name


def _kind(one: Difference) -> str:
    kinds = [f"{dtype} {list(shape)}" for dtype, shape in zip(one.dtypes, one.shapes, strict=True)]
    return kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"


def _value(value: Any) -> str:
    text = NONE if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(names: Sequence[str], limit: int | None) -> str:
    shown = ", ".join(names[:limit])
    return shown if limit is None or len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
