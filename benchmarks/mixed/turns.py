"""Turns of a contender that is stopped between its steps alone, and of another beside it.

`wanma bench --turns` stops contenders within steps. One whose shares of the batch follow its own step times
is released from step to step instead, by a gate. Programs, clocks and the meter are those of `wanma bench`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil

from benchmarks.common import BenchmarkError, Start
from benchmarks.mixed.gate import Gate
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.process_tree import adopt_orphans, descendants
from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.programs.running_program import RunningProgram, wait_for_end
from wanma.bench.turns.own_clock import OwnClock
from wanma.bench.turns.program_processes import ProgramProcesses
from wanma.bench.turns.stop_guard import StopGuard

POLL_SECONDS = 0.003
"""Seconds between checks of whether a contender has finished its step."""
ForeignCpuBetween = Callable[[float, float], float | None]
"""Function from two unix times to the CPUs that other programs used between them; None: unknown."""


def take_turns_by_steps(
    starts: Mapping[str, Start], gate: Gate, timeout_seconds: float
) -> tuple[list[OwnClock], MachineMeter]:
    """Run two contenders in turns: the first for the steps that its gate grants, the second for as long.

    The second one is killed when the first has ended.

    Returns:
        the clocks of both, which stand still while the other one runs, and the meter of this machine.

    Raises:
        BenchmarkError: a contender failed, the second one ended before, or they took too long.
    """
    deadline = time.monotonic() + timeout_seconds
    adopt_orphans()
    with StopGuard() as guard, MachineMeter() as meter:
        bystanders = frozenset(process.pid for process in descendants())
        first, second = programs = _programs(starts, bystanders, guard)
        try:
            while True:
                seconds = first.take_turn(partial(_wait_for_gate, gate, deadline))
                if first.has_ended:
                    break
                if time.monotonic() > deadline:
                    raise BenchmarkError(
                        f"{first.name} took more than {timeout_seconds:.0f} s with {second.name} beside it"
                    )
                second.take_turn(partial(wait_for_end, seconds=seconds))
                if second.has_ended:
                    second.check_end()
                    raise BenchmarkError(f"{second.name} was over before {first.name}")
            first.check_end()
        finally:
            for process in descendants(bystanders):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            clocks = [program.close() for program in programs if program.running is not None]
    return clocks, meter


def _wait_for_gate(gate: Gate, deadline: float, process: subprocess.Popen[bytes]) -> None:
    gate.open()
    while process.poll() is None and not gate.is_reached and time.monotonic() <= deadline:
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Block:
    """Block of so many seconds in which each contender ran, in the turns of the same time."""

    steps: Mapping[str, float]
    """Steps that each of `times` made in it, with the parts of steps at its ends."""
    foreign_cpu: float
    """CPUs that other processes used meanwhile, in the mean of the turns."""


def blocks(
    clocks: Sequence[OwnClock],
    times: Mapping[str, Sequence[float]],
    warmup: int,
    seconds: float,
    foreign: ForeignCpuBetween,
    owners: Mapping[str, int] | None = None,
) -> list[Block]:
    """Return the contenders' blocks while all were in their steps after `warmup` ones.

    Both run as often and for as long, so that the same second of their own clocks is nearly the same time.

    Args:
        clocks: clock of each contender.
        times: ends of each contender's steps, in seconds since 1970.
        warmup: steps that do not count.
        seconds: duration of a block, on each contender's own clock.
        foreign: meter of other programs.
        owners: index of the clock of each of `times`. None: each has one, in order.
    """
    owners = owners or {name: which for which, name in enumerate(times)}
    ends = {name: own_times(clocks[owners[name]], stamps) for name, stamps in times.items()}
    began = max(one[warmup - 1] for one in ends.values())
    ended = min(one[-1] for one in ends.values())
    found = []
    for number in range(int((ended - began) / seconds)):
        edges = (began + number * seconds, began + (number + 1) * seconds)
        steps = {name: steps_between(edges, one) for name, one in ends.items()}
        found.append(Block(steps, foreign_cpu(clocks, edges, foreign)))
    return found


def own_times(clock: OwnClock, stamps: Sequence[float]) -> list[float]:
    """Return unix times as seconds of a contender's own clock."""
    return [clock.seconds_at(stamp) for stamp in stamps]


def steps_between(edges: tuple[float, float], ends: Sequence[float]) -> float:
    """Return the number of steps that ended between two times, with the parts of unfinished ones."""
    done = np.interp(edges, ends, np.arange(len(ends)))
    return float(done[1] - done[0])


def foreign_cpu(clocks: Sequence[OwnClock], edges: tuple[float, float], foreign: ForeignCpuBetween) -> float:
    """Return the CPUs that others used between two times of the contenders' clocks, in the mean of turns."""
    turns = [turn for clock in clocks for turn in turns_between(clock, edges)]
    used = sum((foreign(began, ended) or 0.0) * (ended - began) for began, ended in turns)
    return used / sum(ended - began for began, ended in turns)


def turns_between(clock: OwnClock, edges: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """Yield the turns, in unix times, of which a part lies between two times of a contender's own clock."""
    own_end, began = 0.0, clock.started
    for stopped, went_on in clock.stops:
        own_began, own_end = own_end, own_end + stopped - began
        if own_began < edges[1] and own_end > edges[0]:
            yield began, stopped
        began = went_on


def _programs(
    starts: Mapping[str, Start], bystanders: frozenset[int], guard: StopGuard
) -> list[_SteppedProgram]:
    found: list[_SteppedProgram] = []

    def numbers_of_others(own: str) -> set[int]:
        return set(bystanders).union(*(one.processes.numbers for one in found if one.name != own))

    for name, start in starts.items():
        processes = ProgramProcesses(name, partial(numbers_of_others, name), guard)
        found.append(_SteppedProgram(name, start, processes))
    return found


class _SteppedProgram:
    """Program of a contender, which begins with its first turn."""

    def __init__(self, name: str, start: Start, processes: ProgramProcesses) -> None:
        self.name, self.processes = name, processes
        self.running: RunningProgram | None = None
        self._contender, self._folder = start.contender(name), start.log.parent

    @property
    def has_ended(self) -> bool:
        return self.running is not None and self.running.process.poll() is not None

    def take_turn(self, wait: Callable[[subprocess.Popen[bytes]], None]) -> float:
        """Run until `wait` returns; return the seconds of the turn."""
        began = 0.0
        if self.running is None:
            self._folder.mkdir(exist_ok=True)
            program = CommandProgram(self._contender, self._folder, None)
            self.running = RunningProgram(self._contender, program, self._folder)
        else:
            began = self.running.seconds
            self.running.clock.go_on()
            self.processes.go_on()
        wait(self.running.process)
        self.running.clock.stop()
        self.processes.stop()
        return self.running.seconds - began

    def check_end(self) -> None:
        """Check that the contender has ended well.

        Raises:
            BenchmarkError: it has not.
        """
        assert self.running is not None
        self.running.output.close()
        if code := self.running.process.returncode:
            raise BenchmarkError(self.running.output.with_last_lines(f"{self.name} ended with code {code}"))

    def close(self) -> OwnClock:
        """Kill the rest of the program; return its clock."""
        assert self.running is not None
        self.running.kill()
        self.running.output.close()
        self.running.clock.go_on()
        return self.running.clock
