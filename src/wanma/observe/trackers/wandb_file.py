"""Reader of the record of a W&B run: which steps have arrived in it.

W&B's own reader is gone from its package. The file has LevelDB's log framing (blocks of 32 KiB; pieces with a
header of checksum, length and kind; google/leveldb, doc/log_format.md) after a header of seven bytes, and in
it protobuf records of the package's own type.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

STEP_KEY = "step"
"""Key of a row that has the optimizer step."""
QUIET_SECONDS, PATIENCE_SECONDS = 2.0, 15.0
"""Time without a write after which a record is whole, and the longest wait for that.

The process that writes it is W&B's own, and outlives a tracker that was killed.
"""
_FILE_HEADER_BYTES, _PIECE_HEADER, _BLOCK_BYTES = 7, struct.Struct("<IHB"), 1 << 15
_FULL, _LAST = 1, 4
"""Kinds of a piece that end a record."""


def newest_steps(folders: Iterable[Path]) -> dict[str, int]:
    """Return the newest step and the newest validation in the records of some folders; 0: there is none."""
    from wandb.proto import wandb_internal_pb2

    newest = {"step": 0, "validation": 0}
    for path in [path for folder in folders for path in sorted(folder.glob("run-*.wandb"))]:
        _wait_until_quiet(path)
        for text in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            if not record.HasField("history"):
                continue
            row = {(item.nested_key or [item.key])[0]: item.value_json for item in record.history.item}
            if STEP_KEY in row:
                kind = "validation" if any(tag.startswith("validation/") for tag in row) else "step"
                newest[kind] = max(newest[kind], int(json.loads(row[STEP_KEY])))
    return newest


def _wait_until_quiet(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and time.time() - path.stat().st_mtime < QUIET_SECONDS:
        time.sleep(0.1)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file; a torn one at its end is left out."""
    position, record = _FILE_HEADER_BYTES, b""
    while position + _PIECE_HEADER.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _PIECE_HEADER.size:
            position += left
            continue
        _, size, kind = _PIECE_HEADER.unpack_from(data, position)
        position += _PIECE_HEADER.size
        if position + size > len(data):
            return
        record += data[position : position + size]
        position += size
        if kind in (_FULL, _LAST):
            yield record
            record = b""
