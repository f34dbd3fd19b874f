"""The page in a real browser: it lays out, its script runs, and nothing is fetched."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.browser import FLAGS, PROGRAM
from support.studies import answers
from wanma.api.plan_report.html_page import report_html
from wanma.job.run.run_directory import RunDirectory
from wanma.report.report_page import write_report

LOGGED = ("--enable-logging=stderr", "--window-size=1240,1400")
USE = """
for (const button of document.querySelectorAll(".switch")) button.click();
const drawing = document.querySelector(".chart svg:not([hidden])");
const box = drawing.getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + 40};
drawing.dispatchEvent(new PointerEvent("pointermove", at));
document.body.dataset.overflow = document.documentElement.scrollWidth > window.innerWidth;
"""
"""Clicks every switch for a logarithmic axis and moves the pointer to the middle of the first chart."""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Run the browser; returns what it printed and what it logged."""
    if PROGRAM is None:
        pytest.skip("chromium is not installed")

    def run(page: Path, *flags: str) -> tuple[str, str]:
        command = [PROGRAM, *FLAGS, *LOGGED, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
        return answer.stdout, answer.stderr

    return run


def test_the_script_shows_values_and_switches_axes_without_an_error(
    new_run: Callable[..., RunDirectory], browse: Callable[..., tuple[str, str]]
) -> None:
    page = write_report(new_run(300))
    used = page.with_name("used.html")
    used.write_text(page.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    shown, logged = browse(used, "--dump-dom")
    assert "CONSOLE" not in logged
    assert re.search(r'class="tip"[^>]*>step 14\d\ntrain 2\.\d+', shown)
    assert len(re.findall(r'<button[^>]* aria-pressed="true"', shown)) == 2
    assert shown.count('data-kind="linear" hidden') == 2
    assert 'data-kind="log" hidden' not in shown
    assert 'data-overflow="false"' in shown


@pytest.mark.parametrize("width", [pytest.param(1240, marks=pytest.mark.full), 500])
def test_a_plans_page_lays_out_and_shows_values_at_any_width(
    browse: Callable[..., tuple[str, str]], tmp_path: Path, width: int
) -> None:
    page = tmp_path / "plan.html"
    page.write_text(report_html(answers(3), "gpt").replace("</body>", f"<script>{USE}</script></body>"))
    shown, logged = browse(page, f"--window-size={width},900", "--dump-dom")
    assert "CONSOLE" not in logged
    assert 'data-overflow="false"' in shown
    assert re.search(r'class="tip"[^>]*>\d+ ms per step\n(front|other plans) \d', shown)


def test_a_screenshot_of_the_page_is_not_blank(
    new_run: Callable[..., RunDirectory], browse: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"
    browse(write_report(new_run(3)), f"--screenshot={picture}")
    content = picture.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (1240, 1400)
    assert len(content) > 40_000  # a blank picture of this size has 5 kB
