"""Claims of generations in a folder that all nodes share, by default the run directory.

    generations/7           created exclusively by the coordinator of generation 7, before its ranks start
    generations/7.lost.2    node 2 no longer hears that coordinator, and has ended its ranks

The first line of a claim holds the rendezvous endpoint; another line closes it: a newer generation exists, or
the run has ended. Lines are only appended, because a closing line may arrive before a slow writer's own one.
Ranks check their own claim before they commit or record anything (`FolderFence`). Files are opened anew for
every check, which is what network file systems keep consistent: a missing name may stay missing in their
caches for a while.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from wanma.job.errors import WanmaError
from wanma.job.run.generation_claims import Claim, superseded_error

FOLDER = "generations"


@dataclass(frozen=True)
class FolderClaims:
    """Claims in `folder`, of one run; see `wanma.job.run.generation_claims.ClaimStore`."""

    folder: Path
    deadline_seconds: ClassVar[float | None] = None
    heartbeat_seconds: ClassVar[float] = 1.0
    poll_seconds: ClassVar[float] = 0.1

    @property
    def location(self) -> str:
        return str(self.folder)

    def check_usable(self) -> None:
        """Accept any folder: a file can be created exclusively on every file system."""

    def create(self, claim: Claim) -> bool:
        """Claim a generation and close the older ones; return False if another coordinator has it.

        Raises:
            WanmaError: the folder cannot be written to.
        """
        path = _claim_path(self.folder, claim.generation)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _append(path, asdict(claim), os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                # A file server may process the request twice: then the claim is this coordinator's own.
                existing = self.read(claim.generation)
                if existing is None or existing.coordinator != claim.coordinator:
                    return False
            for older_generation in _open_generations(self.folder, claim.generation):
                _append(_claim_path(self.folder, older_generation), {"followed_by": claim.generation})
        except OSError as error:
            raise WanmaError(
                f"cannot claim generation {claim.generation} of the run in {path}: {error.strerror or error}",
                "free space on its disk, correct its permissions, or set --run-dir or cluster.claims",
            ) from error
        return True

    def read(self, generation: int) -> Claim | None:
        """Return the claim of `generation`; None if this node's folder has none."""
        try:
            lines = _claim_path(self.folder, generation).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        values: dict[str, Any] = {}
        for line in lines:
            # A line may be incomplete: it is being written, or its writer died.
            with contextlib.suppress(ValueError, TypeError):
                values.update(
                    {name: value for name, value in dict(json.loads(line)).items() if value is not None}
                )
        place, coordinator, host = (values.get(name, "") for name in ("place", "coordinator", "host"))
        return Claim(
            generation,
            place,
            coordinator,
            host,
            values.get("node"),
            "followed_by" in values,
            values.get("ended"),
        )

    def newest(self) -> Claim | None:
        """Return the claim with the highest number; None if there is none."""
        generations = _generations(self.folder)
        return self.read(generations[-1]) if generations else None

    def newest_after(self, generation: int) -> Claim | None:
        """Return the newest claim, if its number is higher than `generation`."""
        newest = self.newest()
        return newest if newest is not None and newest.generation > generation else None

    def record_end(self, generation: int, exit_code: int) -> None:
        """Record that the run has ended, so that no node looks for its coordinator. Raises `OSError`."""
        _append(_claim_path(self.folder, generation), {"ended": exit_code})

    def write_heartbeat(self, generation: int) -> None:
        """Write the coordinator's heartbeat, for nodes that cannot reach it by network. Raises `OSError`."""
        os.utime(_claim_path(self.folder, generation))

    def read_heartbeat(self, generation: int) -> int | None:
        """Return a number that changes with every `write_heartbeat`; None: no such claim."""
        try:
            descriptor = os.open(_claim_path(self.folder, generation), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def vote_lost(self, generation: int, node_rank: int) -> None:
        """Record that `node_rank` has ended its ranks because it lost the coordinator. Raises `OSError`."""
        _vote_path(self.folder, generation, node_rank).touch()

    def withdraw_vote(self, generation: int, node_rank: int) -> None:
        """Remove the vote of `node_rank`, which hears the coordinator again. Raises `OSError`."""
        _vote_path(self.folder, generation, node_rank).unlink(missing_ok=True)

    def lost_votes(self, generation: int) -> frozenset[int]:
        """Return the nodes that have recorded the loss of the coordinator."""
        names = (path.name.rpartition(".")[2] for path in (self.folder / FOLDER).glob(f"{generation}.lost.*"))
        return frozenset(int(name) for name in names if name.isdecimal())

    def fence(self, generation: int) -> FolderFence:
        """Return the fence of the ranks of `generation`."""
        return FolderFence(self, generation)


@dataclass(frozen=True)
class FolderFence:
    """Generation fence by the claims of a folder; a check takes microseconds."""

    claims: FolderClaims
    generation: int

    def check(self) -> None:
        """Raise `WanmaError` if a newer generation exists, `OSError` if that cannot be read."""
        if not _is_closed(_claim_path(self.claims.folder, self.generation)):
            return
        own_claim, newest = self.claims.read(self.generation), self.claims.newest()
        if own_claim is not None and own_claim.followed and newest is not None:
            raise superseded_error(self.generation, newest)

    def check_record(self) -> None:
        """Check as `check` does: a read of a small file costs little."""
        self.check()


def _open_generations(run: Path, upper_bound: int) -> list[int]:
    """Return the open claims below `upper_bound`, oldest first: a kill leaves none below a closed one."""
    open_generations: list[int] = []
    for generation in reversed([generation for generation in _generations(run) if generation < upper_bound]):
        if _is_closed(_claim_path(run, generation)):
            break
        open_generations.insert(0, generation)
    return open_generations


def _is_closed(path: Path) -> bool:
    """Return True if a line was appended to the claim, whatever became of its writer's own line."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n") > 1
    return False


def _append(path: Path, value: dict[str, object], create_flags: int = 0) -> None:
    """Append a line, after an empty one without `create_flags`: two line ends mark a closed claim."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create_flags, 0o644)
    try:
        os.write(descriptor, (b"" if create_flags else b"\n") + json.dumps(value).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _claim_path(run: Path, generation: int) -> Path:
    return run / FOLDER / str(generation)


def _vote_path(run: Path, generation: int, node: int) -> Path:
    return run / FOLDER / f"{generation}.lost.{node}"


def _generations(run: Path) -> list[int]:
    try:
        names = [path.name for path in (run / FOLDER).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())
