"""Shared rules of all tests: permission to skip, and its reasons."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips-except",
        metavar="WORD",
        action="append",
        default=[],
        help="a skip whose reason does not contain WORD fails the run; may be given several times",
    )
    parser.addoption("--full", action="store_true", help="run what continuous integration runs: grids, soaks")
    parser.addoption(
        "--changed-since", metavar="REVISION", help="run the tests that a change since it touches"
    )
    parser.addoption(
        "--changed-within",
        metavar="IMPORTS",
        type=int,
        default=3,
        help="with --changed-since: most imports between a test and what has changed",
    )
    parser.addoption("--and-pure", action="store_true", help="with --changed-since: all pure tests, too")
    parser.addoption("--exhaustive", action="store_true", help="run every case of every grid, too: hours")
    gate = parser.getgroup("gate", "the gate of continuous integration (tests/support/gate)")
    gate.addoption("--records", metavar="FOLDER", type=Path, help="write down each test as it ends, and:")
    gate.addoption("--share", type=float, default=1.0, help="of the cases that only --full runs")
    gate.addoption("--draw", metavar="NAME", default="", help="of that share; others draw other cases")
    gate.addoption("--full-until", metavar="SECONDS", type=float, default=math.inf, help="since 1970")
    gate.addoption("--until", metavar="SECONDS", type=float, default=math.inf, help="since 1970")


def pytest_configure(config: pytest.Config) -> None:
    _set_examples(is_daily=not (config.getoption("--full") or config.getoption("--exhaustive")))
    config.stash[_SKIPS] = Skips()
    config.pluginmanager.register(config.stash[_SKIPS])
    if config.getoption("numprocesses", None):
        from support.slowness import slowness

        slowness()  # once, before the processes that inherit it
    if config.getoption("--records"):
        from support.gate.records import Records

        config.pluginmanager.register(Records(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from support.gate.order import Scheduler

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search no garbage among what is imported and collected: it lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what lives to the end out of every later search for garbage; compute on one core, as ranks do."""
    gc.freeze()
    # Several files run beside each other, and threads of OpenMP spin where another process has work to do.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Markers skip by themselves where their need is not met; what only a larger suite runs is left out."""
    is_exhaustive = config.getoption("--exhaustive")
    runs = {"full": is_exhaustive or config.getoption("--full"), "exhaustive": is_exhaustive}
    named = tuple(argument for argument in config.args if "::" in argument)
    # Of a file with a failed test, `--last-failed` collects that test alone.
    _leave_to_full(items, are_all_cases=not named and not config.getoption("lf", False))
    left_out = {
        item
        for marker, is_run in runs.items()
        if not is_run
        for item in _marked(items, marker)
        if not _is_named(item, named)
    }
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    if hasattr(config, "workerinput"):
        from support.gate.order import place_of

        items.sort(key=lambda item: place_of(item.path))
    if revision := config.getoption("--changed-since"):
        _keep_changed(config, items, revision)
    if os.geteuid() != 0:
        for item in _marked(items, "root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
    if any(_marked(items, "gpu")):
        import torch

        if not torch.cuda.is_available():
            for item in _marked(items, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a gpu"))


@pytest.fixture(scope="module")
def no_garbage_collection() -> Iterator[None]:
    """Saves half of the time of tests that read all files: their syntax trees hold no circles."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (command := sys.modules.get("support.command")):
        command.end_commands()
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


def _set_examples(is_daily: bool) -> None:
    """Draw half as many examples every day where a test does not say; a slow machine fails none."""
    settings.register_profile(
        "wanma",
        parent=settings.default,
        max_examples=50 if is_daily else 100,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("wanma")


def _keep_changed(config: pytest.Config, items: list[pytest.Item], revision: str) -> None:
    """Keep the tests near a change, the nearest first; with `--and-pure` all pure tests before them."""
    from support.changed import changed_files, distances, needs_everything
    from support.gate.order import is_pure

    changed = changed_files(revision)
    if needs_everything(changed):
        return
    distance = distances(changed)
    imports = config.getoption("--changed-within")
    near = {
        item: hops
        for item in items
        if (hops := distance.get(str(item.path.relative_to(config.rootpath)), imports + 1)) <= imports
    }
    if config.getoption("--and-pure"):
        near |= dict.fromkeys((item for item in items if is_pure(item.path)), -1)
    config.hook.pytest_deselected(items=[item for item in items if item not in near])
    items[:] = sorted(near, key=near.__getitem__)


def _leave_to_full(items: list[pytest.Item], are_all_cases: bool) -> None:
    """Mark as `full` the cases of tests with the marker `daily` that it does not list.

    Raises:
        pytest.UsageError: it lists a case that the test does not have.
    """
    found: dict[str, set[str]] = {}
    listed: dict[str, set[str]] = {}
    for item in _marked(items, "daily"):
        test, _, case = item.nodeid.partition("[")
        marker = item.get_closest_marker("daily")
        assert marker is not None
        # As pytest writes characters that are not of ASCII.
        listed[test] = {name.encode("unicode_escape").decode() for name in marker.args}
        found.setdefault(test, set()).add(case[:-1])
        if case[:-1] not in listed[test]:
            item.add_marker(pytest.mark.full)
    for test, cases in found.items():
        if are_all_cases and (unknown := listed[test] - cases):
            raise pytest.UsageError(f"{test} has no case {sorted(unknown)}, which its marker `daily` lists")


def _is_named(item: pytest.Item, named: tuple[str, ...]) -> bool:
    """Return whether the command line names the test itself, or its function, not only its file."""
    return any(item.nodeid.startswith(os.path.relpath(name, item.config.rootpath)) for name in named)


def _unwelcome(config: pytest.Config) -> list[tuple[str, str]]:
    allowed = [word.lower() for word in config.getoption("--no-skips-except")]
    if not allowed:
        return []
    allowed.append("not run: the time ")  # of the gate, which judges what it did not start
    found = config.stash[_SKIPS].found.items()
    return [skip for skip in found if not any(word in skip[1].lower() for word in allowed)]


def _marked(items: list[pytest.Item], marker: str) -> Iterator[pytest.Item]:
    return (item for item in items if item.get_closest_marker(marker))
