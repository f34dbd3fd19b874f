"""Output of checkpoint operations: tables and text for a terminal, JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from wanma.checkpoint.inspection.integrity_scan import ScanResult
from wanma.checkpoint.inspection.inventory import CheckpointEntry
from wanma.job.errors import first_names
from wanma.job.file.serialization import value_text
from wanma.observe.units import MISSING_TEXT, bytes_text, count_text, duration_text, number_text

if TYPE_CHECKING:
    from wanma.checkpoint.inspection.comparison import CheckpointDifference, TensorDifference

MAX_SHOWN_TENSORS = 20
"""Maximum tensors shown in a comparison, unless all are requested."""


def inventory_table(entries: Sequence[CheckpointEntry]) -> Table:
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
        files = MISSING_TEXT if manifest is None else count_text(len(manifest.files), "file")
        table.add_row(
            f"{entry.step:,}",
            MISSING_TEXT if entry.completed_at is None else duration_text(max(now - entry.completed_at, 0)),
            bytes_text(entry.bytes),
            Text("yes", "green") if entry.defect is None else Text(f"no: {entry.defect}", "red"),
            MISSING_TEXT if manifest is None else number_text(manifest.metric),
            "best" if entry.is_best else "",
            MISSING_TEXT if manifest is None else f"{count_text(manifest.world_size, 'rank')}, {files}",
            entry.upload_url or MISSING_TEXT,
        )
    return table


def inventory_json(entries: Sequence[CheckpointEntry]) -> list[dict[str, Any]]:
    """Return the inventory as JSON; times in Unix seconds."""
    return [
        {
            "step": entry.step,
            "name": entry.name,
            "time": entry.completed_at,
            "bytes": entry.bytes,
            "problem": entry.defect,
            "metric": None if entry.manifest is None else entry.manifest.metric,
            "is_best": entry.is_best,
            "world_size": None if entry.manifest is None else entry.manifest.world_size,
            "files": None if entry.manifest is None else len(entry.manifest.files),
            "tensors": None if entry.manifest is None else len(entry.manifest.tensors),
            "uploaded": entry.upload_url,
        }
        for entry in entries
    ]


def scan_text(scan: ScanResult) -> Text:
    """Return one line for a complete checkpoint; for a damaged one, a line for each problem too."""
    text = Text(f"{scan.name}  ")
    if scan.is_valid and (manifest := scan.manifest) is not None:
        text.append("whole", "green")
        text.append(
            f"  {count_text(len(manifest.tensors), 'tensor')} in {count_text(len(manifest.files), 'file')}, "
            f"{bytes_text(manifest.bytes)}"
        )
        return text
    text.append("damaged", "red")
    for problem in scan.defects:
        text.append(f"\n  {problem.file}: {problem.cause}")
    return text


def scan_json(scan: ScanResult) -> dict[str, Any]:
    return {
        "name": scan.name,
        "step": None if scan.manifest is None else scan.manifest.step,
        "whole": scan.is_valid,
        "files": None if scan.manifest is None else len(scan.manifest.files),
        "tensors": None if scan.manifest is None else len(scan.manifest.tensors),
        "bytes": None if scan.manifest is None else scan.manifest.bytes,
        "problems": [{"file": problem.file, "cause": problem.cause} for problem in scan.defects],
    }


def comparison_tables(
    difference: CheckpointDifference, limit: int | None = MAX_SHOWN_TENSORS
) -> list[Text | Table]:
    """Return the differences of names, then of values by size, then of the state.

    Args:
        limit: maximum tensors in each list; None: all.
    """
    parts: list[Text | Table] = []
    for names, label in ((difference.only_a, "A"), (difference.only_b, "B")):
        if names:
            parts.append(Text(f"only in {label}: {_names_text(names, limit)}"))
    if difference.tensors:
        parts.append(_tensor_table(difference.tensors, limit))
    parts.append(
        Text(f"{count_text(difference.equal_tensors, 'tensor')} equal, {len(difference.tensors):,} differ")
    )
    if difference.state_differences:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("state", "A", "B"):
            table.add_column(name, overflow="fold")
        for key, a, b in difference.state_differences:
            table.add_row(Text(key), Text(_value_text(a)), Text(_value_text(b)))
        parts.append(table)
    if difference.ranks_with_different_state:
        parts.append(
            Text(
                "state of each rank (random number generators) differs: ranks "
                + _names_text([str(rank) for rank in difference.ranks_with_different_state], limit)
            )
        )
    return parts


def comparison_json(difference: CheckpointDifference) -> dict[str, Any]:
    return {
        "only_a": list(difference.only_a),
        "only_b": list(difference.only_b),
        "equal": difference.equal_tensors,
        "tensors": [
            {
                "name": tensor.name,
                "dtypes": list(tensor.dtypes),
                "shapes": [list(shape) for shape in tensor.shapes],
                "differing": tensor.unequal_elements,
                "non_finite": tensor.non_finite_elements,
                "largest": tensor.max_absolute_difference,
                "relative": tensor.relative_norm,
            }
            for tensor in difference.tensors
        ],
        "state": {key: [a, b] for key, a, b in difference.state_differences},
        "ranks": list(difference.ranks_with_different_state),
    }


def _tensor_table(tensors: Sequence[TensorDifference], limit: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("differing", "largest", "relative"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(tensors, key=_sort_key)
    for tensor in ordered[:limit]:
        same_shape = tensor.shapes[0] == tensor.shapes[1]
        table.add_row(
            Text(tensor.name),
            _kind_text(tensor),
            f"{tensor.unequal_elements:,}"
            + (f" ({tensor.non_finite_elements:,} not finite)" if tensor.non_finite_elements else "")
            if same_shape
            else MISSING_TEXT,
            number_text(tensor.max_absolute_difference) if same_shape else MISSING_TEXT,
            number_text(tensor.relative_norm),
        )
    if limit is not None and len(ordered) > limit:
        table.add_row(Text(f"and {len(ordered) - limit:,} more", "dim"))
    return table


def _sort_key(difference: TensorDifference) -> tuple[bool, bool, float, str]:
    """Return the sort key: other shapes, then non-finite values, then large relative differences first."""
    relative = float("inf") if difference.relative_norm is None else difference.relative_norm
    return (
        difference.shapes[0] == difference.shapes[1],
        not difference.non_finite_elements,
        -relative,
        difference.name,
    )


def _kind_text(difference: TensorDifference) -> str:
    kinds = [
        f"{dtype} {list(shape)}" for dtype, shape in zip(difference.dtypes, difference.shapes, strict=True)
    ]
    return kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"


def _value_text(value: Any) -> str:
    return MISSING_TEXT if value is None else value_text(value)


def _names_text(names: Sequence[str], limit: int | None) -> str:
    return first_names(names, len(names) if limit is None else limit)
