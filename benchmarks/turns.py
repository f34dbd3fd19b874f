"""Contenders that live beside each other and are stopped in turn, so that each is measured every few seconds.

What disturbs a machine for longer than a turn falls on both; and of what they take, starting is no part.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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


def steps_within(turn: Turn, times: Sequence[float], warmup: int) -> tuple[int, float]:
    """(steps, their seconds) of those steps after `warmup` ones that began and ended within a turn."""
    inside = [time for time in times[warmup - 1 :] if turn.began <= time <= turn.ended]
    return max(len(inside) - 1, 0), inside[-1] - inside[0] if inside else 0.0


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
