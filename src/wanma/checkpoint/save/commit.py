"""Commit of a save by rank 0: all rank manifests are merged into one, and the folder gets its final name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import (
    MANIFEST_FILE,
    Box,
    FileEntry,
    Manifest,
    SavedShard,
    TensorEntry,
    dump_manifest,
)
from wanma.checkpoint.save.commit_session import CommitSession
from wanma.checkpoint.save.increments import add_base
from wanma.checkpoint.store.checkpoint_folder import finalize_folder, sync_folder
from wanma.job.errors import WanmaError


def commit_checkpoint(
    partial: Path,
    session: CommitSession,
    step: int,
    metric: float | None,
    state_json: str,
    check_fence: Callable[[], None] = lambda: None,
    base: Path | None = None,
) -> tuple[Path, Manifest]:
    """Wait for every rank's part, then commit the checkpoint.

    Args:
        partial: the folder being written.
        session: the commit session of the ranks.
        step: the saved step.
        metric: value for the choice of the best checkpoint; None: none.
        state_json: the training state as JSON.
        check_fence: raises when these ranks may no longer write into the run.
        base: checkpoint before an incremental one.

    Returns:
        The committed folder and its manifest.

    Raises:
        WanmaError: a rank failed or is late, or the parts do not cover the tensors.
        OSError: the disk failed.
    """
    rank_manifests = session.gather()
    manifest = merge_rank_manifests(rank_manifests, step, metric, json.loads(state_json))
    if any(table.get("changed_rows") for table in rank_manifests):
        manifest = add_base(manifest, rank_manifests, base, partial)
    for name, entry in manifest.files.items():
        if (partial / name).stat().st_size != entry.bytes:
            raise WanmaError(
                f"{name} does not have the size that its rank has written", "check the shared file system"
            )
    with (partial / MANIFEST_FILE).open("xb") as file:
        file.write(dump_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    session.remove_all()
    sync_folder(partial)
    check_fence()
    return finalize_folder(partial, step), manifest


def merge_rank_manifests(
    rank_manifests: list[dict[str, Any]],
    step: int,
    metric: float | None,
    state: dict[str, Any],
    world_size: int | None = None,
) -> Manifest:
    """Merge rank manifests into one manifest.

    Args:
        rank_manifests: the rank manifests.
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
    for table in rank_manifests:
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
                    "give tensors that differ between ranks different names",
                )
            # Ranks that cannot know of each other (replicas outside the mesh) write the same box.
            boxes.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(part)), file["name"])
    tensors = {}
    for name, (dtype, shape) in sorted(kinds.items()):
        saved_elements, total_elements = sum(box.numel for box in boxes[name]), math.prod(shape)
        if saved_elements != total_elements and world_size is None:
            raise WanmaError(
                f"tensor {name}: the shards of all ranks cover {saved_elements:,} of {total_elements:,} "
                "elements",
                "call save on every rank of the run, with all tensors that the rank holds",
            )
        tensors[name] = TensorEntry(
            dtype, shape, tuple(SavedShard(box, file) for box, file in boxes[name].items())
        )
    return Manifest(step, world_size or len(rank_manifests), metric, state, rank_state, files, tensors)
