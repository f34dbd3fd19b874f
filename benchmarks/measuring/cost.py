"""Cost of measuring: step time of one training, with the meter and without it for some seconds in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.common import BenchmarkError
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.process_tree import adopt_orphans, descendants, end_descendants
from wanma.bench.programs.running_program import wait_for_end
from wanma.bench.programs.watched_program import POLL_SECONDS
from wanma.bench.suites.suite_file import find_suite, make_suite, read_suite_file
from wanma.hardware.measurement.cpu_load import busy_cpu_seconds
from wanma.observe.metrics.process_usage import read_process_table, sum_trees

START_SECONDS = 120.0
"""Time, in seconds, that a training has for its first steps."""
WARM_UP_STEPS = 10
SUITE = "gpt"
"""Shipped suite whose job is trained."""


@dataclass(frozen=True)
class Interval:
    """Some seconds of a training."""

    began: float
    """Unix time, in seconds."""
    ended: float
    own_cpu: float
    """CPUs that this process used, the meter's thread included."""
    foreign_cpu: float
    """CPUs that others used: neither the training nor this process."""


def sample_cost(folder: Path, pairs: int, seconds: float, ranks: int) -> list[dict[str, float]]:
    """Train, and return a row for each pair of intervals, one with the meter and one without.

    Args:
        folder: empty folder for the run.
        pairs: number of pairs; every other one begins without the meter.
        seconds: duration of an interval.
        ranks: data parallel ranks.

    Raises:
        BenchmarkError: the training did not start, or ended.
    """
    adopt_orphans()
    bystanders = {process.pid for process in descendants()}
    log, metrics = folder / "output.log", folder / "run" / "metrics.jsonl"
    process = _start_training(folder, log, ranks)
    try:
        deadline = time.monotonic() + START_SECONDS
        while len(_step_ends(metrics)) < WARM_UP_STEPS:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the training did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        taken = []
        for number in range(pairs):
            order = (True, False) if number % 2 == 0 else (False, True)
            taken.append({is_on: _take_interval(process, seconds, is_on) for is_on in order})
        if process.poll() is not None:
            raise BenchmarkError(f"the training ended:\n{log.read_text()[-2000:]}")
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        end_descendants(bystanders)
    ends = _step_ends(metrics)
    return [_row(pair[True], pair[False], ends) for pair in taken]


def _start_training(folder: Path, log: Path, ranks: int) -> subprocess.Popen[bytes]:
    job, path = folder / "job.toml", find_suite(SUITE)
    job.write_text(make_suite(SUITE, read_suite_file(path), path.parent).job_text)
    command = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(folder / "run")]
    command += ["train.steps=1_000_000", f"parallel.dp_replicate={ranks}"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def _take_interval(process: subprocess.Popen[bytes], seconds: float, is_on: bool) -> Interval:
    """Wait, with the meter as a benchmark does, or asleep."""
    foreign, before, began = _foreign_cpu_seconds(), time.process_time(), time.time()
    if is_on:
        with MachineMeter():
            while time.time() < began + seconds:
                wait_for_end(process, POLL_SECONDS)
    else:
        time.sleep(seconds)
    ended, own = time.time(), time.process_time() - before
    foreign = _foreign_cpu_seconds() - foreign
    return Interval(began, ended, own / (ended - began), foreign / (ended - began))


def _foreign_cpu_seconds() -> float:
    """Return the CPU seconds since boot of all but this process and its living descendants."""
    busy = busy_cpu_seconds() or 0.0
    return busy - sum_trees(read_process_table(), [os.getpid()])[os.getpid()].cpu_seconds


def _step_ends(metrics: Path) -> list[float]:
    """Return the unix times at which steps ended."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [float(json.loads(line)["time"]) for line in lines if line.endswith("\n")]


def _row(on: Interval, off: Interval, ends: list[float]) -> dict[str, float]:
    return {
        "on_step_seconds": _mean_step_seconds(on, ends),
        "off_step_seconds": _mean_step_seconds(off, ends),
        "meter_cpu": on.own_cpu - off.own_cpu,
        "foreign_cpu": max(on.foreign_cpu, off.foreign_cpu),
    }


def _mean_step_seconds(interval: Interval, ends: list[float]) -> float:
    """Return the mean time of the steps that began and ended within an interval."""
    inside = [
        after - before
        for before, after in pairwise(ends)
        if interval.began <= before and after <= interval.ended
    ]
    if not inside:
        raise BenchmarkError("no step lies within an interval: use longer ones with --seconds")
    return sum(inside) / len(inside)
