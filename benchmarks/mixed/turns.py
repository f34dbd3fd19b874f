"""Turns of a contender that is stopped between its steps alone, and of another beside it.

`wanma bench --turns` stops contenders within steps. One whose shares of the batch follow its own step times
is released from step to step instead, by a gate.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil

from benchmarks.common import ROOT, BenchmarkError, Start
from benchmarks.mixed.gate import Gate
from wanma.bench.meter.foreign_cpu import ForeignCpu
from wanma.bench.meter.process_tree import adopt_orphans, descendants
from wanma.bench.turns.program_processes import ProgramProcesses
from wanma.bench.turns.stop_guard import StopGuard

POLL_SECONDS = 0.003
"""Seconds between checks of whether a contender has finished its step."""


@dataclass(frozen=True)
class Turn:
    """Turn of one contender, from start to end in Unix seconds, while all others were stopped."""

    name: str
    began: float
    ended: float
    foreign_cpu: float
    """CPUs that other processes used meanwhile."""


def take_turns_by_steps(
    starts: Mapping[str, Start], gate: Gate, timeout_seconds: float
) -> list[tuple[Turn, Turn]]:
    """Run two contenders in turns: the first for the steps that its gate grants, the second for as long.

    Returns:
        the turns in pairs, until the first one ended. The second one is killed then.

    Raises:
        BenchmarkError: a contender failed, the second one ended before, or they took too long.
    """
    first, second = starts
    deadline = time.monotonic() + timeout_seconds
    pairs: list[tuple[Turn, Turn]] = []
    with _contenders(starts) as contenders:
        while True:
            mine = contenders[first].turn(_through(gate, deadline))
            if contenders[first].has_ended:
                break
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"{first} took more than {timeout_seconds:.0f} s with {second} beside it"
                )
            pairs.append((mine, contenders[second].turn(_for_seconds(mine.ended - mine.began))))
            if contenders[second].has_ended:
                contenders[second].end_well(1.0)
                raise BenchmarkError(f"{second} was over before {first}")
        contenders[first].end_well(1.0)
    return pairs


def _for_seconds(seconds: float) -> Callable[[subprocess.Popen[bytes]], None]:
    def wait(process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)

    return wait


def _through(gate: Gate, deadline: float) -> Callable[[subprocess.Popen[bytes]], None]:
    def wait(process: subprocess.Popen[bytes]) -> None:
        gate.open()
        while process.poll() is None and not gate.is_reached and time.monotonic() <= deadline:
            time.sleep(POLL_SECONDS)

    return wait


@dataclass(frozen=True)
class Block:
    """Block of so many seconds in which each contender ran, in the turns of the same time."""

    steps: Mapping[str, float]
    """Steps that each of `times` made in it, with the parts of steps at its ends."""
    foreign_cpu: Mapping[str, float]
    """CPUs that other processes used meanwhile, at most in a turn."""


def blocks(
    pairs: Sequence[tuple[Turn, Turn]],
    times: Mapping[str, Sequence[float]],
    warmup: int,
    seconds: float,
    owners: Mapping[str, int] | None = None,
) -> list[Block]:
    """Return the contenders' blocks while all were in their steps after `warmup` ones.

    Both run as often and for as long, so that the same second of their own clocks is nearly the same time.

    Args:
        times: ends of each contender's steps, in seconds since 1970.
        seconds: duration of a block, on each contender's own clock, which stands still while it is stopped.
        owners: owner of the steps of each of `times`: 0, the first contender, or 1. None: each has one, in
            order.
    """
    owners = owners or {name: which for which, name in enumerate(times)}
    ends = own_clocks(pairs, times, owners)
    began = max(one[warmup - 1] for one in ends.values())
    ended = min(one[-1] for one in ends.values())
    found = []
    for number in range(int((ended - began) / seconds)):
        edges = (began + number * seconds, began + (number + 1) * seconds)
        found.append(
            Block(
                {name: steps_between(edges, one) for name, one in ends.items()},
                {name: foreign_cpu([pair[owners[name]] for pair in pairs], edges) for name in times},
            )
        )
    return found


def own_clocks(
    pairs: Sequence[tuple[Turn, Turn]], times: Mapping[str, Sequence[float]], owners: Mapping[str, int]
) -> dict[str, list[float]]:
    """Return the ends of steps on the clock of the contender that made them; see `blocks`."""
    turns = {name: [pair[owners[name]] for pair in pairs] for name in times}
    return {
        name: [_own_seconds(turns[name], time) for time in stamps if time <= turns[name][-1].ended]
        for name, stamps in times.items()
    }


def steps_between(edges: tuple[float, float], ends: Sequence[float]) -> float:
    """Return the number of steps that ended between two times, with the parts of unfinished ones."""
    done = np.interp(edges, ends, np.arange(len(ends)))
    return float(done[1] - done[0])


def foreign_cpu(turns: Sequence[Turn], edges: tuple[float, float]) -> float:
    """Return the CPUs that others used between two times of a contender's clock, at most in a turn."""
    return max(turn.foreign_cpu for turn in _within(turns, edges))


def _own_seconds(turns: Sequence[Turn], time: float) -> float:
    """Return the seconds of a contender's own clock at a time."""
    return sum(min(max(time - turn.began, 0.0), turn.ended - turn.began) for turn in turns)


def _within(turns: Sequence[Turn], edges: tuple[float, float]) -> Iterator[Turn]:
    """Yield the turns that lie between two times of the contender's own clock, at least in part."""
    now = 0.0
    for turn in turns:
        began, now = now, now + turn.ended - turn.began
        if began < edges[1] and now > edges[0]:
            yield turn


@contextmanager
def _contenders(starts: Mapping[str, Start]) -> Iterator[dict[str, _Contender]]:
    """Create the contenders, each of which begins with its first turn; kill their rest at the end."""
    adopt_orphans()
    found: dict[str, _Contender] = {}
    with StopGuard() as guard:
        bystanders = frozenset(process.pid for process in descendants())

        def numbers_of_others(own: str) -> set[int]:
            return set(bystanders).union(
                *(one.processes.numbers for name, one in found.items() if name != own)
            )

        for name, start in starts.items():
            found[name] = _Contender(
                name, start, ProgramProcesses(name, partial(numbers_of_others, name), guard)
            )
        try:
            yield found
        finally:
            for process in descendants(bystanders):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


class _Contender:
    """Command and the processes that it started."""

    def __init__(self, name: str, start: Start, processes: ProgramProcesses) -> None:
        self._name, self._start, self.processes = name, start, processes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def turn(self, until: Callable[[subprocess.Popen[bytes]], None]) -> Turn:
        """Run the contender for a turn."""
        process = self._process = self._process or self._begin()
        foreign = ForeignCpu(lambda: self._cpu_seconds() + _this_process())
        began, clock = time.time(), time.monotonic()
        self.processes.go_on()
        until(process)
        self.processes.stop()
        ended, taken = time.time(), time.monotonic() - clock
        return Turn(self._name, began, ended, max(foreign.seconds(), 0.0) / taken)

    def end_well(self, seconds: float) -> None:
        """Wait for the end of the contender.

        Raises:
            BenchmarkError: it failed, or took longer.
        """
        assert self._process is not None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{self._name} took {seconds:.0f} s more, and was not done") from None
        if code != 0:
            tail = self._start.log.read_text(errors="replace")[-3000:]
            raise BenchmarkError(f"{self._name} ended with code {code}; the end of its output:\n{tail}")

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._start.log.open("wb") as output:
            return subprocess.Popen(
                self._start.command,
                env=dict(self._start.environment),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _cpu_seconds(self) -> float:
        total = 0.0
        for number in self.processes.numbers | ({self._process.pid} if self._process else set()):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = psutil.Process(number).cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def _this_process() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
