"""The page: complete, self-contained, escaped, for runs of every length and end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.report.report_page import write_report

NewRun = Callable[..., RunDirectory]
VOID = {"meta", "path", "circle", "rect", "polyline", "polygon"}


class Checker(HTMLParser):
    """Sees that tags close in order, and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data + " "


def check(run: RunDirectory) -> Checker:
    checker = Checker()
    checker.feed(write_report(run).read_text())
    assert checker.open == []
    return checker


@pytest.mark.parametrize("steps", [1, 3, 300, 3000])
def test_a_page_is_whole_and_asks_the_network_for_nothing(steps: int, new_run: NewRun) -> None:
    run = new_run(steps)
    page = check(run)
    assert page.links == ["logs/rank-0.log"]
    assert "url(" not in run.report.read_text()
    for title in (
        "Loss",
        "Throughput",
        "Step time by phase",
        "Memory",
        "Gradient norm",
        "Learning rate",
        "MFU",
    ):
        assert title in page.text
    for fact in (
        "finished",
        "forecast 544 MiB",
        'preset = "gpt-10m"',
        "torch",
        "10.2M parameters",
        "as the job says",
    ):
        assert fact in page.text
    assert run.report.stat().st_size < 1_500_000


def test_a_run_without_metrics_says_so(new_run: NewRun) -> None:
    page = check(new_run(0, total=10, finish=None))
    assert "This run has no metrics." in page.text
    assert "figure" not in page.tags


def test_an_empty_directory_has_a_page(new_run: NewRun) -> None:
    run = new_run(0)
    for path in (run.job, run.plan, run.environment, run.events, run.metrics):
        path.unlink()
    assert "could not be read: job.toml: missing" in check(run).text


def test_nothing_from_the_run_becomes_markup(new_run: NewRun) -> None:
    evil = '"><img src=x onerror=alert(1)></pre><script>alert(2)</script>'
    name = "a<b onmouseover=alert(3)>"
    run = new_run(3, name=name, job=f"# {evil}\n[train]\nsteps = {{steps}}\n")
    run.environment.write_text(json.dumps({evil: {evil: [evil, {evil: evil}]}}))
    run.plan.write_text(
        json.dumps({"plan": {evil: evil}, "forecast": {"memory_bytes": 5, "reasons": [evil]}})
    )
    run.rank_log(0).rename(run.path / "logs" / "rank-<i onclick=x>.log")
    with run.events.open("a") as file:
        for level in ("error", evil):
            file.write(json.dumps({"kind": "message", "time": 1e9, "level": level, "text": evil}) + "\n")
        file.write(json.dumps({"kind": evil, "time": 1e9, evil: evil}) + "\n")
    page = check(run)
    assert not {"img", "i"} & set(page.tags)
    assert page.handlers == []
    assert page.tags.count("script") == 1 + page.tags.count("figure")
    assert evil in page.text
    assert name in page.text


def test_the_page_forbids_itself_every_request(new_run: NewRun) -> None:
    found = re.search(r'Content-Security-Policy" content="([^"]+)"', write_report(new_run(3)).read_text())
    assert found[1].startswith("default-src 'none';")


def test_many_events_are_shortened_and_counted(new_run: NewRun) -> None:
    run = new_run(3)
    with run.events.open("a") as file:
        file.writelines(
            json.dumps({"kind": "message", "time": 1e9, "text": f"number {index}."}) + "\n"
            for index in range(500)
        )
    text = check(run).text
    assert "earlier events in events.jsonl" in text
    assert "number 499." in text
    assert "number 3." not in text


def test_a_directory_that_cannot_be_written_is_named(new_run: NewRun) -> None:
    run = new_run(3)
    run.report.mkdir()
    with pytest.raises(WanmaError, match="cannot write"):
        write_report(run)
