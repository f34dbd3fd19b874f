"""Rounds of a benchmark: each contender in turn, every second round in reverse, until enough or out of time.

Contenders alternate so that a slowdown of the machine, passing or growing, affects all alike: whole
executions, or turns of contenders that live at once. A measurement
is saved as soon as it ends; a benchmark that was killed goes on after the last one that was saved.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from wanma.bench.figures.precision import first_steady_step
from wanma.bench.measurements.measurement import MachineUsage, Measurement
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.execution import execute
from wanma.bench.programs.job_program import end_earlier_execution, run_of_execution
from wanma.bench.programs.redaction import known_secrets, redact_text
from wanma.bench.programs.target import Target
from wanma.bench.programs.watched_program import ExecutionRule
from wanma.bench.statistics.warm_up import MIN_STEPS
from wanma.bench.turns.turn_count import too_few_turns
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.base import Section
from wanma.observe.units import parse_duration

RUNS_FOLDER = "runs"
"""Folder of the files of the executions, in the folder of the result."""
MAX_FAILURES = 2
"""Failed executions after which a contender is measured no more."""
MAX_DISTURBED = 10
"""Disturbed executions of a contender after which it is measured no more: the machine is not quiet."""


def duration_seconds(text: str) -> float:
    """Return the seconds of a text such as 90s, 30m, 1h30m; a number alone is in seconds.

    Raises:
        WanmaError: it is none.
    """
    if not (seconds := parse_duration(text)):
        raise WanmaError(f"'{text}' is not a duration", "write 90s, 30m or 1h30m", EXIT_USAGE)
    return seconds


def _seconds(value: Any) -> Any:
    return duration_seconds(value) if isinstance(value, str) else value


Duration = Annotated[float, BeforeValidator(_seconds)]
"""Duration in seconds, of a text or a number."""


class Rule(Section):
    """Amount of measuring: the table `[rule]` of a suite, whose durations are texts such as "30m"."""

    model_config = ConfigDict(populate_by_name=True)

    rounds: Annotated[int, Field(ge=1)] = 10
    """Maximum rounds; in a round each contender runs once."""
    min_rounds: Annotated[int, Field(ge=1)] = 7
    """Rounds before the first look at the intervals: earlier looks claim more than 5 % false differences."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of a job; None: as the job says."""
    budget_seconds: Annotated[Duration | None, Field(alias="budget")] = None
    """Time after which no execution starts that is expected to end later."""
    timeout_seconds: Annotated[Duration, Field(alias="timeout")] = 3600.0
    """Time after which an execution is killed."""
    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Half width of the interval of the first metric, relative to its median, that is narrow enough.

    In turns it is that of the ratio to the baseline."""
    turn_seconds: Annotated[Duration, Field(alias="turns")] = 0.0
    """Duration of a turn in which one contender runs and the others are stopped; 0: each runs alone."""


@dataclass(frozen=True)
class Surroundings:
    """Meter, rule of disturbances and stopping rule of a benchmark."""

    make_meter: Callable[[], MachineMeter]
    find_disturbances: Callable[[MachineUsage], tuple[str, ...]]
    is_precise: Callable[[Sequence[Measurement], str, float], bool]
    """True if the figures of one contender, by its name, are narrow enough for a precision."""


def run_rounds(
    contenders: Sequence[Contender],
    rule: Rule,
    target: Target | None,
    scratch: Path,
    surroundings: Surroundings,
    *,
    earlier: Sequence[Measurement] = (),
    save: Callable[[Measurement], object],
    progress: Callable[[str], None],
) -> list[Measurement]:
    """Measure the contenders.

    Args:
        target: end of each execution; None: the programs' own.
        scratch: folder for the files of the executions; those of undisturbed successes are removed.

    Returns:
        all measurements, the earlier ones included.
    """
    began = time.monotonic() - sum(one.seconds for one in earlier)
    done = list(earlier)
    order = spread_order(len(contenders))
    for number in range(rule.rounds + MAX_DISTURBED):
        turns = [contenders[index] for index in (order if number % 2 == 0 else order[::-1])]
        wanted = [one for one in turns if is_wanted(one, done, rule)]
        if not wanted or (number >= rule.min_rounds and _is_enough(contenders, done, rule, surroundings)):
            break
        measured = {one.contender for one in done if one.round == number}  # before the benchmark was killed
        groups = [[one] for one in wanted if one.name not in measured]
        if rule.turn_seconds:  # a pair that lacks one is no pair
            groups = [] if measured else [[one for one in turns if not is_given_up(one, done)]]
        left_out: list[str] = []
        for group in groups:
            left = None if rule.budget_seconds is None else rule.budget_seconds - (time.monotonic() - began)
            if left is not None and left < sum(expected_seconds(one, done) for one in group):
                left_out.append(" and ".join(one.name for one in group))
                continue
            for measurement in _measure(group, number, rule, target, scratch, surroundings):
                done.append(measurement)
                save(measurement)
                progress(describe(measurement))
        if left_out:
            progress(f"the budget is spent: round {number + 1} is without {', '.join(left_out)}")
            if len(left_out) == len(groups):  # nor does any later round fit
                break
    return done


def spread_order(count: int) -> list[int]:
    """Return indices so that any first part of them is spread: first, last, middle, quarters and so on."""
    order: list[int] = [index for index in (0, count - 1) if 0 <= index < count]
    parts = [(0, count - 1)]
    while parts:
        first, last = parts.pop(0)
        middle = (first + last) // 2
        if last - first > 1:
            order.append(middle)
            parts += [(first, middle), (middle, last)]
    return list(dict.fromkeys(order))


def is_wanted(contender: Contender, done: Sequence[Measurement], rule: Rule) -> bool:
    """Return True if a contender still has to be measured."""
    own = [one for one in done if one.contender == contender.name]
    return (
        sum(one.counts for one in own) < rule.rounds
        and sum(bool(one.disturbances) for one in own) < MAX_DISTURBED
        and not is_given_up(contender, done)
    )


def is_given_up(contender: Contender, done: Sequence[Measurement]) -> bool:
    """Return True if a contender has failed too often to be measured again."""
    return sum(bool(one.error) for one in done if one.contender == contender.name) >= MAX_FAILURES


def expected_seconds(contender: Contender, done: Sequence[Measurement]) -> float:
    """Return the time that an execution is expected to take: the longest so far; 0 before the first."""
    return max((one.seconds for one in done if one.contender == contender.name), default=0.0)


def _is_enough(
    contenders: Sequence[Contender], done: Sequence[Measurement], rule: Rule, surroundings: Surroundings
) -> bool:
    for contender in contenders:
        own = [one for one in done if one.contender == contender.name and one.counts]
        if is_given_up(contender, done):
            continue
        if len(own) < rule.min_rounds or not surroundings.is_precise(done, contender.name, rule.precision):
            return False
    return True


def _measure(
    contenders: Sequence[Contender],
    number: int,
    rule: Rule,
    target: Target | None,
    scratch: Path,
    surroundings: Surroundings,
) -> Iterator[Measurement]:
    """Measure contenders once, several of them in turns."""
    folders = [execution_folder(scratch, contender.name, number) for contender in contenders]
    for folder in folders:
        end_earlier_execution(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    measurements = execute(
        list(zip(contenders, folders, strict=True)),
        number,
        ExecutionRule(rule.steps, target, rule.timeout_seconds, rule.turn_seconds),
        make_meter=surroundings.make_meter,
        find_disturbances=surroundings.find_disturbances,
    )
    if rule.turn_seconds and (reason := too_few_turns(measurements)):
        measurements = [replace(one, error=reason) for one in measurements]
    for contender, folder, measurement in zip(contenders, folders, measurements, strict=True):
        if not measurement.error:
            _keep_records(folder)
            yield measurement
            continue
        secrets = known_secrets(contender.command, contender.environment, os.environ)
        yield replace(measurement, error=redact_text(measurement.error, secrets))


def _keep_records(folder: Path) -> None:
    """Remove what is large and not read again: checkpoints and scratch files of a run."""
    for name in ("checkpoints", "scratch", "tensorboard", "tokenizer"):
        shutil.rmtree(run_of_execution(folder).path / name, ignore_errors=True)


def execution_folder(scratch: Path, contender: str, number: int) -> Path:
    """Return the folder of the files of one execution."""
    name = "".join(letter if letter.isalnum() or letter in "-._=" else "-" for letter in contender)
    digest = hashlib.sha256(contender.encode()).hexdigest()[:8]  # names may differ in other letters alone
    return scratch / f"{number:03d}-{name[:60]}-{digest}"


def describe(measurement: Measurement) -> str:
    """Return one line about a measurement."""
    text = f"round {measurement.round + 1}  {measurement.contender}  {measurement.seconds:.1f} s"
    seconds = sorted(step.seconds for step in measurement.steps if step.seconds == step.seconds)
    if seconds:
        text += f"  {len(measurement.steps)} steps, median {seconds[len(seconds) // 2] * 1e3:.1f} ms"
        if first_steady_step(measurement) == len(measurement.steps):
            text += f", no step time: that takes {MIN_STEPS} timed steps that settle"
    if measurement.error:
        text += f"  failed: {measurement.error}"
    elif measurement.disturbances:
        text += f"  disturbed: {'; '.join(measurement.disturbances)}"
    return text
