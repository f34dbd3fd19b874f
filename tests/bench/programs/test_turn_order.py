"""Order of turns, with programs that only count."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

from wanma.bench.programs.execution import MAX_STOP_SECONDS, take_turns


@dataclass
class World:
    now: float = 0.0
    turns: list[tuple[str, float, bool]] = field(default_factory=list)


class Counter:
    """Program that has its first step after `start` seconds of its own, and ends after `end`."""

    def __init__(self, world: World, name: str, start: float, end: float) -> None:
        self.world, self.name, self.start, self.end = world, name, start, end
        self.own = 0.0
        self.stopped_since: float | None = None

    @property
    def is_over(self) -> bool:
        return self.own >= self.end

    @property
    def has_step(self) -> bool:
        return self.own >= self.start

    def take_turn(self, seconds: float, *, ends_with_first_step: bool) -> None:
        took = min(seconds, self.end - self.own)
        if ends_with_first_step and not self.has_step:
            took = min(took, self.start - self.own)
        self.world.turns.append((self.name, took, math.isinf(seconds)))
        self.own += took
        self.world.now += took
        self.stopped_since = self.world.now


def turns_of(seconds: float, **programs: tuple[float, float]) -> list[tuple[str, float, bool]]:
    world = World()
    counters = [Counter(world, name, *times) for name, times in programs.items()]
    take_turns(cast("Any", counters), seconds, lambda: world.now)
    assert all(one.is_over for one in counters)
    return world.turns


def test_programs_alternate_and_the_last_one_runs_on() -> None:
    assert turns_of(1.0, a=(0.0, 2.0), b=(0.0, 4.0)) == [
        ("a", 1.0, False), ("b", 1.0, False), ("a", 1.0, False), ("b", 3.0, True),
    ]  # fmt: skip


def test_one_program_has_one_turn() -> None:
    assert turns_of(0.0, a=(1.0, 5.0)) == [("a", 5.0, True)]


def test_the_first_to_make_a_step_waits_for_the_others() -> None:
    assert turns_of(1.0, a=(0.5, 2.5), b=(2.5, 5.5)) == [
        ("a", 0.5, False),  # it has its first step, and waits
        ("b", 1.0, False), ("b", 1.0, False), ("b", 0.5, False),
        ("a", 1.0, False), ("b", 1.0, False), ("a", 1.0, False), ("b", 2.0, True),
    ]  # fmt: skip


def test_nobody_waits_longer_than_watchdogs_do() -> None:
    turns = turns_of(1.0, a=(0.5, 5.0), never=(math.inf, 30.0))
    waited = 0.0
    longest = 0.0
    for name, took, _ in turns:
        waited = 0.0 if name == "a" else waited + took
        longest = max(longest, waited if ("a", 1.0, False) in turns else 0.0)
        if name == "a" and took == 1.0:
            break
    assert 0 < longest <= MAX_STOP_SECONDS
    names = [name for name, _, _ in turns]
    first = names.index("a", 1)
    assert names[first : first + 6] == ["a", "never"] * 3, "after that they alternate"
