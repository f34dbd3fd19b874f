"""Shared rules of all tests: permission to skip, and its reasons."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Images of containers say not to keep compiled code. These tests start hundreds of processes, each of which
# would compile all of wanma again: half a CPU-second, beside the seconds for the tests' own files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What this machine's processor attains must not decide what a test sees; those of the measurement turn it on.
os.environ["WANMA_MEASURE_CPU"] = "0"
# Importing readline, as pytest does, leaves 80 columns in the environment of whatever it starts.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)


class Skips:
    """Record of skipped tests and their reasons, with those of other processes (pytest-xdist)."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.found[report.nodeid] = reason


_SKIPS = pytest.StashKey[Skips]()

LONGEST_FIRST = ("faults", "parallel", "e2e", "training", "elastic", "api")
"""Folders whose files take longest: where several files run beside each other, none of them comes last and
alone."""


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
    config.stash[_SKIPS] = Skips()
    config.pluginmanager.register(config.stash[_SKIPS])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Markers skip by themselves where their need is not met; what only `--full` runs is left out."""
    if not config.getoption("--full"):
        left_out = list(_marked(items, "full"))
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=_place)
    if os.geteuid() != 0:
        for item in _marked(items, "root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
    if any(_marked(items, "gpu")):
        import torch

        if not torch.cuda.is_available():
            for item in _marked(items, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a gpu"))


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


def _place(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def _unwelcome(config: pytest.Config) -> list[tuple[str, str]]:
    allowed = [word.lower() for word in config.getoption("--no-skips-except")]
    if not allowed:
        return []
    found = config.stash[_SKIPS].found.items()
    return [skip for skip in found if not any(word in skip[1].lower() for word in allowed)]


def _marked(items: list[pytest.Item], marker: str) -> Iterator[pytest.Item]:
    return (item for item in items if item.get_closest_marker(marker))
