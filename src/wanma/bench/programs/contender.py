"""Contender of a benchmark: a job with settings, or any command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from wanma.bench.programs.python_environment import PythonEnvironment

ContenderKind = Literal["job", "command"]


@dataclass(frozen=True)
class Patterns:
    """Regular expressions that find numbers in the lines of a program's output; group 1 is the number.

    A line with a match of `step` ends a step; the other patterns look at the lines since the last one.
    Without `step`, each line in which `loss`, `samples` or `targets` matches ends a step.
    """

    step: str | None = None
    loss: str | None = None
    samples: str | None = None
    """Samples of the step, not those since the start."""
    targets: str | None = None
    samples_per_second: str | None = None
    figures: Mapping[str, str] = field(default_factory=dict)
    """Patterns of figures of the whole execution, by name with unit; the last match counts."""

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Fault:
    """Fault that the benchmark causes in a run: SIGKILL of one rank."""

    after_step: int
    """Completed optimizer steps after which it happens."""
    rank: int


@dataclass(frozen=True)
class Contender:
    """A job with settings, or a command, as a benchmark measures it.

    Its texts may have words for places of the machine: see `places`.
    """

    name: str
    kind: ContenderKind
    job: str = ""
    """Path of the job file; of kind job. In a suite it is relative to the folder of the result."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Overrides of the job by key, as on the command line."""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of the caller."""
    folder: str = ""
    """Working directory; empty: that of the caller."""
    python_environment: PythonEnvironment | None = None
    """Python environment of a command; None: that of the caller."""
    patterns: Patterns = Patterns()
    fault: Fault | None = None
    link_megabits_per_second: float | None = None
    """Rate of the link between two nodes of this machine on which a job runs; None: it runs as it says."""
    description: str = ""
    """Sentence on the contender; it decides nothing of an execution."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]

    def describe(self) -> str:
        """Return the contender as a command line."""
        if self.kind == "command":
            return shlex.join(self.command)
        return shlex.join(["wanma", "train", self.job, *self.overrides])

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        content["settings"], content["environment"] = dict(self.settings), dict(self.environment)
        content["command"] = list(self.command)
        content["patterns"] = {part.name: getattr(self.patterns, part.name) for part in fields(Patterns)}
        content["patterns"]["figures"] = dict(self.patterns.figures)
        if not self.description:
            del content["description"]  # as below
        if self.link_megabits_per_second is None:
            del content["link_megabits_per_second"]
        if self.python_environment is None:
            del content["python_environment"]  # as suites of earlier versions have it: equal hashes
        else:
            content["python_environment"] = self.python_environment.to_json()
        content["fault"] = (
            None if self.fault is None else {"after_step": self.fault.after_step, "rank": self.fault.rank}
        )
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Contender:
        """Return the contender that `to_json` wrote."""
        values = {part.name: content[part.name] for part in fields(cls) if part.name in content}
        values["command"] = tuple(values.get("command", ()))
        values["patterns"] = Patterns(**values.get("patterns", {}))
        values["fault"] = Fault(**values["fault"]) if values.get("fault") else None
        environment = values.get("python_environment")
        values["python_environment"] = PythonEnvironment(**environment) if environment else None
        return cls(**values)
