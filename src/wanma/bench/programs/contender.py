"""Contender of a benchmark: a job with settings, or any command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from wanma.bench.programs.python_environment import PythonEnvironment
from wanma.bench.stored_record import StoredRecord
from wanma.job.sections.base import Section

ContenderKind = Literal["job", "command"]


class Patterns(Section):
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
    figures: dict[str, str] = Field(default_factory=dict)
    """Patterns of figures of the whole execution, by name with unit; the last match counts."""


class Fault(Section):
    """Fault that the benchmark causes in a run: SIGKILL of one rank."""

    after_step: Annotated[int, Field(ge=1)]
    """Completed optimizer steps after which it happens."""
    rank: Annotated[int, Field(ge=0)] = 0


def override_texts(settings: Mapping[str, str]) -> list[str]:
    """Return settings of a job as overrides on a command line."""
    return [f"{key}={value}" for key, value in settings.items()]


@dataclass(frozen=True)
class Contender(StoredRecord):
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
    patterns: Patterns = field(default_factory=Patterns)
    fault: Fault | None = None
    link_megabits_per_second: float | None = None
    """Rate of the link between two nodes of this machine on which a job runs; None: it runs as it says."""
    description: str = ""
    """Sentence on the contender; it decides nothing of an execution."""

    @property
    def overrides(self) -> list[str]:
        return override_texts(self.settings)

    def to_json(self) -> dict[str, Any]:
        content = super().to_json()
        # Suites of earlier versions lack these: equal hashes.
        for name in ("description", "link_megabits_per_second", "python_environment"):
            if not content[name]:
                del content[name]
        return content
