"""Claims of generations (fencing tokens) in a run directory: each start of ranks claims its number.

    generations/7           created exclusively by the coordinator of generation 7, before its ranks start
    generations/7.lost.2    node 2 no longer hears that coordinator, and has ended its ranks

The first line of a claim holds the rendezvous endpoint; another line closes it: a newer generation exists, or
the run has ended. Lines are only appended, because a closing line may arrive before a slow writer's own one.
Ranks check their own claim before they commit or record anything (`GenerationFence`). Files are opened anew
for every check, which is what network file systems keep consistent: a missing name may stay missing in their
caches for a while. Times are never compared between nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError

FOLDER = "generations"


@dataclass(frozen=True)
class Claim:
    """Claim of one generation: one start of the run's ranks, or the intention to start them."""

    generation: int
    place: str
    """Rendezvous endpoint HOST:PORT; empty: the claim is being written, or its writer died over it."""
    coordinator: str
    """Identity of the coordinator, unique among processes."""
    host: str
    """Host name of the coordinator, for people."""
    node: int | None = None
    """Node rank of the coordinator; None while it is undecided."""
    followed: bool = False
    ended: int | None = None
    """Exit code of the run; None while it runs."""


def create_claim(run: Path, claim: Claim) -> bool:
    """Claim a generation and close the older ones; return False if another coordinator has it.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    path = _claim_path(run, claim.generation)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _append(path, asdict(claim), os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            # A file server may process the request twice: then the claim is this coordinator's own.
            existing = read_claim(run, claim.generation)
            if existing is None or existing.coordinator != claim.coordinator:
                return False
        for older_generation in _open_generations(run, claim.generation):
            _append(_claim_path(run, older_generation), {"followed_by": claim.generation})
    except OSError as error:
        raise WanmaError(
            f"cannot claim generation {claim.generation} of the run in {path}: {error.strerror or error}",
            "free space on its disk, correct its permissions, or choose another with --run-dir DIR",
        ) from error
    return True


def read_claim(run: Path, generation: int) -> Claim | None:
    """Return the claim of `generation`; None if this node's run directory has none."""
    try:
        lines = _claim_path(run, generation).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    values: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # a line that is being written, or whose writer died
            values.update(
                {name: value for name, value in dict(json.loads(line)).items() if value is not None}
            )
    place, coordinator, host = (values.get(name, "") for name in ("place", "coordinator", "host"))
    return Claim(
        generation, place, coordinator, host, values.get("node"), "followed_by" in values, values.get("ended")
    )


def newest_claim(run: Path) -> Claim | None:
    """Return the claim with the highest number; None if there is none."""
    generations = _generations(run)
    return read_claim(run, generations[-1]) if generations else None


def record_run_end(run: Path, generation: int, exit_code: int) -> None:
    """Record that the run has ended, so that no node looks for its coordinator. Raises `OSError`."""
    _append(_claim_path(run, generation), {"ended": exit_code})


def write_heartbeat(run: Path, generation: int) -> None:
    """Write the coordinator's heartbeat, for nodes that cannot reach it by network. Raises `OSError`."""
    os.utime(_claim_path(run, generation))


def read_heartbeat(run: Path, generation: int) -> int:
    """Return a number that changes with every `write_heartbeat`; -1: no such claim. Raises `OSError`."""
    try:
        descriptor = os.open(_claim_path(run, generation), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def vote_coordinator_lost(run: Path, generation: int, node_rank: int) -> None:
    """Record that `node_rank` has ended its ranks because it lost the coordinator. Raises `OSError`."""
    _vote_path(run, generation, node_rank).touch()


def withdraw_vote(run: Path, generation: int, node_rank: int) -> None:
    """Remove the vote of `node_rank`, which hears the coordinator again. Raises `OSError`."""
    _vote_path(run, generation, node_rank).unlink(missing_ok=True)


def coordinator_lost_votes(run: Path, generation: int) -> frozenset[int]:
    """Return the nodes that have recorded the loss of the coordinator."""
    names = (path.name.rpartition(".")[2] for path in (run / FOLDER).glob(f"{generation}.lost.*"))
    return frozenset(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True)
class GenerationFence:
    """Generation fence: prevents ranks of an older generation from writing into the run of a newer one.

    Microseconds remain between a check and the write after it. A missing claim is no fence: on a node whose
    run directory is private there is nothing to protect.
    """

    run: Path
    generation: int

    def check(self) -> None:
        """Raise `WanmaError` if a newer generation exists, `OSError` if that cannot be read."""
        if not _is_closed(_claim_path(self.run, self.generation)):
            return
        own_claim, newest = read_claim(self.run, self.generation), newest_claim(self.run)
        if own_claim is not None and own_claim.followed and newest is not None:
            raise WanmaError(
                f"generation {self.generation} of this run was superseded by generation {newest.generation} "
                f"(coordinator {newest.place}): this process stops writing to the run directory",
                "wait: the run continues there, and this node rejoins when it reaches that address",
            )


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
