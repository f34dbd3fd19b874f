"""Incremental checkpoints: changed rows of some tensors, and hard links to the files that hold the others.

So a full checkpoint may be removed while increments of it are kept: its files stay as long as one has them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import ChangedRows, Manifest, SavedShard, base_file_name
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.errors import WanmaError


def add_base(
    manifest: Manifest, rank_manifests: list[dict[str, Any]], base: Path | None, partial: Path
) -> Manifest:
    """Return the manifest of an incremental checkpoint with its unchanged rows, whose files it links.

    Args:
        manifest: tensors that were saved in full.
        rank_manifests: what each rank has written.
        base: checkpoint before it, full or incremental.
        partial: folder being written.

    Raises:
        WanmaError: there is no such checkpoint, or the file system has no hard links.
    """
    if base is None:
        raise WanmaError("ranks disagree whether the save is incremental", "set checkpoint.full_every = 1")
    earlier = read_manifest(base)
    changes: dict[str, list[ChangedRows]] = {}
    for table in rank_manifests:
        for name, count in table.get("changed_rows", {}).items():
            rows = changes.setdefault(name, [])
            if count:
                rows.append(ChangedRows(table["file"]["name"], count))
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    for name, rows in changes.items():
        entry = earlier.tensors[name]
        shards = tuple(SavedShard(shard.box, base_file_name(shard.file)) for shard in entry.shards)
        tensors[name] = replace(entry, shards=shards, changes=tuple(rows))
        for file in {shard.file for shard in entry.shards}:
            link = base_file_name(file)
            if link not in files:
                _link(base / file, partial / link)
                files[link] = earlier.files[file]
    return replace(manifest, tensors=dict(sorted(tensors.items())), files=files)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        raise WanmaError(
            f"an incremental checkpoint needs hard links, and {source} cannot be linked: "
            f"{error.strerror or error}",
            "set checkpoint.full_every = 1, or use another file system",
        ) from error
