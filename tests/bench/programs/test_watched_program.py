"""Cost of watching a program, by a clock that only looks and pauses move."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanma.bench.programs import watched_program
from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.target import Progress, parse_target
from wanma.bench.programs.watched_program import ExecutionRule, WatchedProgram


@dataclass
class World:
    """Program whose loss is 1 from second 3,000 on, and which ends after 10,000 s."""

    look_seconds: float
    growth: float
    """Seconds that each look takes longer than the one before: the records grow."""
    now: float = 0.0
    looks: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and duration of each look."""
    stops: list[float] = field(default_factory=list)
    handed_over: int = 0
    """Number of times that the program was given its output."""

    def wait(self, _process: object, seconds: float) -> None:
        self.now += seconds

    def look(self) -> list[Progress]:
        took = self.look_seconds + self.growth * len(self.looks)
        self.looks.append((self.now, took))
        self.now += took
        return [Progress(self.now, 1.0, {"loss": 1.0 if self.now >= 3000 else 2.0})]


def watch(world: World, monkeypatch: pytest.MonkeyPatch, target: str | None = "loss<=0") -> None:
    """Watch a program from its start to its end."""

    class Program(CommandProgram):
        def __init__(self, *_: object) -> None:
            self.is_elsewhere = False

        def watch(self, output: object) -> None:
            world.handed_over += 1

        def progress(self) -> list[Progress]:
            return world.look()

        def request_stop(self, process: int) -> None:
            world.stops.append(world.now)

    class Running:
        def __init__(self, *_: object) -> None:
            self.process = SimpleNamespace(pid=1, returncode=0, poll=self.poll)
            self.clock: Any = SimpleNamespace(go_on=lambda: None)
            self.output = SimpleNamespace(lines=[])

        @property
        def seconds(self) -> float:
            return world.now

        def poll(self) -> int | None:
            return 0 if world.now >= 10_000 or world.stops else None

        def kill(self) -> None:
            pass

    clock = SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now)
    replaced = {
        "time": clock,
        "CommandProgram": Program,
        "RunningProgram": Running,
        "wait_for_end": world.wait,
        "end_descendants": lambda *_, **__: [],
    }
    for name, value in replaced.items():
        monkeypatch.setattr(watched_program, name, value)
    watched = WatchedProgram(
        Contender("program", "command", command=("program",)),
        Path(),
        ExecutionRule(target=None if target is None else parse_target(target), timeout_seconds=math.inf),
        set,
    )
    watched.take_turn(math.inf, ends_with_first_step=False)
    assert watched.ending is not None
    assert watched.ending.problem == ""


@pytest.mark.parametrize(("look_seconds", "growth"), [(0.0005, 0.0), (0.01, 0.0), (0.5, 0.0), (0.01, 0.01)])
def test_looking_for_a_target_takes_at_most_three_thousandths_of_the_time(
    look_seconds: float, growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(look_seconds, growth)
    watch(world, monkeypatch)
    assert len(world.looks) > 20
    begin = world.looks[-1][0] - world.looks[0][0]
    assert sum(took for _, took in world.looks[:-1]) <= 0.003 * begin


def test_the_output_of_a_command_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0.01, 0.0)
    watch(world, monkeypatch)
    assert world.handed_over == 1


def test_without_a_target_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0.01, 0.0)
    watch(world, monkeypatch, target=None)
    assert world.looks == []


def test_a_program_is_asked_to_end_once_at_the_first_look_that_finds_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(0.01, 0.0)
    watch(world, monkeypatch, target="loss<=1")
    (stop,) = world.stops
    assert 3000 <= stop <= 3000 + 2 * watched_program.LOOK_SHARE * 0.01
    assert world.looks[-1][0] < stop <= world.now
