"""Records of a run, test by test, and the draw of the full suite's cases that it runs: a plugin of pytest.

`tests/conftest.py` registers it where one of its options is given. A run that is killed has written all that
had ended.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

RECORDS = "tests.jsonl"
CPU = "cpu_seconds"
LEFT_OUT = "not run: the time for cases of the full suite was over"
NOT_STARTED = "not run: the time of the run was over"
"""Reasons by which tests are skipped that were not started any more."""


@dataclass(frozen=True)
class Record:
    """A test that has ended.

    Attributes:
        outcome: `passed`, `failed`, `skipped` (also expected failures); `left out` for a case of the full
            suite that was not started any more, and `not started` for a test of every day.
        seconds: of set-up, call and teardown.
        cpu_seconds: processor time of this process in them, and of processes that it started and waited for.
        cause: one line on the failure, or the reason of the skip.
        text: traceback and output of the failure.
    """

    test: str
    outcome: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    worker: str = ""
    cause: str = ""
    text: str = ""


def read_records(folder: Path) -> list[Record]:
    path = folder / RECORDS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Record(**json.loads(line)) for line in lines]


def is_drawn(test: str, share: float, draw: str) -> bool:
    """Return whether the draw with this name takes the test, as it does with probability `share`."""
    digest = hashlib.sha256(f"{draw} {test}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class Records:
    """The plugin: draws, stops at the end of its time, writes.

    `--share` of the cases that only the full suite runs are drawn, by the name `--draw`. None of them is
    started after `--full-until`, and no test after `--until`.
    """

    def __init__(self, config: pytest.Config) -> None:
        is_worker = hasattr(config, "workerinput")
        self._path = None if is_worker else Path(config.getoption("--records")) / RECORDS
        self._share, self._draw = config.getoption("--share"), config.getoption("--draw")
        self._full_until, self._until = config.getoption("--full-until"), config.getoption("--until")
        self._reports: dict[str, list[pytest.TestReport]] = {}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    @pytest.hookimpl(trylast=True)  # conftest.py marks by then what only the full suite runs
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        full = [item for item in items if _is_full(item)]
        drawn = {item for item in full if is_drawn(item.nodeid, self._share, self._draw)}
        dropped = [item for item in full if item not in drawn]
        if dropped:
            items[:] = [item for item in items if item in drawn or not _is_full(item)]
            config.hook.pytest_deselected(items=dropped)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _is_full(item) and time.time() > self._full_until:
            pytest.skip(LEFT_OUT)
        if time.time() > self._until:
            pytest.skip(NOT_STARTED)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._cpu_before = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu_seconds()
        report.user_properties.append((CPU, now - self._cpu_before))  # which reaches another process, too
        self._cpu_before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._path is None:
            return
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when not in ("setup", "call"):  # a worker that died reports nothing but its death
            self._write(_record(report.nodeid, self._reports.pop(report.nodeid)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self._path is not None and report.outcome != "passed":
            self._write(_record(report.nodeid, [report]))

    def _write(self, record: Record) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def _is_full(item: pytest.Item) -> bool:
    """Return whether the full suite alone runs the test; `full(always=True)`: continuous integration, too."""
    marker = item.get_closest_marker("full")
    return marker is not None and not marker.kwargs.get("always", False)


def _record(test: str, reports: Iterable[Any]) -> Record:
    """Sum up the reports on the phases of one test, of which the first that failed counts."""
    phases = list(reports)
    worst = next((one for one in phases if one.failed), None) or next(
        (one for one in phases if one.skipped), phases[-1]
    )
    outcome, cause, text = worst.outcome, "", ""
    if worst.failed:
        text = worst.longreprtext + "".join(f"\n{name}\n{content}" for name, content in worst.sections)
        crash = getattr(worst.longrepr, "reprcrash", None)
        cause = (crash.message if crash is not None else worst.longreprtext.strip()).partition("\n")[0]
    elif worst.skipped:
        reason = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else str(worst.longrepr)
        cause = reason.removeprefix("Skipped: ")
        outcome = {LEFT_OUT: "left out", NOT_STARTED: "not started"}.get(cause, outcome)
    seconds = sum(getattr(one, "duration", 0.0) for one in phases)
    cpu = sum(value for one in phases for name, value in getattr(one, "user_properties", ()) if name == CPU)
    worker = getattr(getattr(worst, "node", None), "gateway", None)
    return Record(test, outcome, round(seconds, 3), round(cpu, 3), getattr(worker, "id", ""), cause, text)


def _cpu_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
