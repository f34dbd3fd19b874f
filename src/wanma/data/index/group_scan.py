"""Scan of one group of files, whose layout is kept in the cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from wanma.data.formats.format import FileGroup, Format, Layout
from wanma.data.index.layout_file import LayoutFileCorruptError, hash_layout, open_layout, serialize
from wanma.data.stores.atomic_file import write_once

log = logging.getLogger("wanma.data")

_SAMPLED_BLOCKS = 16
_SAMPLED_BYTES = 4096


def open_or_scan(group: FileGroup, data_format: Format, path: Path) -> Layout:
    """Open the layout of a group at `path`; a missing or damaged one is found again by a scan.

    One process scans, the others wait for it.

    Raises:
        BadDataError: the files are damaged or have another format.
        OSError: the layout cannot be written.
    """
    if (stored := open_if_whole(path)) is not None:
        return stored
    with write_once(path) as file:
        if file is not None:
            layout = data_format.scan(group)
            identity = hash_layout(layout, _content_facts(group, layout))
            file.writelines(serialize(replace(layout, identity=identity)))
    return open_layout(path)


def open_if_whole(path: Path) -> Layout | None:
    """Open a layout file; a damaged one is removed."""
    try:
        return open_layout(path)
    except FileNotFoundError:
        return None
    except LayoutFileCorruptError as error:
        log.warning("%s is damaged (%s) and is built again", path, error)
        path.unlink(missing_ok=True)
        return None


def _content_facts(group: FileGroup, layout: Layout) -> dict[str, Any]:
    """Return facts about the content that are equal on all nodes: sizes, and a hash of sampled blocks.

    Blocks are read only if the scan has not hashed the whole content. Two files that differ elsewhere only,
    and in no position, are told apart by their versions, but not by this hash.
    """
    sizes = [file.size for file in group.files]
    if layout.digest:
        return {"sizes": sizes}
    content_hash = xxhash.xxh3_128()
    for number, size in enumerate(sizes):
        starts = np.linspace(0, max(size - _SAMPLED_BYTES, 0), _SAMPLED_BLOCKS, dtype=np.int64)
        ranges = [(start, start + _SAMPLED_BYTES) for start in np.unique(starts).tolist()]
        for block in group.open(number).read_ranges(ranges):
            content_hash.update(block)
    return {"sizes": sizes, "blocks": content_hash.hexdigest()}
