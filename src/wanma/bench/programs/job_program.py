"""Program of a contender that is a job: `wanma train`, as a user runs it, and what its run directory has."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.limited_link import command_over_link
from wanma.bench.programs.target import Progress
from wanma.engines.engine_record import EngineRecord, read_engine_record
from wanma.engines.selection import get_engine
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_job
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import Report, read_report
from wanma.report.step_parts import GPU_IDLE, time_name

UNKNOWN_HOSTS = ("hosts of the engine",)
"""Names of the hosts of a run whose engine does not tell them."""
LOCAL_RUN = "run"
"""Name of the run directory of a run on this machine."""


def run_of_execution(folder: Path) -> RunDirectory:
    """Return the run directory in the folder of an execution; an engine's runs have names of their own."""
    return RunDirectory(next(folder.glob("bench-*"), folder / LOCAL_RUN))


def end_earlier_execution(folder: Path) -> None:
    """End the run that an execution has left with an engine when its benchmark was killed.

    Raises:
        WanmaError: the engine does not answer.
    """
    record = read_engine_record(run_of_execution(folder))
    if record is not None:
        get_engine(record.engine).cancel(record.handle, is_immediate=True)
        _discard(record)


def _discard(record: EngineRecord) -> None:
    """Remove the files of the ended run that only its hosts have; hosts that do not answer keep them."""
    with contextlib.suppress(WanmaError):
        get_engine(record.engine).discard(record.handle)


class JobProgram:
    """`wanma train` of a contender's job in a new run directory.

    A run that an engine places on other hosts has a name that no other has: the hosts keep it by its name.
    It has a record of the engine once it is submitted; its processes are not descendants of this one. Slurm's
    runs outlive the command that shows them.

    Args:
        folder: folder of this execution, which will contain the run directory.
        steps: optimizer steps; None: as many as the job says.
    """

    def __init__(self, contender: Contender, folder: Path, steps: int | None) -> None:
        self.engine = load_job(Path(contender.job), contender.overrides).cluster.engine
        self.is_elsewhere = self.engine != "local"
        self.run = RunDirectory(
            folder / (f"bench-{secrets.token_hex(8)}" if self.is_elsewhere else LOCAL_RUN)
        )
        limit = [] if steps is None else [f"train.steps={steps}"]
        # The working directory is not a place of modules, unless the user has made it one.
        self.command = [sys.executable, "-P", "-m", "wanma", "train", contender.job]
        self.command += [*contender.overrides, *limit, "--run-dir", str(self.run.path)]
        if contender.link_megabits_per_second is not None and self.engine == "local":
            self.command = command_over_link(self.command, contender.link_megabits_per_second)

    def progress(self) -> list[Progress]:
        """Return the steps and validations so far."""
        if not self.run.metrics.exists():
            return []
        return progress_of(read_report(self.run))

    def read(self, _output: Sequence[tuple[float, str]]) -> tuple[tuple[StepRecord, ...], dict[str, float]]:
        """Return the steps of the ended run, and figures of the run as a whole."""
        report = read_report(self.run)
        return step_records(report), run_figures(report)

    def request_stop(self, process: int) -> None:
        """Ask the run to end after its step; `process` is the number of its command."""
        record = read_engine_record(self.run)
        if record is not None and not (engine := get_engine(record.engine)).ends_with_caller:
            engine.cancel(record.handle, is_immediate=False)
        else:
            os.kill(process, signal.SIGINT)

    def abandon(self) -> None:
        """End what is left of a run at once, whose command has been killed."""
        if self.is_elsewhere and (record := read_engine_record(self.run)) is not None:
            get_engine(record.engine).cancel(record.handle, is_immediate=True)

    def leave_hosts(self) -> tuple[str, ...]:
        """Remove the files of the ended run from its hosts, and return them."""
        if not self.is_elsewhere or (record := read_engine_record(self.run)) is None:
            return ()
        hosts: tuple[str, ...] = ()
        with contextlib.suppress(WanmaError):
            hosts = get_engine(record.engine).hosts(record.handle)
        _discard(record)
        return hosts or UNKNOWN_HOSTS


def step_records(report: Report) -> tuple[StepRecord, ...]:
    """Return the steps of a run's metrics."""
    columns = report.steps
    phases = {name: short for name in columns if (short := time_name(name))}
    begun = float(report.starts[0].get("step", 0)) if report.starts else 0.0
    records, before = [], _samples_before(columns, begun)
    for row, step in enumerate(columns["step"]):
        samples = _number(columns, "samples", row)
        seconds = _number(columns, "step_seconds", row)
        rate = _number(columns, "tokens_per_second", row)
        records.append(
            StepRecord(
                step=int(step),
                time=columns["time"][row],
                seconds=math.nan if seconds is None else seconds,
                samples=None if samples is None else samples - before,
                targets=None if rate is None or seconds is None else rate * seconds,
                loss=_number(columns, "loss", row),
                mfu=_number(columns, "mfu", row),
                phases={
                    short: value
                    for name, short in phases.items()
                    if (value := _number(columns, name, row)) is not None
                }
                | _gpu_idle(columns, row),
            )
        )
        before = before if samples is None else samples
    return tuple(records)


def _gpu_idle(columns: Mapping[str, Sequence[float]], row: int) -> dict[str, float]:
    """Return the time in which no kernel ran, of a step in which the GPU was sampled."""
    busy, seconds = _number(columns, "gpu_utilization", row), _number(columns, "step_seconds", row)
    return {} if busy is None or seconds is None else {GPU_IDLE: (1.0 - busy) * seconds}


def _samples_before(columns: Mapping[str, Sequence[float]], begun: float) -> float:
    """Return the samples before the first recorded step: those of a run that is resumed are not its own."""
    samples = columns.get("samples", [])
    if not samples or begun == 0:
        return 0.0
    return samples[0] - (samples[1] - samples[0] if len(samples) > 1 else 0.0)


def _number(columns: Mapping[str, Sequence[float]], name: str, row: int) -> float | None:
    value = columns[name][row] if name in columns else math.nan
    return value if math.isfinite(value) else None


def run_figures(report: Report) -> dict[str, float]:
    """Return figures of a run as a whole: checkpoints, recoveries, memory, validations."""
    figures: dict[str, float] = {}
    for name, key in (
        ("checkpoint_stall_seconds", "stall_seconds"),
        ("checkpoint_write_seconds", "write_seconds"),
    ):
        values = [float(event[key]) for event in report.checkpoints if event.get(key) is not None]
        if values:
            figures[name] = sum(values) / len(values)
    written = [event for event in report.checkpoints if event.get("bytes") and event.get("write_seconds")]
    if written:
        figures["checkpoint_bytes_per_second"] = sum(event["bytes"] for event in written) / sum(
            event["write_seconds"] for event in written
        )
    if report.recoveries:
        figures["recovery_seconds"] = max(float(event["seconds"]) for event in report.recoveries)
        figures["repeated_steps"] = sum(float(event["repeated_steps"]) for event in report.recoveries)
    if (memory := report.highest("memory_bytes")) is not None:
        figures["rank_memory_bytes"] = memory
    for validation in report.validations[-1:]:
        figures |= _validation_figures(validation)
    if report.seconds > 0 and report.steps["step"]:
        # Goodput: the share of the wall clock between first start and end that was spent on steps that last.
        steps = [value for value in report.steps.get("step_seconds", []) if math.isfinite(value)]
        figures["goodput"] = min(sum(steps) / report.seconds, 1.0)
    return figures


def progress_of(report: Report) -> list[Progress]:
    """Return the steps and validations of a run in the order of time."""
    columns, points, samples_at = report.steps, [], {}
    for row, step in enumerate(columns["step"]):
        samples = _number(columns, "samples", row) or 0.0
        samples_at[int(step)] = samples
        loss = _number(columns, "loss", row)
        figures = {} if loss is None else {"loss": loss}
        points.append(Progress(columns["time"][row], samples, figures))
    for event in report.validations:
        samples = samples_at.get(int(event["step"]), 0.0)
        points.append(Progress(float(event["time"]), samples, _validation_figures(event)))
    return sorted(points, key=lambda point: point.time)


def _validation_figures(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss of a validation, its accuracy or perplexity, and the metrics of the job."""
    known = {name: event.get(name) for name in ("accuracy", "perplexity")}
    found = {"validation_loss": event.get("loss"), **known, **(event.get("metrics") or {})}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
