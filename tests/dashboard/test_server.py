"""Pages and events of the dashboard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import requests

from support.dashboards import PROXY, make_run, proxied, served_dashboard, write_steps, write_usage
from wanma.api.launch.script_record import ScriptRecord
from wanma.dashboard.server import ReportCache
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.endpoint import TARGETS_FOLDER
from wanma.report import run_report
from wanma.report.run_report import read_report


class Client:
    """Requests to a dashboard."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, method: str) -> Any:
        return lambda path, **given: requests.request(method, self._url + path, timeout=60, **given)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served_dashboard(tmp_path) as url:
        yield Client(url)


def test_all_runs_are_listed_and_one_is_shown_with_its_ranks(client: Client, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_steps(run, 1, 20)
    write_usage(run)
    assert 'href="runs/gpt/"' in client.get("/").text
    page = client.get("/runs/gpt/").text
    assert "diagnosis of gpt" in page
    assert "rank 1: 2.00 s a step, median 1.50 s a step" in page
    assert "rank 1: 0 ms a step, median 0 ms a step" in page, "its wait for data"
    assert "&lt;b&gt;" in page
    assert client.get("/runs/gpt/logs/rank-0.log").headers["content-type"].startswith("text/plain")


def test_a_script_without_a_session_is_listed_and_shown_but_not_compared(
    client: Client, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "plain")
    run.create()
    run.rank_log(0).write_text("a line\n")
    ScriptRecord(run, "train.py", ["--fast"], 2, 1).record_end(3, "rank 1 failed", print)
    listed = client.get("/").text
    assert 'href="runs/plain/"' in listed
    assert "checkbox" not in listed
    page = client.get("/runs/plain/").text
    for text in ("failed", "train.py --fast", "rank 1 failed", 'href="logs/rank-0.log"'):
        assert text in page
    assert client.get("/runs/plain/logs/rank-0.log").text == "a line\n"
    assert client.get("/compare?run=plain").status_code == 404


def test_a_folder_without_runs(client: Client) -> None:
    assert "no runs here" in client.get("/").text
    assert client.get("/runs/gpt/").status_code == 404
    assert client.get("/compare?run=gpt").status_code == 404


@pytest.mark.parametrize("path", ["/runs/..%2F..%2Fetc/", "/runs/gpt/logs/rank-7.log", "/runs/gpt/job.toml"])
def test_only_pages_and_logs_are_served(client: Client, tmp_path: Path, path: str) -> None:
    make_run(tmp_path)
    assert client.get(path).status_code == 404


def test_another_host_name_is_refused_unless_it_is_given(client: Client) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"Host": PROXY}).status_code == 200
    assert client.post("/").status_code == 405


def test_below_a_proxys_path_all_links_lead_back_there(tmp_path: Path) -> None:
    for name in ("one", "two words"):
        write_steps(make_run(tmp_path, name), 1, 5)
    with served_dashboard(tmp_path) as url, proxied(url) as address:
        pages, seen = [f"{address}/"], set[str]()
        while pages:
            page = pages.pop()
            answer = requests.get(page, timeout=60)
            assert (answer.status_code, answer.url) == (200, page)
            seen.add(page.removeprefix(address))
            links = re.findall(r'(?:href|action)="([^"#]*)"', answer.text)
            paths = (urljoin(page, link) for link in links if not link.startswith("compare"))
            pages += {path for path in paths if path.removeprefix(address) not in seen} - set(pages)
        assert seen >= {"/", "/runs/one/", "/runs/two%20words/"}
        assert requests.get(f"{address}/runs/two%20words", timeout=60).url == f"{address}/runs/two%20words/"
        assert requests.get(f"{address}/compare?run=one", timeout=60).status_code == 200


def test_runs_are_compared_with_the_settings_that_differ(client: Client, tmp_path: Path) -> None:
    for name, rate in (("one", "1e-3"), ("two", "2e-3")):
        write_steps(make_run(tmp_path, name, rate), 1, 5)
    page = client.get("/compare?run=one&run=two").text
    assert "train.learning_rate" in page
    assert "train.steps" not in page
    assert "throughput" not in page


def test_prometheus_finds_the_endpoints(client: Client, tmp_path: Path) -> None:
    (tmp_path / TARGETS_FOLDER).mkdir()
    entry = [{"targets": ["127.0.0.1:9"], "labels": {"run": "gpt"}}]
    (tmp_path / TARGETS_FOLDER / "gpt-0.json").write_text(json.dumps(entry))
    assert client.get("/targets").json() == entry


def test_the_cache_reads_what_is_new_and_notices_what_was_dropped(tmp_path: Path) -> None:
    run, cache = make_run(tmp_path), ReportCache()
    write_steps(run, 1, 10)
    assert cache.read(run).last_step == 10
    write_steps(run, 11, 12, loss=1.0)
    assert cache.read(run).steps["loss"] == read_report(run).steps["loss"]
    write_steps(run, 1, 5, mode="w")
    assert cache.read(run).last_step == 5
    lines = run.metrics.read_text()
    run.metrics.write_text(lines.splitlines(keepends=True)[0])
    write_steps(run, 2, 40, loss=7.0)
    assert cache.read(run).steps == read_report(run).steps


def test_a_page_hears_of_a_change(client: Client, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with client.get("/events?run=gpt", stream=True) as answer:
        lines = answer.iter_lines(chunk_size=1, decode_unicode=True)
        assert next(lines) == ": open"
        write_steps(run, 1, 1)
        assert next(line for line in lines if line.startswith("data")) == "data: changed"


def test_the_page_of_a_log_hears_of_its_lines(client: Client, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = client.get("/runs/gpt/logs/rank-0.log", headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    events = re.search(r'data-changes="([^"]*)"', page.text)
    assert events is not None
    with client.get(urljoin("/runs/gpt/logs/rank-0.log", unescape(events[1])), stream=True) as answer:
        lines = answer.iter_lines(chunk_size=1, decode_unicode=True)
        assert next(lines) == ": open"
        run.rank_log(0).write_text("one more line\n")
        assert next(line for line in lines if line.startswith("data")) == "data: changed"
    assert client.get("/events?run=gpt&rank=x").status_code == 404


def test_two_hundred_long_runs_are_listed_by_their_ends(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_run(tmp_path, "run-0")
    write_steps(first, 1, 100_000)
    for number in range(1, 200):
        os.link(first.metrics, make_run(tmp_path, f"run-{number}").metrics)
    read, parse = [], run_report.record_with_new_names
    monkeypatch.setattr(run_report, "record_with_new_names", lambda record: read.append(0) or parse(record))
    assert client.get("/").text.count("100,000/100") == 200
    assert 0 < len(read) < 200 * 100_000 / 50


def test_a_long_run_is_read_once(tmp_path: Path) -> None:
    run, cache = make_run(tmp_path), ReportCache()
    write_steps(run, 1, 2000)
    cache.read(run)
    _, table, earlier = cache._known[run.path]
    write_steps(run, 2001, 2001)
    before = table.columns["loss"]
    cache.read(run)
    assert table.columns["loss"] is before
    assert len(earlier.steps["loss"]) == 2000, "a page that is being made keeps its report"
