"""Marks of the remote data that a node has prepared: by them engines find nodes whose cache may hold it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from wanma.data.stores.filesystems import is_remote_entry
from wanma.job.run.user_cache import user_cache_folder
from wanma.job.sections.data import DataSection

_FOLDER = "entries"
_USER_CACHE = Path("~/.cache/wanma")
"""Cache of a user on a node whose environment is unknown; see `user_cache_folder`."""


def mark_prepared_entries(section: DataSection) -> None:
    """Leave a mark in the cache of this node for each remote entry of the job.

    The mark stays when the cache makes room, and no failure to leave it matters: it only says where to look
    first.
    """
    folder = user_cache_folder() if section.cache is None else Path(section.cache).expanduser()
    for mark in _marks(section, folder).values():
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def marks_of_remote_entries(section: DataSection) -> dict[str, str]:
    """Return the path of the mark of each remote entry on any node; none if the cache has a relative path."""
    folder = _USER_CACHE if section.cache is None else Path(section.cache)
    if not (folder.is_absolute() or str(folder).startswith("~")):
        return {}
    return {entry: str(mark) for entry, mark in _marks(section, folder).items()}


def _marks(section: DataSection, folder: Path) -> dict[str, Path]:
    entries = [entry for _, source in section.located_sources for entry in source.entries]
    return {
        entry: folder / _FOLDER / hashlib.sha256(entry.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        for entry in entries
        if is_remote_entry(entry)
    }
