"""What all tests share: who may skip, and why."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

_SKIPS = pytest.StashKey[list[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips-except",
        metavar="WORD",
        action="append",
        default=[],
        help="a skip whose reason does not contain WORD fails the run; may be given several times",
    )
    parser.addoption("--full", action="store_true", help="run all of the grids of layouts and models")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SKIPS] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Markers skip by themselves where their need is not met; what only `--full` runs is left out."""
    if not config.getoption("--full"):
        left_out = list(_marked(items, "full"))
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
    if os.geteuid() != 0:
        for item in _marked(items, "root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
    if any(_marked(items, "gpu")):
        import torch

        if not torch.cuda.is_available():
            for item in _marked(items, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a gpu"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _note(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _note(collector.config, report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in passed and _unwelcome(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unwelcome = _unwelcome(config)
    if unwelcome:
        terminalreporter.section("skips that count as failures here")
        for name, reason in unwelcome:
            terminalreporter.line(f"{name}: {reason}")


def _note(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        config.stash[_SKIPS].append((report.nodeid, reason))


def _unwelcome(config: pytest.Config) -> list[tuple[str, str]]:
    allowed = [word.lower() for word in config.getoption("--no-skips-except")]
    if not allowed:
        return []
    return [skip for skip in config.stash[_SKIPS] if not any(word in skip[1].lower() for word in allowed)]


def _marked(items: list[pytest.Item], marker: str) -> Iterator[pytest.Item]:
    return (item for item in items if item.get_closest_marker(marker))
