from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.networks import free_address
from support.supervisors import Supervisor
from wanma.elastic.launch_config import LaunchConfig, RunOutcome
from wanma.elastic.supervisor.supervisor import run_supervisor
from wanma.elastic.transport.event_loop import EventLoop

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _entries_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def launch(tmp_path: Path) -> LaunchConfig:
    """One rank of `finish`; tests replace what they are about."""
    return LaunchConfig(
        tmp_path / "run", "elastic_entries:finish", preload_modules=(), start_timeout_seconds=60
    )


class Ran:
    """A run that has ended."""

    def __init__(self, launch: LaunchConfig, outcome: RunOutcome, events: list[dict[str, Any]]) -> None:
        self.launch, self.outcome, self.events = launch, outcome, events

    def log(self, rank: int) -> str:
        return (self.launch.run_directory / "logs" / f"rank-{rank}.log").read_text()

    @property
    def messages(self) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == "message"]


@pytest.fixture
def run(launch: LaunchConfig) -> Callable[..., Ran]:
    """Run `launch` with changes, in this process."""

    def run(entry: str, on_event: Callable[[dict[str, Any]], None] | None = None, **changes: Any) -> Ran:
        changed = dataclasses.replace(launch, entry=f"elastic_entries:{entry}", **changes)
        events: list[dict[str, Any]] = []

        def keep(event: dict[str, Any]) -> None:
            events.append(event)
            if on_event is not None:
                on_event(event)

        return Ran(changed, run_supervisor(changed, keep), events)

    return run


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Every test leaves this process without children."""
    yield
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ours = [pid for pid in children if b"wanma.elastic" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert ours == []


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a supervisor; its state folder is the test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("WANMA_SECRET", raising=False)
    started: list[Supervisor] = []

    def start(name: str, entry: str, **changes: Any) -> Supervisor:
        started.append(Supervisor(tmp_path / name, entry, **changes))
        return started[-1]

    yield start
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.process.kill()
        supervisor.process.communicate()


@pytest.fixture
def rendezvous() -> str:
    return free_address()


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()
