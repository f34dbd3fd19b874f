"""Choice of a run's claim store: the run directory, another folder, or an object store."""

from __future__ import annotations

from pathlib import Path

from wanma.elastic.claims.object_claims import ObjectClaims
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import ClaimStore

FILE_PROTOCOL = "file://"


def open_claim_store(claims: str | None, run_directory: Path) -> ClaimStore:
    """Return the claim store of a run; reads nothing yet.

    Args:
        claims: `cluster.claims`, a folder or URL; None: the run directory.
        run_directory: run directory.
    """
    if claims is None:
        return FolderClaims(run_directory)
    if "://" in claims and not claims.startswith(FILE_PROTOCOL):
        return ObjectClaims(claims)
    return FolderClaims(Path(claims.removeprefix(FILE_PROTOCOL)).expanduser().absolute())
