"""Daily suite with the versions at the corners of what pyproject.toml promises: `make test-versions`.

    python -m support.versions                            # all corners that have not ended
    python -m support.versions --corner newest-3.13 --again    # one, although it has ended
    python -m support.versions --corner lowest-3.11 tests/job  # part of the tests; the page stays

Each corner has its own environment in a folder, by default .versions. One that is already there is used as
it is; others are made with uv if it is installed, else with venv and pip. A corner that has ended leaves its
counts beside its environment and is not run again. docs/results/versions.json gets the counts, in place of
the earlier ones of the same corner, and the page beside it the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "results" / "versions.md"
DATA = PAGE.with_suffix(".json")
START, END = "<!-- corners -->\n", "<!-- end of corners -->\n"
_PARITY_TEST = "tests.parallel.test_matrix"
_REPORTED_PACKAGES = ("torch", "transformers", "numpy", "pydantic")


@dataclass(frozen=True)
class Corner:
    """Combination of versions that gets an environment."""

    name: str
    python: str
    requirements: tuple[str, ...] = ()
    is_lowest: bool = False
    """True if every direct dependency has the lowest version that pyproject.toml promises."""


CORNERS = (
    Corner("lowest-3.11", "3.11", is_lowest=True),
    Corner("2.11-3.12", "3.12", ("torch==2.11.*",)),
    Corner("2.13-3.11", "3.11", ("torch==2.13.*",)),
    Corner("newest-3.13", "3.13"),
)


@dataclass(frozen=True)
class Result:
    """Counts of one corner's tests."""

    corner: str
    tests: list[str]
    """Arguments of pytest; empty: the daily suite."""
    date: str
    versions: dict[str, str]
    passed: int
    failed: int
    skipped: int
    parity_passed: int
    parity_failed: int
    minutes: float
    failures: list[str]
    requirements: list[str] = field(default_factory=list)
    """Direct dependencies with their bounds, as the environment was made from them."""
    commit: str = ""
    """Commit of wanma; empty: not recorded."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m support.versions", description=__doc__.partition("\n")[0]
    )
    names = [corner.name for corner in CORNERS]
    parser.add_argument("--corner", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--again", action="store_true", help="run corners that have ended, too")
    parser.add_argument("--environments", type=Path, default=REPOSITORY / ".versions", metavar="FOLDER")
    parser.add_argument("--at-once", type=int, default=1, help="test files that run beside each other")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; the daily suite without")
    options = parser.parse_args(arguments)
    folder: Path = options.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    recorded = {} if options.tests else {one.corner: one for one in read_results()}
    for corner in CORNERS:
        file = folder / f"{corner.name}.json"
        earlier = Result(**json.loads(file.read_text())) if file.exists() else None
        is_asked = corner.name in (options.corner or names)
        if is_asked and (options.again or earlier is None or earlier.tests != options.tests):
            earlier = run_corner(corner, folder, options.tests, options.at_once)
            file.write_text(json.dumps(asdict(earlier), indent=1))
        own = [earlier] if earlier is not None and earlier.tests == options.tests else []
        found = [*own, *([recorded[corner.name]] if corner.name in recorded else [])]
        results += sorted(found, key=lambda one: one.date, reverse=True)[:1]
    text = table(results, () if options.tests else requirements())
    print(text)
    if not options.tests:
        DATA.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
        write_page(PAGE, text)
    return int(any(result.failed for result in results))


def run_corner(corner: Corner, folder: Path, tests: Sequence[str], at_once: int) -> Result:
    """Run the tests in a corner's environment, which is made if it is absent."""
    python = folder / corner.name / "bin" / "python"
    if not python.exists():
        make_environment(corner, folder / corner.name)
    report = folder / f"{corner.name}.xml"
    print(f"== {corner.name}", flush=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    if at_once > 1:
        command += ["-n", str(at_once)]
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path}
    report.unlink(missing_ok=True)
    start = time.monotonic()
    ended = subprocess.run([*command, *tests], cwd=REPOSITORY, env=environment, check=False)
    if not report.exists():
        raise SystemExit(f"{corner.name}: pytest ended with {ended.returncode} and wrote no report")
    minutes = (time.monotonic() - start) / 60
    return read_report(corner, report, list(tests), installed_versions(python), minutes)


def read_report(
    corner: Corner, report: Path, tests: list[str], versions: dict[str, str], minutes: float
) -> Result:
    """Count the outcomes in a JUnit report of pytest."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    parity = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in children else outcome
        counts[outcome] += 1
        if case.get("classname") == _PARITY_TEST:
            parity[outcome] += 1
        if outcome == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return Result(
        corner.name,
        tests,
        date.today().isoformat(),
        versions,
        counts["passed"],
        counts["failed"],
        counts["skipped"],
        parity["passed"],
        parity["failed"],
        round(minutes, 1),
        failures,
        requirements(),
        _commit(),
    )


def read_results() -> list[Result]:
    """Return the recorded results, of which the page has the table."""
    return [Result(**content) for content in json.loads(DATA.read_text())]


def _commit() -> str:
    """Return the short hash of the commit, with a mark if the source differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "--", "src", "tests")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changes else "")


def installed_versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of the packages that the table names."""
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'Python': platform.python_version(), **{p: version(p) for p in sys.argv[1:]}}))"
    )
    command = [str(python), "-c", code, *_REPORTED_PACKAGES]
    versions: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return versions


def make_environment(corner: Corner, place: Path) -> None:
    """Make a corner's environment with wanma's dependencies and those of its tests."""
    wanted = [*requirements(), *corner.requirements]
    itself = ["--no-deps", "--editable", str(REPOSITORY)]
    if uv := shutil.which("uv"):
        resolution = ["--resolution", "lowest-direct"] if corner.is_lowest else []
        commands = [
            [uv, "venv", "--python", corner.python, str(place)],
            [uv, "pip", "install", "--python", str(place / "bin" / "python"), *resolution, *wanted],
            [uv, "pip", "install", "--python", str(place / "bin" / "python"), *itself],
        ]
    elif corner.is_lowest:
        raise SystemExit(f"{corner.name}: only uv resolves to the lowest versions: pip install uv")
    else:
        commands = [
            [f"python{corner.python}", "-m", "venv", str(place)],
            [str(place / "bin" / "python"), "-m", "pip", "install", *wanted],
            [str(place / "bin" / "python"), "-m", "pip", "install", *itself],
        ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(place, ignore_errors=True)  # a part of an environment would count as one
        raise SystemExit(f"{corner.name}: its environment cannot be made: {error}") from error


def requirements() -> list[str]:
    """Return the core dependencies and those of the extra `dev`, as pyproject.toml bounds them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return list(dict.fromkeys([*project["dependencies"], *project["optional-dependencies"]["dev"]]))


def untried_bounds(results: Iterable[Result], wanted: Iterable[str]) -> list[str]:
    """Return the requirements that are in no recorded run with the lowest versions."""
    lowest = {corner.name for corner in CORNERS if corner.is_lowest}
    tried = {one for result in results if result.corner in lowest for one in result.requirements}
    return [requirement for requirement in wanted if requirement not in tried]


def table(results: Sequence[Result], wanted: Iterable[str] = ()) -> str:
    """Table of the corners' counts in Markdown, the names of what failed, and bounds that were not tried.

    Args:
        results: a result of each corner.
        wanted: requirements of today.
    """
    heads = (
        "corner",
        "Python",
        *_REPORTED_PACKAGES,
        "passed",
        "failed",
        "skipped",
        "parity",
        "minutes",
        "date",
        "wanma",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    failures = []
    for result in results:
        parity = f"{result.parity_passed} of {result.parity_passed + result.parity_failed}"
        versions = [result.versions[name] for name in ("Python", *_REPORTED_PACKAGES)]
        counts = [result.passed, result.failed, result.skipped, parity, result.minutes]
        counts += [result.date, result.commit or "–"]
        lines.append("| " + " | ".join([result.corner, *versions, *map(str, counts)]) + " |")
        failures += [f"- {result.corner}: `{name}`" for name in result.failures]
    if failures:
        lines += ["", "Failed:", "", *failures]
    if untried := untried_bounds(results, wanted):
        names = ", ".join(f"`{requirement}`" for requirement in untried)
        lines += ["", f"Added since the run with the lowest versions, and not in it: {names}."]
    return "\n".join(lines) + "\n"


def write_page(page: Path, text: str) -> None:
    """Replace the table between the markers of `page`."""
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
