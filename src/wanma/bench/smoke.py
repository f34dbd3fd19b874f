"""Known suites in small: each runs in seconds, and shows that it works here."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.bench.benchmark import new_directory, run_benchmark
from wanma.bench.machine_benchmark import smoke_suite
from wanma.bench.meter.disturbance import NO_LIMITS
from wanma.bench.programs.limited_link import missing_for_link
from wanma.bench.suites.suite_file import Suite, find_suite, known_suites, read_suite_file
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.job.errors import WanmaError

MACHINE = "machine"
"""Name of the machine benchmark among the suites."""


@dataclass(frozen=True)
class Outcome:
    """End of one suite."""

    suite: str
    seconds: float
    problem: str = ""
    """Reason of a failure; empty: it works."""
    skipped: str = ""
    """Reason why it did not run; empty: it ran."""

    def __str__(self) -> str:
        state = f"failed: {self.problem}" if self.problem else "works"
        if self.skipped:
            state = f"not run: {self.skipped}"
        return f"{self.suite:14} {self.seconds:6.1f} s  {state}"


def list_suites() -> list[tuple[str, str]]:
    """Return names and titles of the known suites, and of the machine benchmark."""
    known = [(name, read_suite_file(path).title) for name, path in known_suites().items()]
    return [*known, (MACHINE, "Limits of the machine: `wanma bench machine`")]


def run_smoke(
    names: Sequence[str], root: Path, progress: Callable[[str], None], environments: Path | None = None
) -> Iterator[Outcome]:
    """Run known suites in small.

    Args:
        names: names of the suites; empty: all.

    Yields:
        the outcome of each suite as soon as it has ended.

    Raises:
        WanmaError: there is no such suite.
    """
    paths = {name: None if name == MACHINE else find_suite(name) for name in names}
    for name, path in (paths or {**known_suites(), MACHINE: None}).items():
        began = time.monotonic()
        problem = ""
        try:
            if path is None:
                suite, rule = smoke_suite()
            else:
                suite, rule = read_suite_or_job(path, is_smoke=True, environments=environments)
            if missing := _missing(suite):
                yield Outcome(name, 0.0, skipped=f"it needs {', '.join(missing)}")
                continue
            progress(f"suite {name}")
            suite = replace(suite, name=f"{suite.name}-smoke")
            result = run_benchmark(
                suite, rule, new_directory(root, suite), limits=NO_LIMITS, progress=progress
            )
            problem = next((one.error for one in result.measurements if one.error), "")
        except WanmaError as error:
            problem = error.message
        yield Outcome(name, time.monotonic() - began, problem)


def _missing(suite: Suite) -> list[str]:
    """Return modules and Python environments that a suite needs and that are not here."""
    missing = [module for module in suite.file.needs if importlib.util.find_spec(module) is None]
    absent = [
        f"the Python environment '{one.name}' in {Path(one.folder).parent}"
        for one in suite.python_environments
        if not one.python.exists()
    ]
    has_link = any(one.link_megabits_per_second is not None for one in suite.contenders)
    return [*missing, *absent, *(missing_for_link() if has_link else [])]
