"""Folder of what wanma keeps between runs of one user on one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `wanma` in the user's cache folder: `XDG_CACHE_HOME`, or `~/.cache` (XDG Base Directory 0.8)."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "wanma"
