"""Program of a contender, watched from its start to its end, in one turn or in many."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from wanma.bench.meter.process_tree import end_descendants
from wanma.bench.programs.command_program import CommandProgram
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.job_program import JobProgram
from wanma.bench.programs.running_program import RunningProgram, wait_for_end
from wanma.bench.programs.target import Target
from wanma.bench.turns.program_processes import ProgramProcesses
from wanma.bench.turns.stop_guard import StopGuard

POLL_SECONDS = 0.1
EARLY_POLL_SECONDS = 0.02
"""The same while the first step is waited for."""
ORDERLY_SECONDS = 120.0
"""Seconds that a program has for an orderly end, once its target is reached."""
LOOK_SHARE = 340.0
"""Least time from one look at a program's progress to the next, over that of the look: below 0.3 % in all."""
EARLY_LOOK_SHARE = 10.0
"""The same until a fault is caused, or the first step ends: the time before is not what is measured."""


@dataclass(frozen=True)
class ExecutionRule:
    """End of an execution, and the duration of turns."""

    steps: int | None = None
    """Optimizer steps of a job; None: as the job says."""
    target: Target | None = None
    """End of the measurement; None: the program's own."""
    timeout_seconds: float = 3600.0
    """Time after which a program is killed, and its measurement an error; stops are not part of it."""
    turn_seconds: float = 0.0
    """Duration of a turn of contenders that live at once."""


@dataclass(frozen=True)
class Ending:
    """End of an execution."""

    seconds: float
    """From the start of the command to its end, without the time in which it was stopped."""
    problem: str
    """Reason why the benchmark has ended it; empty: it ended by itself, or at its target."""
    is_stopped: bool
    """True if it was stopped because its target is reached."""
    survivors: Sequence[str]
    """Processes that it left behind."""
    time: float
    """Unix time of the end."""


class WatchedProgram:
    """Program of one contender, which starts with its first turn.

    Args:
        other_numbers: function that returns the numbers of processes that are not the program's.
        guard: guard of stopped processes; None: the program has one turn, until it ends.
    """

    def __init__(
        self,
        contender: Contender,
        folder: Path,
        rule: ExecutionRule,
        other_numbers: Callable[[], Collection[int]],
        guard: StopGuard | None = None,
    ) -> None:
        self.contender = contender
        kind = JobProgram if contender.kind == "job" else CommandProgram
        self.program: JobProgram | CommandProgram = kind(contender, folder, rule.steps)
        self.running: RunningProgram | None = None
        self.ending: Ending | None = None
        self.start_error: OSError | None = None
        self.has_step = False
        self.stopped_since: float | None = None
        """Monotonic time since which it is stopped; None: it runs, or has not been started."""
        self.processes = None if guard is None else ProgramProcesses(contender.name, other_numbers, guard)
        """Processes to be stopped at the end of each turn; None: it has one turn, until it ends."""
        self._folder, self._rule, self._fault = folder, rule, contender.fault
        self._other_numbers = other_numbers
        self._next_look = 0.0
        self._target_time: float | None = None

    @property
    def is_over(self) -> bool:
        return self.ending is not None or self.start_error is not None

    def take_turn(self, seconds: float, *, ends_with_first_step: bool) -> None:
        """Run for so many seconds, or until the program ends or its first step has ended; then stop it.

        Raises:
            WanmaError: it cannot be stopped.
        """
        if self.running is None:
            try:
                self.running = RunningProgram(self.contender, self.program, self._folder)
            except OSError as error:
                self.start_error = error
                return
            if isinstance(self.program, CommandProgram):
                self.program.watch(self.running.output.lines)
        elif self.processes is not None:
            self.running.clock.go_on()
            self.processes.go_on()
        self.stopped_since = None
        until = time.monotonic() + seconds if self.processes is not None else math.inf
        while True:
            left = until - time.monotonic()
            if left <= 0 or (ends_with_first_step and self.has_step):
                break
            pause = EARLY_POLL_SECONDS if ends_with_first_step else POLL_SECONDS
            wait_for_end(self.running.process, min(pause, left))
            problem = self._look(self.running, is_eager=ends_with_first_step)
            if problem is not None:
                self.end(problem)
                return
        assert self.processes is not None, "a single turn ends with the program"
        self.running.clock.stop()
        self.stopped_since = time.monotonic()
        self.processes.stop()

    def end(self, problem: str) -> None:
        """Kill what is left of the program, unless it is over.

        Args:
            problem: reason; empty: it has ended by itself.
        """
        if self.is_over:
            return
        if self.running is None:
            end_descendants(self._other_numbers())  # it may have been about to start
            return
        seconds, ended = self.running.seconds, time.time()
        is_orderly = not problem and self.running.process.poll() is not None
        survivors: list[str] = []
        try:
            self.running.kill()
        finally:
            if self.processes is not None:
                self.processes.go_on()
            survivors = end_descendants(self._other_numbers(), are_ending=is_orderly)
        self.running.clock.go_on()
        self.ending = Ending(seconds, problem, self._target_time is not None, survivors, ended)

    def _look(self, running: RunningProgram, *, is_eager: bool) -> str | None:
        """Look after the program, and return a reason to end it: empty if it has ended; None: it goes on.

        Args:
            is_eager: True if its first step is waited for.
        """
        fault, target, program = self._fault, self._rule.target, self.program
        if running.process.poll() is not None:
            if fault is not None and running.process.returncode == 0:
                return f"ended before rank {fault.rank} was killed after step {fault.after_step}"
            return ""
        now = running.seconds
        if now > self._rule.timeout_seconds:
            return "took longer than allowed"
        if self._target_time is not None and now > self._target_time + ORDERLY_SECONDS:
            return f"did not end within {ORDERLY_SECONDS:.0f} s of its target"
        is_first_awaited = is_eager and not self.has_step
        is_target_awaited = target is not None and self._target_time is None
        if not (is_first_awaited or is_target_awaited or fault is not None) or now < self._next_look:
            return None
        began = time.monotonic()
        progress = program.progress()
        self.has_step = self.has_step or bool(progress)
        share = EARLY_LOOK_SHARE if fault is not None or is_first_awaited else LOOK_SHARE
        self._next_look = now + share * (time.monotonic() - began)
        if fault is not None and len(progress) >= fault.after_step:
            self._fault = None if _kill_rank(running.process.pid, fault.rank) else fault
        if is_target_awaited and target is not None and target.first_reached(progress) is not None:
            with contextlib.suppress(ProcessLookupError):
                program.request_stop(running.process.pid)
            self._target_time = now
        return None


def _kill_rank(root: int, rank: int) -> bool:
    """Kill one rank of a run of wanma; return False if it is not there yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == f"wanma rank {rank}":
                    child.kill()
                    return True
    return False
