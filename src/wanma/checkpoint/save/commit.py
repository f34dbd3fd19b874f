"""Commit of a save by rank 0: all rank manifests are merged into one, and the folder gets its final name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import (
    MANIFEST,
    Box,
    FileEntry,
    Manifest,
    Shard,
    TensorEntry,
    dump_manifest,
)
from wanma.checkpoint.save.commit_session import Meeting
from wanma.checkpoint.store.checkpoint_folder import publish, sync_folder
from wanma.job.errors import WanmaError


def commit(
    partial: Path,
    meeting: Meeting,
    step: int,
    metric: float | None,
    state_json: str,
    still_mine: Callable[[], None] = lambda: None,
) -> tuple[Path, Manifest]:
    """Wait for every rank's part, then commit the checkpoint.

    Args:
        partial: the folder being written.
        meeting: the commit session of the ranks.
        step: the saved step.
        metric: value for the choice of the best checkpoint; None: none.
        state_json: the training state as JSON.
        still_mine: raises when these ranks may no longer write into the run.

    Returns:
        The committed folder and its manifest.

    Raises:
        WanmaError: a rank failed or is late, or the parts do not cover the tensors.
        OSError: the disk failed.
    """
    manifest = merge(meeting.collect(), step, metric, json.loads(state_json))
    for name, entry in manifest.files.items():
        if (partial / name).stat().st_size != entry.bytes:
            raise WanmaError(f"{name} has not the size that its rank wrote", "check the shared file system")
    with (partial / MANIFEST).open("xb") as file:
        file.write(dump_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    meeting.tidy()
    sync_folder(partial)
    still_mine()
    return publish(partial, step), manifest


def merge(
    tables: list[dict[str, Any]],
    step: int,
    metric: float | None,
    state: dict[str, Any],
    world_size: int | None = None,
) -> Manifest:
    """Merge rank manifests into one manifest.

    Args:
        tables: the rank manifests.
        step: the saved step.
        metric: value for the choice of the best checkpoint; None: none.
        state: the training state.
        world_size: of the run, where rank manifests are missing; the result then covers the given ranks only.

    Raises:
        WanmaError: ranks disagree about a tensor, or together do not cover it.
    """
    files: dict[str, FileEntry] = {}
    rank_state: dict[int, dict[str, Any]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, dict[Box, str]] = {}
    for table in tables:
        if table["rank_state_json"] is not None:
            rank_state[table["rank"]] = json.loads(table["rank_state_json"])
        if (file := table["file"]) is None:
            continue
        files[file["name"]] = FileEntry(file["bytes"], file["sha256"])
        for name, (dtype, shape, offset, part) in table["tensors"].items():
            kind = (dtype, tuple(shape))
            if kinds.setdefault(name, kind) != kind:
                raise WanmaError(
                    f"rank {table['rank']} holds tensor {name} as {kind}, another rank as {kinds[name]}",
                    "give tensors that differ between ranks names that differ",
                )
            # Ranks that cannot know of each other (replicas outside the mesh) write the same box.
            boxes.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(part)), file["name"])
    tensors = {}
    for name, (dtype, shape) in sorted(kinds.items()):
        saved, full = sum(box.elements for box in boxes[name]), math.prod(shape)
        if saved != full and world_size is None:
            raise WanmaError(
                f"the ranks together hold {saved:,} of the {full:,} elements of tensor {name}",
                "save on every rank of the run, each with all tensors that it holds",
            )
        tensors[name] = TensorEntry(
            dtype, shape, tuple(Shard(box, file) for box, file in boxes[name].items())
        )
    return Manifest(step, world_size or len(tables), metric, state, rank_state, files, tensors)
