"""Limit of the size of a code snapshot, against data and checkpoints that are sent by accident."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from wanma.engines.code.listing import IGNORE_FILE, CodeListing, named
from wanma.job.errors import WanmaError
from wanma.observe.units import bytes_text

_SHOWN = 5
_DOMINANT_SHARE = 0.9
"""Share of a folder from which one child stands for it."""


@dataclass
class _Node:
    """File or folder with its totals."""

    children: dict[bytes, _Node] = field(default_factory=lambda: defaultdict(_Node))
    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.bytes += size
        self.files += 1


def check_size(folder: Path, listing: CodeListing, most_bytes: int, most_files: int) -> None:
    """Refuse a listing that is too large, with its largest parts.

    Raises:
        WanmaError: more than `most_bytes` or `most_files`.
    """
    sizes = {path: status.st_size for path, status in listing.files.items()}
    total = sum(sizes.values())
    if total > most_bytes:
        limit, by = bytes_text(most_bytes), "bytes"
    elif len(sizes) > most_files:
        limit, by = f"{most_files:,} files", "files"
    else:
        return
    parts = ", ".join(
        f"{name} ({bytes_text(size)}, {files:,} {'file' if files == 1 else 'files'})"
        for name, size, files in largest_parts(sizes, by)
    )
    raise WanmaError(
        f"the code in {folder} has {bytes_text(total)} in {len(sizes):,} files, more than {limit}; "
        f"the largest parts: {parts}",
        f"add what is not code to .gitignore or {IGNORE_FILE}, or put data at a path that all nodes see",
    )


def largest_parts(sizes: dict[bytes, int], by: str) -> list[tuple[str, int, int]]:
    """Return (name, bytes, files) of the largest parts by `bytes` or `files`; a folder's name ends in `/`."""
    root = _Node()
    for path, size in sizes.items():
        node = root
        node.add(size)
        for part in path.split(b"/"):
            node = node.children[part]
            node.add(size)
    largest = sorted(root.children.items(), key=lambda item: (-getattr(item[1], by), item[0]))
    shown = []
    for path, node in largest[:_SHOWN]:
        while node.children:
            name, child = max(node.children.items(), key=lambda item: getattr(item[1], by))
            if getattr(child, by) < _DOMINANT_SHARE * getattr(node, by):
                break
            path, node = os.path.join(path, name), child
        shown.append((named([path]) + ("/" if node.children else ""), node.bytes, node.files))
    return shown
