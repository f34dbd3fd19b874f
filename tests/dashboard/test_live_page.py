"""The live page in a real browser, through its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import PROGRAM, Tab, opened_browser
from support.dashboards import make_run, proxied, served_dashboard, write_steps, write_usage
from wanma.job.run.run_directory import RunDirectory

pytestmark = [
    pytest.mark.full(always=True),
    pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed"),
]
PAGES = ("/", "/runs/gpt/", "/compare?run=gpt&run=bert")
LUMINANCE = """
(selector, property) => {
  const colour = getComputedStyle(document.querySelector(selector))[property];
  const [red, green, blue] = colour.match(/[0-9.]+/g).map(Number);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    folder = tmp_path / "runs"
    runs = [make_run(folder, name) for name in ("bert", "gpt")]
    for run in runs:
        write_steps(run, 1, 10, loss=20.0)
        write_steps(run, 11, 20)
        write_usage(run, ranks=24)
    return runs[1]


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with opened_browser(tmp_path / "profile") as tab:
        yield tab


@pytest.fixture
def url(run: RunDirectory) -> Iterator[str]:
    with served_dashboard(run.path.parent) as url:
        yield url


@pytest.mark.parametrize(
    ("width", "scheme"), [(1240, "light"), (1240, "dark"), (390, "light"), (390, "dark")]
)
def test_pages_fit_the_width_in_light_and_dark(tab: Tab, url: str, width: int, scheme: str) -> None:
    for page in PAGES:
        tab.open(url + page, width, scheme)
        assert tab.evaluate("window.innerWidth") == width
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page
        lines = "[...document.querySelectorAll('.state')].map((state) => state.getClientRects().length)"
        assert set(tab.evaluate(lines)) <= {1}, page
        text = tab.evaluate(f"({LUMINANCE})('h1', 'color')")
        ground = tab.evaluate(f"({LUMINANCE})('body', 'backgroundColor')")
        assert (text < 100 < 200 < ground) if scheme == "light" else (ground < 60 < 150 < text), page
    assert tab.errors == []


@pytest.mark.parametrize("is_proxied", [False, True])
def test_a_change_comes_without_a_reload(tab: Tab, url: str, run: RunDirectory, is_proxied: bool) -> None:
    with proxied(url) as below_path:
        tab.open((below_path if is_proxied else url) + "/runs/gpt/")
        tab.evaluate("window.mark = 'not reloaded'")
        tab.evaluate("document.querySelector('.switch').click()")
        assert not tab.evaluate("document.body.textContent.includes('31 of 100 steps')")
        tab.wait("changes.readyState === EventSource.OPEN")
        write_steps(run, 21, 31, loss=1.25)
        tab.wait("document.body.textContent.includes('31 of 100 steps')")
        assert tab.evaluate("document.body.textContent.includes('1.25')")
        assert tab.evaluate("document.querySelector('.switch').getAttribute('aria-pressed')") == "true"
        assert tab.evaluate("window.mark") == "not reloaded"
        assert tab.errors == []


def test_the_end_of_a_log_is_followed(tab: Tab, url: str, run: RunDirectory) -> None:
    run.rank_log(0).write_text("".join(f"line {number}\n" for number in range(200)))
    tab.open(f"{url}/runs/gpt/logs/rank-0.log")
    tab.evaluate("scrollTo(0, document.body.scrollHeight)")
    tab.wait("changes.readyState === EventSource.OPEN")
    with run.rank_log(0).open("a") as log:
        log.write("".join(f"later {number}\n" for number in range(100)))
    tab.wait("document.body.textContent.includes('later 99')")
    tab.wait("innerHeight + scrollY >= document.body.scrollHeight - 2")
    assert tab.errors == []


def test_runs_that_are_marked_stay_marked_and_a_new_one_appears(
    tab: Tab, url: str, run: RunDirectory
) -> None:
    tab.open(f"{url}/")
    tab.evaluate("document.querySelector('input[value=gpt]').click()")
    tab.wait("changes.readyState === EventSource.OPEN")
    write_steps(make_run(run.path.parent, "new"), 1, 3)
    tab.wait("document.querySelector('input[value=new]') !== null")
    checked = "[...document.querySelectorAll('input:checked')].map((input) => input.value)"
    assert tab.evaluate(checked) == ["gpt"]
    assert re.search("3/100", tab.evaluate("document.body.textContent"))
    assert tab.errors == []
