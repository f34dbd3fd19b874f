"""The local engine, in the foreground and in the background."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from wanma.elastic.failure import explain_sigkill
from wanma.elastic.launch_config import LaunchConfig
from wanma.engines.engine import Engine, RunStatus
from wanma.engines.local import LocalEngine, run_local
from wanma.hardware.discovery.resource_limits import count_oom_kills
from wanma.job.errors import WanmaError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _entries_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))


def launch(folder: Path, entry: str) -> LaunchConfig:
    return LaunchConfig(folder, f"engine_entries:{entry}", b"4", preload_modules=(), start_timeout_seconds=60)


def test_a_run_in_the_foreground_gives_its_events_and_its_outcome(tmp_path: Path) -> None:
    events: list[dict[str, object]] = []
    assert run_local(launch(tmp_path, "square"), events.append).exit_code == 0
    assert events == [{"kind": "finish", "square": 16}]


def test_a_submitted_run_is_followed_by_its_name(tmp_path: Path) -> None:
    engine = LocalEngine()
    name = engine.submit(launch(tmp_path, "square"))
    assert engine.wait(name, 60) == RunStatus("finished", 0)
    assert engine.logs(name) == [tmp_path / "logs" / "rank-0.log"]
    assert "squaring" in engine.logs(name)[0].read_text()


def test_a_submitted_run_that_fails_says_why(tmp_path: Path) -> None:
    engine: LocalEngine = LocalEngine()
    status = engine.wait(engine.submit(launch(tmp_path, "fail")), 60)
    assert (status.state, status.exit_code) == ("failed", 1)
    assert "ValueError: too square" in status.message


def test_a_submitted_run_whose_supervisor_is_killed_says_who_may_have_done_it(tmp_path: Path) -> None:
    engine = LocalEngine()
    name = engine.submit(launch(tmp_path, "until_stopped"))
    wait_for(tmp_path / "running")
    engine._runs[name].process.kill()
    status = engine.wait(name, 60)
    assert status.message == f"the supervisor was killed by SIGKILL\n  {explain_sigkill(count_oom_kills())}"


def test_a_cancelled_run_ends_in_order(tmp_path: Path) -> None:
    engine = LocalEngine()
    name = engine.submit(launch(tmp_path, "until_stopped"))
    with pytest.raises(WanmaError, match="is in progress"):
        engine.submit(launch(tmp_path, "until_stopped"))
    wait_for(tmp_path / "running")
    assert engine.status(name) == RunStatus("running")
    engine.cancel(name)
    assert engine.wait(name, 60) == RunStatus("cancelled", 143)
    assert "stopped in order" in engine.logs(name)[0].read_text()
    engine.cancel(name)
    assert engine.status(name).state == "cancelled"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_unknown_run_is_refused() -> None:
    engine: Engine = LocalEngine()
    for question in (engine.status, engine.logs, engine.cancel):
        with pytest.raises(WanmaError, match="no run ghost"):
            question("ghost")
