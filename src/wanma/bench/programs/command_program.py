"""Program of a contender that is a command: numbers in its output, by patterns.

A line of Python in a script does the same without patterns, words in pairs of name and number:

    print("wanma step", "loss", 2.5, "samples", 32)
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from wanma.bench.measurements.measurement import PHASE, StepRecord
from wanma.bench.programs.contender import Contender, Patterns
from wanma.bench.programs.target import Progress
from wanma.job.errors import EXIT_USAGE, WanmaError

MARK = "wanma step"
"""Beginning of a line of a script that reports a step without patterns."""
FIGURE_MARK = "wanma figure"
"""Beginning of a line with figures of the whole execution."""


class CommandProgram:
    """A command, unchanged, whose output is read as it comes."""

    def __init__(self, contender: Contender, folder: Path, _steps: int | None) -> None:
        self.command = list(contender.command)
        self.is_elsewhere = False
        self._patterns = compile_patterns(contender.patterns)
        self._folder = folder
        self._output: Sequence[tuple[float, str]] = ()

    def watch(self, output: Sequence[tuple[float, str]]) -> None:
        """Take the list to which lines are added, each with its unix time of arrival."""
        self._output = output

    def progress(self) -> list[Progress]:
        samples, points = 0.0, []
        for step in self._steps():
            samples += step.samples or 0.0
            points.append(Progress(step.time, samples, {} if step.loss is None else {"loss": step.loss}))
        return points

    def read(self, output: Sequence[tuple[float, str]]) -> tuple[tuple[StepRecord, ...], dict[str, float]]:
        self._output = output
        figures: dict[str, float] = {}
        for _, line in output:
            if line.startswith(FIGURE_MARK):
                figures |= _named_numbers(line.removeprefix(FIGURE_MARK))
            for name, pattern in self._patterns.items():
                if name.startswith("figures.") and (value := _first_number(pattern, line)) is not None:
                    figures[name.removeprefix("figures.")] = value
        return self._steps(), figures

    def request_stop(self, process: int) -> None:
        """Ask the command to end, as Ctrl-C does: the leader of its group may be a shell."""
        os.killpg(process, signal.SIGINT)

    def abandon(self) -> None:
        """Nothing is left of a command that has been killed with its descendants."""

    def leave_hosts(self) -> tuple[str, ...]:
        return ()

    def _steps(self) -> tuple[StepRecord, ...]:
        """Return the steps of the lines so far; the first has no beginning, so its seconds are NaN."""
        ends: list[tuple[float, dict[str, float]]] = []
        numbers: dict[str, float] = {}
        end_patterns = ("step",) if "step" in self._patterns else ("loss", "samples", "targets")
        for time, line in self._output:
            if line.startswith(MARK):
                ends.append((time, _named_numbers(line.removeprefix(MARK))))
                continue
            found = {
                name: value
                for name, pattern in self._patterns.items()
                if (value := _first_number(pattern, line)) is not None
            }
            numbers |= found
            if any(name in found for name in end_patterns):
                ends.append((time, numbers))
                numbers = {}
        records = []
        for number, ((before, _), (time, values)) in enumerate(pairwise([(math.nan, {}), *ends]), 1):
            seconds = values.get("seconds", time - before)
            samples = values.get("samples")
            if samples is None and "samples_per_second" in values:
                samples = values["samples_per_second"] * seconds
            own = values.get("step", math.nan)
            records.append(
                StepRecord(
                    int(own) if math.isfinite(own) else number, time, seconds, samples,
                    values.get("targets"), values.get("loss"), values.get("mfu"),
                    {
                        name.removeprefix(PHASE): value
                        for name, value in values.items()
                        if name.startswith(PHASE)
                    },
                )
            )  # fmt: skip
        return tuple(records)


def compile_patterns(patterns: Patterns) -> dict[str, re.Pattern[str]]:
    """Return the compiled patterns by name, those of figures as `figures.NAME`.

    Raises:
        WanmaError: a pattern is no regular expression, or has no group for the number.
    """
    texts = {
        name: text
        for name in ("step", "loss", "samples", "targets", "samples_per_second")
        if (text := getattr(patterns, name)) is not None
    } | {f"figures.{name}": text for name, text in patterns.figures.items()}
    compiled = {}
    for name, text in texts.items():
        try:
            compiled[name] = re.compile(text)
        except re.error as error:
            raise WanmaError(
                f"the pattern of {name} is wrong: {error}", f"correct {text!r}", EXIT_USAGE
            ) from error
        if not compiled[name].groups:
            raise WanmaError(
                f"the pattern of {name} has no group", f"put the number in parentheses: {text!r}", EXIT_USAGE
            )
    return compiled


def _first_number(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    return None if match is None else _to_number(match[1])


def _to_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _named_numbers(text: str) -> dict[str, float]:
    """Return numbers by name from words in pairs: `loss 2.5 samples 32`."""
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return {name: value for name, word in pairs if (value := _to_number(word)) is not None}
