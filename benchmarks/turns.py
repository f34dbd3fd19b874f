"""Contenders that live beside each other and are stopped in turn, so that each is measured every second.

What disturbs a machine for longer than a turn falls on both; and of what they take, starting is no part. A
turn may end within a step: a contender's own clock stands still until its next one.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import ROOT, BenchmarkError, adopt_orphans, busy_cpu_seconds


@dataclass(frozen=True)
class Start:
    """A contender's command."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Turn:
    """Seconds since 1970 between which one contender ran and all others were stopped."""

    name: str
    began: float
    ended: float
    foreign_cpu: float
    """CPUs that anything else used meanwhile."""


def take_turns(
    starts: Mapping[str, Start], seconds: float, timeout_seconds: float
) -> list[tuple[Turn, Turn]]:
    """Run two contenders to their ends, in turns of so many seconds: first, second, second, first, and so on.

    Returns:
        the turns in pairs, from before both have started until the first one ended.

    Raises:
        BenchmarkError: a contender failed, or took too long.
    """
    adopt_orphans()
    first, second = starts
    deadline = time.monotonic() + timeout_seconds
    contenders: dict[str, _Contender] = {}
    pairs: list[tuple[Turn, Turn]] = []
    try:
        while True:
            names = (first, second) if len(pairs) % 2 == 0 else (second, first)
            turns = {}
            for name in names:
                if name not in contenders:
                    contenders[name] = _Contender(starts[name])
                turns[name] = contenders[name].turn(name, seconds, _others(contenders, name))
                if contenders[name].process.poll() is not None:
                    break
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"{name} took more than {timeout_seconds:.0f} s")
            else:
                pairs.append((turns[first], turns[second]))
                continue
            break
        for contender in contenders.values():
            contender.signal(signal.SIGCONT)
        for name, contender in contenders.items():
            code = contender.process.wait(max(deadline - time.monotonic(), 1.0))
            if code != 0:
                tail = contender.start.log.read_text(errors="replace")[-3000:]
                raise BenchmarkError(f"{name} ended with code {code}; the end of its output:\n{tail}")
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{error.cmd} took more than {timeout_seconds:.0f} s") from None
    finally:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    return pairs


@dataclass(frozen=True)
class Block:
    """A stretch of so many seconds in which each contender ran, in the turns of one and the same time."""

    steps: Mapping[str, float]
    """That each of `times` made in it; of those at its ends, the part that lies in it."""
    foreign_cpu: Mapping[str, float]
    """CPUs that anything else used meanwhile, at most in a turn."""


def blocks(
    pairs: Sequence[tuple[Turn, Turn]],
    times: Mapping[str, Sequence[float]],
    warmup: int,
    seconds: float,
    owners: Mapping[str, int] | None = None,
) -> list[Block]:
    """What the contenders did while all were in their steps after `warmup` ones.

    Both run as often and for as long, so that the same second of their own clocks is nearly the same time.

    Args:
        times: when each contender's steps ended, in seconds since 1970.
        seconds: of a block, on each contender's own clock, which stands still while the contender does.
        owners: whose turns the steps of each of `times` are made in: 0, the first contender's, or 1. None:
            each has one, in order.
    """
    owners = owners or {name: which for which, name in enumerate(times)}
    turns = {name: [pair[owners[name]] for pair in pairs] for name in times}
    ends = {
        name: [_own_seconds(turns[name], time) for time in stamps if time <= turns[name][-1].ended]
        for name, stamps in times.items()
    }
    began = max(one[warmup - 1] for one in ends.values())
    ended = min(one[-1] for one in ends.values())
    found = []
    for number in range(int((ended - began) / seconds)):
        edges = (began + number * seconds, began + (number + 1) * seconds)
        found.append(
            Block(
                {name: _steps_between(edges, one) for name, one in ends.items()},
                {name: max(turn.foreign_cpu for turn in _within(turns[name], edges)) for name in times},
            )
        )
    return found


def _steps_between(edges: tuple[float, float], ends: Sequence[float]) -> float:
    """How many steps ended between, with the parts of those under way."""
    done = np.interp(edges, ends, np.arange(len(ends)))
    return float(done[1] - done[0])


def _own_seconds(turns: Sequence[Turn], time: float) -> float:
    """Of a contender's own clock at a time."""
    return sum(min(max(time - turn.began, 0.0), turn.ended - turn.began) for turn in turns)


def _within(turns: Sequence[Turn], edges: tuple[float, float]) -> Iterator[Turn]:
    """Those that lie between two times of the contender's own clock, in part at least."""
    now = 0.0
    for turn in turns:
        began, now = now, now + turn.ended - turn.began
        if began < edges[1] and now > edges[0]:
            yield turn


def _others(contenders: Mapping[str, _Contender], name: str) -> set[int]:
    return {number for other, held in contenders.items() if other != name for number in held.numbers}


class _Contender:
    """A command and the processes that came of it."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.numbers: set[int] = set()
        self._output = start.log.open("wb")
        self.process = subprocess.Popen(
            start.command,
            env=dict(start.environment),
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.signal(signal.SIGSTOP)

    def turn(self, name: str, seconds: float, others: set[int]) -> Turn:
        """Let it run for so long. What starts meanwhile is its own: all others are stopped."""
        busy, own = busy_cpu_seconds(), self._cpu_seconds() + _this_process()
        began, clock = time.time(), time.monotonic()
        self.signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        found = {process.pid for process in psutil.Process().children(recursive=True)}
        self.numbers = found - others
        self.signal(signal.SIGSTOP)
        ended, taken = time.time(), time.monotonic() - clock
        foreign = busy_cpu_seconds() - busy - (self._cpu_seconds() + _this_process() - own)
        return Turn(name, began, ended, max(foreign, 0.0) / taken)

    def signal(self, number: signal.Signals) -> None:
        for each in self._alive():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def _alive(self) -> list[psutil.Process]:
        found = []
        for number in self.numbers | {self.process.pid}:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(number))
        return found

    def _cpu_seconds(self) -> float:
        total = 0.0
        for each in self._alive():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def _this_process() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
