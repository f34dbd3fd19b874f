"""One execution of contenders: start, watch, end and read them.

A contender runs alone, or several live at once in turns: then all but one are stopped.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from wanma.bench.measurements.measurement import MachineUsage, Measurement, TurnsTaken, Utilization
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.process_tree import adopt_orphans, descendants
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.target import Target
from wanma.bench.programs.watched_program import ExecutionRule, WatchedProgram
from wanma.bench.turns.own_clock import figures_without_clocks, steps_without_stops
from wanma.bench.turns.program_processes import WAY_OUT
from wanma.bench.turns.stop_guard import StopGuard
from wanma.bench.turns.turn_count import shared_turns
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_job

MAX_STOP_SECONDS = 10.0
"""Longest stop of a program. wanma's heartbeats time out after 20 s, collectives of others after minutes."""


def execute(
    contenders: Sequence[tuple[Contender, Path]],
    round_number: int,
    rule: ExecutionRule,
    *,
    make_meter: Callable[[], MachineMeter],
    find_disturbances: Callable[[MachineUsage], tuple[str, ...]],
) -> list[Measurement]:
    """Run contenders once, until each ends or its target is reached, and read what they did.

    Several contenders live at once, in turns and under one meter: what disturbs one, disturbs all.

    Args:
        contenders: each with an empty folder for its files; output.log has all that it printed.

    Raises:
        WanmaError: a contender cannot be stopped for the turns of others.
    """
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        guard = stack.enter_context(StopGuard()) if len(contenders) > 1 else None
        programs = _programs(contenders, rule, guard)
        with make_meter() as meter:
            try:
                take_turns(programs, rule.turn_seconds)
            finally:
                for program in programs:
                    program.end("")
    first_end = min((one.ending.time for one in programs if one.ending is not None), default=math.inf)
    found = [
        read_measurement(program, round_number, rule, math.inf if guard is None else first_end)
        for program in programs
    ]
    usage, is_alone = meter.usage, guard is None
    if any(program.program.is_elsewhere for program in programs):  # no descendants of this process
        usage, is_alone = replace(usage, foreign_cpu=None), False
    if not is_alone:
        usage = replace(usage, peak_memory_bytes=None)  # that of all contenders is nobody's
    disturbances = find_disturbances(usage)
    return [
        one
        if program.start_error is not None
        else replace(
            one,
            machine=usage,
            disturbances=disturbances,
            utilization=meter.utilization(*steady_times(one)) if is_alone else Utilization(),
        )
        for program, one in zip(programs, found, strict=True)
    ]


def take_turns(
    programs: Sequence[WatchedProgram], seconds: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Run programs to their ends, one at a time.

    Start-ups may differ in duration: a program whose first step has ended waits for those of the others, so
    that all make their steps at once, but for `MAX_STOP_SECONDS` at most. The last one runs on without stops.

    Args:
        clock: source of seconds that never jump.
    """
    waits = True
    while living := [one for one in programs if not one.is_over]:
        for program in living:
            others = [one for one in living if one is not program and not one.is_over]
            if not others:
                program.take_turn(math.inf, ends_with_first_step=False)
                continue
            if waits and program.has_step and not all(one.has_step for one in others):
                since = program.stopped_since
                if since is None or clock() - since + seconds < MAX_STOP_SECONDS:
                    continue
                waits = False
            program.take_turn(seconds, ends_with_first_step=waits and not program.has_step)


def _programs(
    contenders: Sequence[tuple[Contender, Path]], rule: ExecutionRule, guard: StopGuard | None
) -> list[WatchedProgram]:
    """Return the programs of contenders; with a guard they are stopped after each turn."""
    bystanders = frozenset(process.pid for process in descendants())
    programs: list[WatchedProgram] = []

    def numbers_of_others(own: int) -> set[int]:
        others = (one.processes for index, one in enumerate(programs) if index != own)
        return set(bystanders).union(*(one.numbers for one in others if one is not None))

    for index, (contender, folder) in enumerate(contenders):
        numbers = partial(numbers_of_others, index)
        programs.append(WatchedProgram(contender, folder, rule, numbers, guard))
    return programs


def read_measurement(
    program: WatchedProgram, round_number: int, rule: ExecutionRule, shared_until: float
) -> Measurement:
    """Return what a program did, without the state of the machine.

    Args:
        shared_until: unix time until which all contenders took turns; infinite: it ran alone.
    """
    contender, running, ending = program.contender, program.running, program.ending
    if running is None or ending is None:
        error = program.start_error or OSError()
        reason = f"{program.program.command[0]} cannot be started: {error.strerror}"
        return Measurement(contender.name, round_number, time.time(), 0.0, 127, (), error=reason)
    running.output.close()
    started, clock, target = running.clock.started, running.clock, rule.target
    records, figures = program.program.read(running.output.lines)
    records = tuple(record for record in records if record.time >= started)  # a clock set back gives others
    turns = None
    if math.isfinite(shared_until):
        # Of the one that ended first all count: its last lines may be read after its end.
        is_first = ending.time <= shared_until
        shared = len(records) if is_first else sum(record.time <= shared_until for record in records)
        counted = shared_turns(records, clock, shared_until)
        records, stopped = steps_without_stops(records, clock)
        figures = figures_without_clocks(figures)
        turns = TurnsTaken(rule.turn_seconds, tuple(clock.stops), stopped, shared, counted)
    reached = None if target is None else target.first_reached(program.program.progress())
    if reached is not None:
        figures["time_to_target_seconds"] = clock.seconds_at(reached.time)
        figures["samples_to_target"] = reached.samples
    code = 0 if ending.is_stopped and not ending.problem else running.process.returncode
    problem = ending.problem or _problem(code, ending.survivors, None if reached is not None else target)
    return Measurement(
        contender.name,
        round_number,
        started,
        ending.seconds,
        code,
        records,
        figures=figures,
        error=running.output.with_last_lines(problem) if problem else "",
        unwatched_hosts=program.program.leave_hosts(),
        turns=turns,
    )


def steady_times(measurement: Measurement) -> tuple[float, float]:
    """Return the unix times of the ends of the first and last step; without two steps, of the execution."""
    records, started = measurement.steps, measurement.started
    if len(records) > 1 and records[-1].time > records[0].time:
        return records[0].time, records[-1].time
    return started, started + measurement.seconds


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit meanwhile, so that the program does not outlive this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _problem(code: int, survivors: Sequence[str], missed: Target | None) -> str:
    """Return the reason why an execution is an error; empty if it ended well."""
    if code != 0:
        return f"ended with exit code {code}"
    if survivors:
        return f"left processes behind: {', '.join(survivors)}"
    return "" if missed is None else f"ended before {missed.text} was reached"


def check_turns(contenders: Sequence[Contender], turn_seconds: float) -> None:
    """Check that contenders can take turns, before any is measured.

    Raises:
        WanmaError: there is one contender, or one that cannot be stopped, or stops would be too long.
    """
    if len(contenders) < 2:
        raise WanmaError("turns are of two contenders or more, and there is one", WAY_OUT, EXIT_USAGE)
    for contender in contenders:
        if reason := _obstacle(contender):
            raise WanmaError(f"{contender.name} cannot take turns: {reason}", WAY_OUT, EXIT_USAGE)
    others = len(contenders) - 1
    stop_seconds = others * turn_seconds
    if stop_seconds > MAX_STOP_SECONDS:
        raise WanmaError(
            f"turns of {turn_seconds:g} s stop each of {len(contenders)} contenders for {stop_seconds:g} s, "
            f"and watchdogs of programs are only sure to bear {MAX_STOP_SECONDS:g} s",
            f"shorten the turns to {MAX_STOP_SECONDS / others:.3g} s, or measure fewer contenders at once",
            EXIT_USAGE,
        )


def _obstacle(contender: Contender) -> str:
    """Return the reason why a contender cannot take turns; empty: it can."""
    if contender.fault is not None:
        return "it has a fault, and a recovery is timed by clocks that go on while it is stopped"
    if contender.kind != "job":
        return ""
    job = load_job(Path(contender.job), contender.overrides)
    if job.cluster.engine != "local":
        return f"programs are stopped on this machine alone, and cluster.engine is '{job.cluster.engine}'"
    if job.parallel.load_balancing == "on":
        return "parallel.load_balancing is 'on', and shares would follow step times with stops inside"
    return ""
