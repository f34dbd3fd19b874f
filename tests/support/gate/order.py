"""Order of test files, and their distribution over processes: a scheduler of pytest-xdist.

Pure tests come first, as they fail at once and always. Files with processes follow, the longest first by
their recorded times (`tests/durations.json`, which `python -m support.gate.order RECORDS` writes), so that
none of them comes last and alone. Files that need the same cluster are one unit of work: beside each other
they would wait for its lock.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections import Counter
from functools import cache
from math import ceil
from pathlib import Path

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from support.gate.records import read_records

TESTS = Path(__file__).parents[2]
DURATIONS = TESTS / "durations.json"
LEAST_SECONDS = 3.0
"""Time of a file below which it is not recorded."""
MOST_SECONDS = 60.0
"""Time of a unit of work above which its file is divided, unless its tests share a fixture."""
_UNKNOWN_SECONDS = 20.0
"""Time of a file with processes that has no record, as a new one has none."""
_IMPURE_WORDS = re.compile(
    r"\b(subprocess|multiprocessing|threading|socket|signal|run_job|run_ranks|Desk|sleep|monotonic|perf_counter"
    r"|torch\.compile|executes?)\b"
)
_SHARED_FIXTURE = re.compile(r"scope=\"(module|session|class|package)\"")
_SUPPORT_IMPORT = re.compile(r"^ *from (support[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_CLUSTER = re.compile(r"^from support\.(slurm|ssh) import", re.MULTILINE)


@cache
def is_pure(file: Path) -> bool:
    """Return whether neither the file nor what it imports from `support` names processes, threads or time."""
    return not any(_IMPURE_WORDS.search(_text(one)) for one in files_behind(file))


@cache
def unit_of(file: Path) -> tuple[str, int]:
    """Return the name of the unit of work that the file belongs to, and the number of parts that it has."""
    if clusters := _CLUSTER.findall(_text(file)):
        return sorted(clusters)[0], 1  # that of Slurm is locked by file, those of SSH by test
    name = _name(file)
    seconds = _durations().get(name, 0)
    is_one = seconds <= MOST_SECONDS or _SHARED_FIXTURE.search(_text(file))
    return name, 1 if is_one else ceil(seconds / MOST_SECONDS)


def place_of(file: Path) -> tuple[int, float, str]:
    """Return the place of a file's unit among all, for sorting."""
    unit, parts = unit_of(file)
    if unit != _name(file):  # a cluster
        return 1, 0.0, unit
    if is_pure(file):
        return 0, 0.0, unit
    return 2, -_durations().get(unit, _UNKNOWN_SECONDS) / parts, unit


def files_behind(file: Path) -> list[Path]:
    """Return the file and the files of `support` that it imports."""
    names: set[str] = set()
    for module, imported in _SUPPORT_IMPORT.findall(_text(file)):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))}
    places = [TESTS / f"{name.replace('.', '/')}.py" for name in sorted(names)]
    return [place for place in (file, *places) if place.exists()]


class Scheduler(LoadScopeScheduling):
    """Distribution of units of work, in the order of `place_of`, to whichever process is idle."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        unit, parts = unit_of(self._root / nodeid.partition("::")[0])
        return unit if parts == 1 else f"{unit} {zlib.crc32(nodeid.encode()) % parts}"


def record_durations(records: Path) -> None:
    """Write the times of files that a run took, from its records; files that it did not run keep theirs."""
    seconds: Counter[str] = Counter()
    for one in read_records(records):
        seconds[one.test.partition("::")[0].removeprefix("tests/")] += one.seconds
    kept = [name for name in _durations() if name not in seconds and (TESTS / name).exists()]
    found = {name: _durations()[name] for name in kept}
    found |= {name: ceil(new) for name, new in seconds.items() if new >= LEAST_SECONDS}
    DURATIONS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def _name(file: Path) -> str:
    return str(file.relative_to(TESTS)) if file.is_relative_to(TESTS) else str(file)


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


@cache
def _durations() -> dict[str, int]:
    found: dict[str, int] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return found


if __name__ == "__main__":
    record_durations(Path(sys.argv[1]))
