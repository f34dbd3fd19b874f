"""Data loaders of torch: the processes that one with `persistent_workers` keeps between its iterations."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def drop_persistent_workers(loader: DataLoader[Any]) -> None:
    """Let the next iteration start new processes: old ones draw on from where the last left them."""
    loader._iterator = None


def attributes_without_workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of a loader before its first iteration; its processes cannot be pickled."""
    return {**vars(loader), "_iterator": None}
