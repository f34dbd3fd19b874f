"""Tests with other versions: counts of a corner, a run that is continued, and the page's table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support import versions
from support.versions import (
    CORNERS,
    END,
    START,
    main,
    read_report,
    read_results,
    requirements,
    table,
    write_page,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.job.test_a" name="test_one"/>
<testcase classname="tests.job.test_a" name="test_two"><failure message="x"/></testcase>
<testcase classname="tests.job.test_a" name="test_three"><skipped message="no GPU"/></testcase>
<testcase classname="tests.parallel.test_matrix" name="test_pair[a]"/>
<testcase classname="tests.parallel.test_matrix" name="test_pair[b]"><error message="x"/></testcase>
</testsuite></testsuites>"""
INSTALLED = {
    "Python": "3.11.7",
    "torch": "2.11.0",
    "transformers": "5.0.0",
    "numpy": "1.26.0",
    "pydantic": "2.7.0",
}


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    result = read_report(CORNERS[0], tmp_path / "report.xml", [], INSTALLED, 1.25)
    assert (result.passed, result.failed, result.skipped) == (2, 2, 1)
    assert (result.parity_passed, result.parity_failed) == (1, 1)
    lines = table([result]).splitlines()
    assert lines[2].startswith(
        "| lowest-3.11 | 3.11.7 | 2.11.0 | 5.0.0 | 1.26.0 | 2.7.0 | 2 | 2 | 1 | 1 of 2 | 1.2 |"
    )
    assert lines[-2:] == [
        "- lowest-3.11: `tests.job.test_a::test_two`",
        "- lowest-3.11: `tests.parallel.test_matrix::test_pair[b]`",
    ]


def test_only_the_part_of_the_page_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Versions\n\n{START}\nold\n\n{END}\nafter\n")
    write_page(page, "new\n")
    assert page.read_text() == f"# Versions\n\n{START}\nnew\n\n{END}\nafter\n"
    assert START in versions.PAGE.read_text()
    assert END in versions.PAGE.read_text()


def test_a_corner_that_has_ended_is_not_run_again_unless_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = tmp_path / "lowest-3.11" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").write_text(
        f'#!/bin/sh\necho started >> {tmp_path}/log\nexec {sys.executable} "$@"\n'
    )
    (environment / "python").chmod(0o755)
    (tmp_path / "test_small.py").write_text("def test_it() -> None:\n    assert True\n")
    arguments = ["--environments", str(tmp_path), "--corner", "lowest-3.11", str(tmp_path / "test_small.py")]

    def starts() -> int:
        return len((tmp_path / "log").read_text().splitlines())

    assert main(arguments) == 0
    first = starts()
    assert "| 1 | 0 | 0 | 0 of 0 |" in capfd.readouterr().out
    assert main(arguments) == 0
    assert starts() == first
    assert "| 1 | 0 | 0 | 0 of 0 |" in capfd.readouterr().out
    assert main([*arguments, "--again"]) == 0
    assert starts() == 2 * first


def test_an_environment_has_the_bounds_of_the_project() -> None:
    assert "numpy>=1.26" in requirements()
    assert any(line.startswith("pytest") for line in requirements())


def test_the_page_has_the_recorded_results_and_names_bounds_that_were_not_tried() -> None:
    """Else: make test-versions, or `write_page(PAGE, table(read_results(), requirements()))`."""
    _, _, page = versions.PAGE.read_text().partition(START)
    assert page.partition(END)[0] == f"\n{table(read_results(), requirements())}\n"
    assert {result.corner for result in read_results()} == {corner.name for corner in CORNERS}
    assert not any(result.tests for result in read_results()), "all of the daily suite"


def test_a_bound_that_is_newer_than_the_run_with_the_lowest_versions_is_named() -> None:
    (lowest,) = (one for one in read_results() if one.corner == "lowest-3.11")
    assert "Added since" not in table([lowest], lowest.requirements)
    text = table([lowest], [*lowest.requirements, "numpy>=2.0", "new>=1"])
    assert text.endswith("and not in it: `numpy>=2.0`, `new>=1`.\n")


def test_a_corner_that_runs_again_leaves_the_others_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, page = tmp_path / "versions.json", tmp_path / "versions.md"
    data.write_text(versions.DATA.read_text())
    page.write_text(versions.PAGE.read_text())
    monkeypatch.setattr(versions, "DATA", data)
    monkeypatch.setattr(versions, "PAGE", page)
    before = read_results()

    def run_corner(corner: versions.Corner, *_: object) -> versions.Result:
        return replace(before[0], corner=corner.name, date="2030-01-01", passed=1, failed=0, failures=[])

    monkeypatch.setattr(versions, "run_corner", run_corner)
    main(["--environments", str(tmp_path), "--corner", "newest-3.13"])
    assert [one.corner for one in read_results()] == [corner.name for corner in CORNERS]
    assert read_results()[:3] == before[:3]
    assert read_results()[3].date == "2030-01-01"
    assert "| 2030-01-01 |" in page.read_text()
