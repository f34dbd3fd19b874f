"""Tracker of Weights & Biases; its own variables say where: WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY.

W&B's own reader of a run's file is gone from its package. The file has LevelDB's log framing (blocks of
32 KiB; pieces with a header of checksum, length and kind; google/leveldb, doc/log_format.md) after a header
of seven bytes, and in it protobuf records of the package's own type.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.observe.trackers.tracker import Scalars, TrackedRun

STEP_KEY = "step"
"""Key of a row that has the optimizer step."""
QUIET_SECONDS, PATIENCE_SECONDS = 2.0, 15.0
"""Time without a write after which a record is whole, and the longest wait for that.

The process that writes it is W&B's own, and outlives a tracker that was killed.
"""
_FILE_HEADER_BYTES, _PIECE_HEADER, _BLOCK_BYTES = 7, struct.Struct("<IHB"), 1 << 15
_FULL, _LAST = 1, 4
"""Kinds of a piece that end a record."""
_EXIT_CODES = {"finished": 0, "interrupted": 0}
"""Exit code by outcome; another is 1, which W&B shows as failed."""


class WandbTracker:
    """Tracker of one start of a run; all starts of a run are one group.

    Offline runs of W&B cannot be resumed, so each start is a run of its own; what an earlier start wrote
    is read back from its file.
    """

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def open(self, run: TrackedRun) -> Mapping[str, int] | None:
        folders = [Path(folder) for folder in run.state.get("folders", ())]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wanma"),
            group=run.name,
            name=run.name if not folders else f"{run.name}-{len(folders) + 1}",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=self._wandb.Settings(console="off", x_disable_stats=True),
        )
        # W&B's own step ends with the first row of it, and a validation comes after the record of its step.
        self._run.define_metric("*", step_metric=STEP_KEY)
        # `dir` of a run is the folder of its media, below that of its record.
        run.state.setdefault("folders", []).append(str(Path(self._run.dir).parent))
        if not folders or not folders[-1].is_dir():
            return None  # what was synchronized may be removed
        return _newest_steps(folders)

    def log(self, scalars: Sequence[Scalars]) -> None:
        for entry in scalars:
            self._run.log({**entry.values, STEP_KEY: entry.step, "time": entry.time})

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, 1))


def _newest_steps(folders: Iterable[Path]) -> dict[str, int]:
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
