"""Who may write into a run directory: each start of ranks on several machines claims its number there.

    generations/7           created exclusively by the coordinator of start 7, before any of its ranks lives
    generations/7.lost.2    node 2 no longer hears that coordinator, and has ended its ranks

One line of a claim says where the run meets; another one closes it: another has followed, or the run has
ended. All are appended, because what closes a claim may come before a slow writer's own line. Ranks look at
their own claim before they commit or record anything (`Fence`). Files are opened anew for every look, which
is what network file systems keep consistent: a name that was missing may stay so in their caches for a
while. Times are never compared between machines.
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
    """One start of the run's ranks, or the intention to."""

    generation: int
    place: str
    """HOST:PORT of the coordinator; empty: the claim is being written, or its writer died over it."""
    coordinator: str
    """A name that no other process has."""
    host: str
    """The coordinator's machine, for people."""
    node: int | None = None
    """The coordinator's node; None where that is not decided yet."""
    followed: bool = False
    ended: int | None = None
    """The run's exit code."""


def make(run: Path, claim: Claim) -> bool:
    """Claim a generation; what is older is closed before this returns. False: another has it.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    path = _path(run, claim.generation)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _append(path, asdict(claim), os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            # A server may have answered twice: then it is this one's after all.
            there = read(run, claim.generation)
            if there is None or there.coordinator != claim.coordinator:
                return False
        for older in _still_open(run, claim.generation):
            _append(_path(run, older), {"followed_by": claim.generation})
    except OSError as error:
        raise WanmaError(
            f"cannot claim generation {claim.generation} of the run in {path}: {error.strerror or error}",
            "free the place or its permissions, or choose another run directory with --run-dir DIR",
        ) from error
    return True


def read(run: Path, generation: int) -> Claim | None:
    """The claim of that number; None: there is none, or not in what this machine has as run directory."""
    try:
        lines = _path(run, generation).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    said: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # being written, or its writer died over it
            said.update({name: value for name, value in dict(json.loads(line)).items() if value is not None})
    place, coordinator, host = (said.get(name, "") for name in ("place", "coordinator", "host"))
    return Claim(
        generation, place, coordinator, host, said.get("node"), "followed_by" in said, said.get("ended")
    )


def newest(run: Path) -> Claim | None:
    """The claim with the highest number; None: nobody has claimed any."""
    generations = _generations(run)
    return read(run, generations[-1]) if generations else None


def end(run: Path, generation: int, exit_code: int) -> None:
    """Say that the run has ended, so that nobody looks for its coordinator. Raises `OSError`."""
    _append(_path(run, generation), {"ended": exit_code})


def beat(run: Path, generation: int) -> None:
    """A sign of life of the coordinator, for those whom the network keeps from it. Raises `OSError`."""
    os.utime(_path(run, generation))


def pulse(run: Path, generation: int) -> int:
    """A number that changes with every `beat`; -1: there is no such claim. Raises `OSError`."""
    try:
        descriptor = os.open(_path(run, generation), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def vote(run: Path, generation: int, node: int) -> None:
    """Say that `node` has ended its ranks because it does not hear the coordinator. Raises `OSError`."""
    _vote(run, generation, node).touch()


def withdraw(run: Path, generation: int, node: int) -> None:
    """It hears one again. Raises `OSError`."""
    _vote(run, generation, node).unlink(missing_ok=True)


def votes(run: Path, generation: int) -> frozenset[int]:
    """The nodes that have said so."""
    names = (path.name.rpartition(".")[2] for path in (run / FOLDER).glob(f"{generation}.lost.*"))
    return frozenset(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True)
class Fence:
    """Keeps ranks of an older start from writing into the run of a newer one.

    Between a look and the write after it there remain microseconds. What is not there is no fence: on a
    machine whose run directory is its own there is nothing to protect.
    """

    run: Path
    generation: int

    def check(self) -> None:
        """Raises `WanmaError` when another start has followed, `OSError` when that cannot be told."""
        if not _closed(_path(self.run, self.generation)):
            return
        mine, theirs = read(self.run, self.generation), newest(self.run)
        if mine is not None and mine.followed and theirs is not None:
            raise WanmaError(
                f"start {self.generation} of this run has been followed by start {theirs.generation}, which "
                f"meets at {theirs.place}: nothing more of the older one is written",
                "the run goes on there; this machine takes part again as soon as it reaches that address",
            )


def _still_open(run: Path, before: int) -> list[int]:
    """The claims that the new one has to close, oldest first: so a kill leaves no open one below a closed."""
    found: list[int] = []
    for older in reversed([generation for generation in _generations(run) if generation < before]):
        if _closed(_path(run, older)):
            break
        found.insert(0, older)
    return found


def _closed(path: Path) -> bool:
    """Has been appended to, whatever became of the line of whoever made it."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n") > 1
    return False


def _append(path: Path, value: dict[str, object], new: int = 0) -> None:
    """A line, after an empty one but in a `new` file: two ends of lines say that a claim is closed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | new, 0o644)
    try:
        os.write(descriptor, (b"" if new else b"\n") + json.dumps(value).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _path(run: Path, generation: int) -> Path:
    return run / FOLDER / str(generation)


def _vote(run: Path, generation: int, node: int) -> Path:
    return run / FOLDER / f"{generation}.lost.{node}"


def _generations(run: Path) -> list[int]:
    try:
        names = [path.name for path in (run / FOLDER).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())
