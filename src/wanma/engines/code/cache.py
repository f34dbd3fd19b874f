"""Code snapshots of this node, for callers within wanma, and the program for other nodes."""

from __future__ import annotations

from pathlib import Path

from wanma.engines.code import unpack
from wanma.job.errors import WanmaError


def unpack_snapshot(
    archive: Path,
    cache_folder: Path,
    *,
    keep: int = unpack.KEPT_SNAPSHOTS,
    timeout_seconds: float = unpack.LOCK_TIMEOUT_SECONDS,
) -> unpack.UnpackedSnapshot:
    """Return the snapshot of `archive` in `cache_folder`, unpacked once for all processes of the node.

    Raises:
        WanmaError: the archive is missing, damaged or unsafe, or the cache folder is unusable or full.
    """
    try:
        return unpack.unpack(archive, cache_folder, keep, timeout_seconds)
    except unpack.UnpackError as error:
        raise WanmaError(error.message, error.hint) from error


def unpack_program() -> str:
    """Return the source that `python3 -I -S - ARCHIVE CACHE_FOLDER [-- COMMAND ...]` reads on a node."""
    return Path(unpack.__file__).read_text(encoding="utf-8")
