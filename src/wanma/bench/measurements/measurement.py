"""One execution of a contender: a job with its settings, or a command.

All times are unix seconds, all durations seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from wanma.bench.stored_record import StoredRecord

COLUMNS = ("step", "time", "seconds", "samples", "targets", "loss", "mfu")
"""Columns of the steps in JSON, besides those of phases."""
PHASE = "phases."
"""Beginning of the names of a phase's column and metric."""


@dataclass(frozen=True)
class StepRecord:
    """Optimizer step, as its program reported it. None: the program does not report this."""

    step: int
    time: float
    """End of the step, in unix seconds."""
    seconds: float
    """Wall clock from the end of the previous step."""
    samples: float | None = None
    """Samples of the step, of all ranks; not those since the start."""
    targets: float | None = None
    """Tokens, or labelled samples, that the loss of the step counts."""
    loss: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the step, and its other times, as `step_parts` of the report takes them."""


@dataclass(frozen=True)
class MachineUsage:
    """State of this machine during a measurement. None: it cannot be read here."""

    foreign_cpu: float | None = None
    """Mean CPUs that processes outside the measurement used."""
    clock_hertz: tuple[float, float] | None = None
    """Lowest and mean clock of the CPU."""
    max_celsius: float | None = None
    is_throttled: bool | None = None
    """True if a CPU or GPU reduced its clock because of heat or power."""
    clock_step_seconds: float = 0.0
    """Largest jump of the wall clock against the monotonic one."""
    peak_memory_bytes: float | None = None
    """Largest memory of the measurement's processes."""


@dataclass(frozen=True)
class Utilization:
    """Use of this machine from the end of the first step to that of the last. None: it cannot be read here.

    Without steps it is of the whole execution.
    """

    cpu_utilization: float | None = None
    """CPU time of the measurement's processes over time and usable CPUs, 0 to 1."""
    gpu_utilization: float | None = None
    """Share of the time in which a kernel ran, mean over the GPUs, 0 to 1."""
    gpu_memory_bytes: float | None = None
    """Largest memory in use on a GPU, of all programs, in the whole execution."""
    network_bytes_per_second: float | None = None
    """Bytes sent and received on all interfaces but the loopback, of all programs."""
    disk_bytes_per_second: float | None = None
    """Bytes read and written on block devices, of all programs."""


@dataclass(frozen=True)
class TurnsTaken:
    """Turns of a contender that lived at once with others, and was stopped while they ran."""

    turn_seconds: float
    """Duration of a turn."""
    stops: tuple[tuple[float, float], ...]
    """Stops, from begin to end in unix seconds; no other time of the measurement contains them."""
    stopped_steps: int
    """Steps with a stop inside: its time is left out of theirs, and they have no phases."""
    shared_steps: int
    """Steps, from the first on, that ended while all contenders took turns; metrics of steps are of them."""
    shared_turns: int = 0
    """Turns after the first step, while all contenders took them."""


@dataclass(frozen=True)
class Measurement(StoredRecord):
    """One execution of a contender."""

    contender: str
    """Name of the contender."""
    round: int
    """Number of the round, from 0; in a round each contender runs once."""
    started: float
    """Unix time right before the start of the command."""
    seconds: float
    """From the start of the command to its end."""
    exit_code: int
    steps: tuple[StepRecord, ...]
    machine: MachineUsage = MachineUsage()
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the execution as a whole that no step has, by name with unit: `checkpoint_stall_seconds`."""
    disturbances: tuple[str, ...] = ()
    """Reasons why the measurement does not count; empty: it counts."""
    error: str = ""
    """Message of an execution that failed."""
    utilization: Utilization = Utilization()
    unwatched_hosts: tuple[str, ...] = ()
    """Hosts on which it ran, and where nobody watched what other programs did."""
    turns: TurnsTaken | None = None
    """Turns, in which times are by a clock that stands still in a stop; None: it ran alone."""

    @property
    def compared_steps(self) -> tuple[StepRecord, ...]:
        """Return the steps that are compared: of turns, those while all contenders took them."""
        return self.steps if self.turns is None else self.steps[: self.turns.shared_steps]

    @property
    def startup_seconds(self) -> float | None:
        """Return the seconds from the command to the end of the first step; None without a step."""
        return self.steps[0].time - self.started if self.steps else None

    @property
    def counts(self) -> bool:
        """Return True if it ended well and undisturbed."""
        return not self.exclusion_reasons

    @property
    def exclusion_reasons(self) -> tuple[str, ...]:
        """Return the reasons why it does not count."""
        if self.error:
            return (self.error,)
        return self.disturbances or ((f"exit code {self.exit_code}",) if self.exit_code else ())

    def to_json(self) -> dict[str, Any]:
        """Return the measurement with its steps as columns."""
        content = StoredRecord.to_json(dataclasses.replace(self, steps=()))
        content["steps"] = {name: [getattr(step, name) for step in self.steps] for name in COLUMNS}
        for name in dict.fromkeys(name for step in self.steps for name in step.phases):
            content["steps"][f"{PHASE}{name}"] = [step.phases.get(name) for step in self.steps]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the measurement that `to_json` wrote."""
        columns: Mapping[str, list[Any]] = content["steps"]
        steps = []
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            phases = {
                name.removeprefix(PHASE): seconds
                for name, seconds in row.items()
                if name.startswith(PHASE) and seconds is not None
            }
            steps.append({**row, "phases": phases})
        return super().from_json({**content, "steps": steps})
