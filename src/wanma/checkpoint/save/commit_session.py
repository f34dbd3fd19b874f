"""Commit session of the ranks of one save, by small JSON files in the folder being written.

This works in a background thread, where a collective would interleave with the training's own, and on
any file system that all ranks share. Each rank leaves a rank manifest of what it wrote; rank 0 waits for
all of them and commits. A rank that fails leaves a note instead, and every waiting rank aborts with
its text. The fate of the folder shows the outcome: renamed, it is committed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import dump_json
from wanma.job.errors import WanmaError, ranks_text
from wanma.job.run.run_directory import write_atomically

_ABORT_ATTEMPTS = 5
_ABORT_PAUSE_SECONDS = 0.2
_REMOVAL_WAIT_SECONDS = 5.0
"""Longest wait for the other ranks, some of which may be dead, before their folder is removed."""
_REMOVAL_PAUSE_SECONDS = 0.02


class CommitSession:
    """Commit session of one save, on one rank.

    Args:
        partial: the folder being written, with a name unique among saves.
        rank: this rank.
        world_size: number of ranks.
        deadline_seconds: how long rank 0 waits for the rank manifests of the others after its own.
    """

    def __init__(self, partial: Path, rank: int, world_size: int, deadline_seconds: float) -> None:
        self._partial = partial
        self._rank = rank
        self._world_size = world_size
        self._deadline_seconds = deadline_seconds
        self._inode: int | None = None
        """Inode of the folder, which a rename keeps; None until `open`."""

    def create_folder(self) -> None:
        """Make the folder, unless another rank has; only once, because it may be removed meanwhile."""
        if self._inode is None:
            self._partial.mkdir(parents=True, exist_ok=True)
            self._inode = self._partial.stat().st_ino

    def publish(self, rank_manifest: dict[str, Any]) -> None:
        """Write this rank's manifest where rank 0 finds it."""
        write_atomically(self._path("table", self._rank), dump_json(rank_manifest, "the rank manifest"))

    def abort(self, message: str) -> None:
        """Notify all ranks that this rank's part failed, unless rank 0 has removed the folder already.

        Raises:
            OSError: not even the note could be written; the others fail at their deadline.
        """
        for attempt in range(_ABORT_ATTEMPTS):
            if self._inode is not None and not self._partial.exists():
                return
            try:
                self.create_folder()
                write_atomically(self._path("failed", self._rank), json.dumps({"message": message}))
                return
            except OSError:  # on a full disk, room for a note comes when the others remove their parts
                if attempt == _ABORT_ATTEMPTS - 1:
                    self._path("failed", self._rank).touch()  # its name alone takes no room
                    return
                time.sleep(_ABORT_PAUSE_SECONDS)

    def gather(self) -> list[dict[str, Any]]:
        """Wait for the manifests of all ranks and return them in the order of ranks (rank 0).

        Raises:
            WanmaError: a rank failed, or some did not finish by the deadline.
        """
        expected_names = {self._path("table", rank).name for rank in range(self._world_size)}
        names: set[str] = set()
        for names in self._poll_folder(self._deadline_seconds):
            if expected_names <= names:
                tables = (self._path("table", rank) for rank in range(self._world_size))
                return [json.loads(table.read_text("utf-8")) for table in tables]
        if not self._partial.exists():
            raise WanmaError(
                f"the folder {self._partial} was removed during the save", "give each run its own folder"
            )
        missing = [rank for rank in range(self._world_size) if self._path("table", rank).name not in names]
        raise WanmaError(
            f"{ranks_text(missing)} did not finish writing within {self._deadline_seconds:g} s after rank 0",
            f"check that {self._partial.parent} is on a file system shared by all nodes, and check its write "
            "speed",
        )

    def announce_commit(self) -> None:
        """Tell ranks that do not see the folder that it is committed (rank 0); here all see it."""

    def wait_for_commit(self, final: Path) -> None:
        """Wait until rank 0 has committed (other ranks).

        Raises:
            WanmaError: it did not.
        """
        # Rank 0 starts its own deadline when it has written its part, which may be later.
        for _ in self._poll_folder(2 * self._deadline_seconds):
            pass
        if self._partial.exists():
            raise WanmaError(
                f"rank 0 did not commit within {2 * self._deadline_seconds:g} s",
                "see the log of rank 0 for the cause",
            )
        if not final.exists() or final.stat().st_ino != self._inode:  # gone, or an older save of that step
            raise WanmaError("rank 0 aborted the save", "see the log of rank 0 for the cause")

    def remove_own(self) -> None:
        """Remove this rank's manifest."""
        self._path("table", self._rank).unlink(missing_ok=True)

    def remove_folder(self, waits_for_ranks: bool) -> None:
        """Remove the folder of a failed save (rank 0).

        Args:
            waits_for_ranks: wait some seconds until all other ranks have left their notes. A rank that
                comes later makes the folder anew, and after the last save nobody would remove that.

        Raises:
            OSError: the disk failed.
        """
        expected_names = {self._path("failed", rank).name for rank in range(1, self._world_size)}
        deadline = time.monotonic() + min(self._deadline_seconds, _REMOVAL_WAIT_SECONDS)
        while self._partial.exists():
            is_late = time.monotonic() > deadline
            if (
                not waits_for_ranks
                or is_late
                or expected_names <= {path.name for path in self._partial.iterdir()}
            ):
                try:
                    shutil.rmtree(self._partial)
                    return
                except OSError:  # a rank wrote into it meanwhile
                    if is_late:
                        raise
            time.sleep(_REMOVAL_PAUSE_SECONDS)

    def remove_all(self) -> None:
        """Remove all rank manifests, once they are merged (rank 0)."""
        for rank in range(self._world_size):
            self._path("table", rank).unlink()

    def _poll_folder(self, seconds: float) -> Iterator[set[str]]:
        """Yield the names in the folder repeatedly until the deadline, or until it is gone."""
        # Two ranks poll every 10 ms; thousands would overload a shared file system that way.
        stop, pause, longest = time.monotonic() + seconds, 0.001, min(1.0, 0.01 + self._world_size / 4000)
        while True:
            try:
                names = {path.name for path in self._partial.iterdir()}
                notes = sorted(name for name in names if name.startswith("failed-"))
                note = (self._partial / notes[0]).read_text("utf-8") if notes else None
            except FileNotFoundError:
                return
            if note is not None:
                raise WanmaError(json.loads(note)["message"] if note else _disk_full_message(notes[0]))
            yield names
            if time.monotonic() > stop:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _path(self, kind: str, rank: int) -> Path:
        return self._partial / f"{kind}-{rank:05d}.json"


def _disk_full_message(file_name: str) -> str:
    """Return the message of an empty note, for whose text there was no room."""
    return f"rank {int(file_name.removeprefix('failed-').removesuffix('.json'))}: No space left on device"
