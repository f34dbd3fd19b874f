"""Pages of docs/results: each is what today's code writes from the data beside it."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.suites import run as suites

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = {
    "collectives": "collectives.report",
    "convergence": "convergence.run",
    "engines": "engines.run",
    "installation": "installation.report",
    "libraries": "libraries.report",
    "measuring": "measuring.run",
    "mixed": "mixed.report",
    "parallel": "parallel.report",
    "planner-mixed": "planner.mixed",
    "planner-real": "planner.real_report",
    "ray": "ray.run",
    "recovery": "recovery.report",
    "slow-links": "slow_links.report",
    "startup": "startup.run",
}
"""Module below `benchmarks` that writes a page."""
ELSEWHERE = {"diagnosis", "planner-memory-runs", "recovery-faults", "versions"}
"""Data of a part of a page; `test_diagnosis` holds the first one, `test_versions` the last."""

SUMMARIES = {
    "Training": "suites",
    "All mesh dimensions": "parallel",
    "Collectives on one node": "collectives",
    "Startup": "startup",
    "On Slurm": "engines",
    "On Ray": "ray",
}
"""Page from which a section of performance.md has its tables."""

RATIO = re.compile(r"\d+\.\d+ \(\d+\.\d+–\d+\.\d+")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_data_say(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{PAGES[name]}")
    content = json.loads((RESULTS / f"{name}.json").read_text())
    written = module.page(content) if name == "planner-mixed" else module.report(_parts(content))
    assert (RESULTS / f"{name}.md").read_text() == written


def test_all_data_have_a_page() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == PAGES.keys() | ELSEWHERE


def test_the_page_of_suites_has_the_recorded_results() -> None:
    assert (RESULTS / "suites.md").read_text() == suites.report(suites.recorded_results())


def test_the_quick_start_of_the_readme_is_a_recorded_result() -> None:
    figures = suites.recorded_result("quick-start").summaries["job"]
    readme = (ROOT / "README.md").read_text()
    assert f"  loss              {figures['loss'].median:.3f}  (step 300)" in readme
    best, perplexity = figures["validation_loss"].median, figures["perplexity"].median
    assert f"  best validation   {best:.3f}  (perplexity {perplexity:.3f}, step 300)" in readme
    memory = figures["rank_memory_bytes"]
    [shown] = re.findall(r"  peak memory       (\d+) MiB", readme)
    assert float(shown) == pytest.approx(memory.median / 2**20, rel=0.02)


def test_ratios_of_the_documentation_are_those_of_the_results() -> None:
    """Ratios with their intervals, such as `1.28 (1.26–1.36)`, stand in a page that is written from data."""
    written = "\n".join((RESULTS / f"{name}.md").read_text() for name in (*PAGES, "suites"))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    quoted = {
        (str(page.relative_to(ROOT)), ratio)
        for page in pages
        if page.parent != RESULTS or page.name == "performance.md"
        for ratio in RATIO.findall(page.read_text())
    }
    assert len(quoted) > 10
    assert {one for one in quoted if f"{one[1]})" not in written} == set()


@pytest.mark.parametrize("section", SUMMARIES)
def test_numbers_of_the_summary_are_those_of_the_results(section: str) -> None:
    """Rounded as there, in rows of the page with the same label; in any row if labels differ."""
    sections = (RESULTS / "performance.md").read_text().split("\n## ")
    (summary,) = (text for text in sections if text.startswith(f"{section}\n"))
    page = list(_rows((RESULTS / f"{SUMMARIES[section]}.md").read_text()))
    found = list(_rows(summary))
    assert found
    for label, *cells in found:
        own = [row for row in page if _plain(label.partition(",")[0]) in _plain("".join(row))] or page
        recorded = [float(number) for row in own for number in _numbers(row)]
        for number in _numbers(cells):
            half = 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9
            assert any(abs(float(number) - one) <= half for one in recorded), (label, number)


def _rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of all tables, without their headers."""
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not line.startswith("| ---") and not after.startswith("| ---"):
            yield line.strip("| ").split(" | ")


def _numbers(cells: list[str]) -> list[str]:
    return [number.replace(",", "") for cell in cells for number in NUMBER.findall(cell)]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text.lower())


def _parts(content: dict[str, object]) -> object:
    return next((content[key] for key in ("pieces", "runs") if list(content) == [key]), content)
