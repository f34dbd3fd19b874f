"""Forecasts beside real runs on this node's processors: 3 models that no calibration has seen.

    python -m benchmarks.planner.real --calibrate         # a minute, at rest
    python -m benchmarks.planner.real --minutes 5         # carries on with the rounds that are left
    python -m benchmarks.planner.real --fresh --calibrate    # the same, and forgets all that was measured
    python -m benchmarks.planner.real --memory --minutes 5   # only peaks, of few steps; needs no quiet
    python -m benchmarks.planner.real --report

A run's steps count only where other programs left the machine alone. The machine may be the guest of another
whose other guests slow it down, which no counter shows: so all cases run in turn, in rounds, each round in an
order of its own, and slow stretches fall on all of them alike. Runs of two other models correct the
calibration, as `wanma plan --learn` does. State and report are in docs/results/planner-real.*.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, BenchmarkError, commit, machine, run_command
from benchmarks.planner.real_cases import MODELS, cases, job_text
from benchmarks.planner.real_report import report, steps_that_count
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.process_tree import adopt_orphans
from wanma.data.opening import prepare_job_data
from wanma.hardware.discovery.node import discover_node
from wanma.job.file.loading import load_job
from wanma.planner.hardware_model.calibration import calibration_file, load_calibration

STATE = RESULTS / "planner-real.json"
RANKS = (1, 2, 4)
ROUNDS = 3
"""Executions of each number of ranks in a calibration."""
MEMORY_STEPS = 5
"""Steps of a run for memory: a process hardly grows after the third, and the last one does not count."""
WARM_UP = 2
"""First steps of a run, which do not count; nor does the last one, which saves."""
TIMEOUT_SECONDS = 600.0
METER_SECONDS = 0.25
"""Time between two samples of what other programs use: steps are short."""


def main() -> None:
    options = parse()
    state: dict[str, Any] = {"runs": []}
    if STATE.exists() and not options.fresh:
        state = json.loads(STATE.read_text())
    try:
        if not options.report:
            check_machine(state)
        if options.calibrate:
            _calibrate(state, options.seconds)
        elif options.memory:
            _measure_memory(state, options)
        elif not options.report:
            _run(state, options)
        text = report(state)
        STATE.with_suffix(".md").write_text(text)
        print(text)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")


def check_machine(state: dict[str, Any]) -> None:
    """Check that what was measured is of this processor.

    Raises:
        BenchmarkError: it is of another one, and medians over both would be of none.
    """
    (here,) = _processors(discover_node().to_json())
    found = {name for run in state["runs"] for name in _processors(run["cluster"])}
    if others := found - {here}:
        raise BenchmarkError(
            f"{STATE.name} has runs on {', '.join(sorted(others))}, and this is {here}: "
            "begin again with --fresh --calibrate"
        )


def _processors(cluster: dict[str, Any]) -> set[str]:
    """Return the names of the processors of a cluster."""
    return {node["cpu"]["name"] for node in cluster["nodes"]}


def _calibrate(state: dict[str, Any], seconds: float) -> None:
    """Measure each number of ranks for `seconds`, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "wanma", "bench", "machine", "--save", "--ranks", ",".join(map(str, RANKS))]
        command += ["--rounds", str(ROUNDS), "--seconds", str(seconds / ROUNDS), "--results", folder]
        environment, log = {**os.environ, "XDG_CACHE_HOME": folder}, Path(folder) / "output.log"
        run_command([sys.executable, *command], environment, log, TIMEOUT_SECONDS + 3 * len(RANKS) * seconds)
        calibration = load_calibration(calibration_file(environment))
    for one in calibration.devices:
        print(f"{one.ranks} ranks: {one.disturbed} of {len(one.points)} disturbed")
    state["calibration"] = calibration.to_json()
    state["machine"] = machine()
    _save(state)


def _run(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Run, round by round, every case that lacks runs or quiet steps, until the time is over."""
    deadline = time.monotonic() + options.minutes * 60
    for turn in range(options.rounds + options.retries):
        in_turn = list(cases())
        random.Random(turn).shuffle(in_turn)
        for name, layout in in_turn:
            if (options.model and name not in options.model) or (
                options.layout and layout not in options.layout
            ):
                continue
            runs = [run for run in state["runs"] if (run["model"], run["layout"]) == (name, layout)]
            quiet = sum(len(steps_that_count(run)) for run in runs)
            if len(runs) > turn or (turn >= options.rounds and quiet >= options.quiet):
                continue
            if time.monotonic() >= deadline:
                return
            taken = _train(name, layout, options.steps, options.foreign_limit)
            state["runs"].append(taken)
            _note_memory(state, taken)
            _save(state)
            counted = len(steps_that_count(taken))
            print(
                f"round {turn + 1}: {name}, {layout}: {counted} of {len(taken['steps'])} steps were quiet",
                flush=True,
            )


def _measure_memory(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure the memory of every case that lacks it."""
    deadline = time.monotonic() + options.minutes * 60
    found = state.get("memory", {})
    for name, layout in cases():
        if (options.model and name not in options.model) or (options.layout and layout not in options.layout):
            continue
        case = f"{name}, {layout}"
        if case in found or time.monotonic() >= deadline:
            continue
        taken = _train(name, layout, MEMORY_STEPS, options.foreign_limit)
        _note_memory(state, taken)
        _save(state)
        print(f"{case}: {taken['memory_bytes'] / 2**20:.0f} MiB", flush=True)


def _note_memory(state: dict[str, Any], taken: dict[str, Any]) -> None:
    """Store the memory of a case; the newest run counts."""
    noted = {"bytes": taken["memory_bytes"], "date": taken["date"], "commit": taken["commit"]}
    state.setdefault("memory", {})[f"{taken['model']}, {taken['layout']}"] = noted


def _foreign_cpu(meter: MachineMeter, record: dict[str, Any]) -> float:
    """Return the mean CPUs of other programs during a step; infinite if unknown."""
    found = meter.foreign_cpu(record["time"] - record["step_seconds"], record["time"])
    return math.inf if found is None else round(found, 3)


def _train(name: str, layout: str, steps: int, foreign_limit: float) -> dict[str, Any]:
    """Train once; return the plan, the steps, and the peak of rank 0's memory before the last step.

    The last step saves, which takes a copy of the state that forecasts do not count.
    """
    with tempfile.TemporaryDirectory(prefix="wanma-real-") as folder:
        job, run = Path(folder) / "job.toml", Path(folder) / "run"
        job.write_text(job_text(name, layout, steps))
        prepare_job_data(load_job(job).data)
        command = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(run)]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GLIBC_", "MKL_"))
        }
        adopt_orphans()
        with MachineMeter(interval_seconds=METER_SECONDS) as meter:
            run_command(command, environment, Path(folder) / "output.log", TIMEOUT_SECONDS)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        planned = json.loads((run / "plan.json").read_text())
    timed = [
        {
            "seconds": record["step_seconds"],
            "phases": record["phases"],
            "others": _foreign_cpu(meter, record),
        }
        for record in records[WARM_UP:-1]
    ]
    return {
        "model": name,
        "layout": layout,
        "settings": asdict(MODELS[name]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "foreign_limit": foreign_limit,
        "plan": planned["plan"],
        "cluster": discover_node().to_json(),
        "memory_bytes": max(record["memory_bytes"] for record in records[:-1]),
        "steps": timed,
    }


def _save(state: dict[str, Any]) -> None:
    temporary = STATE.with_suffix(".partial")
    temporary.write_text(json.dumps(state, indent=1) + "\n")
    temporary.replace(STATE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--calibrate", action="store_true", help="measure operators and collectives first")
    add("--seconds", type=float, default=20.0, help="of that, for each number of ranks")
    add("--memory", action="store_true", help="measure only peaks of memory")
    add("--fresh", action="store_true", help="forget all that was measured; with --calibrate")
    add("--report", action="store_true", help="only the report of what was measured")
    add("--minutes", type=float, default=5.0, help="start no run after this (default 5)")
    add("--steps", type=int, default=14, help="of a run (default 14)")
    add("--rounds", type=int, default=2, help="runs of every case (default 2)")
    add("--retries", type=int, default=2, help="more runs of a case that lacks quiet steps (default 2)")
    add("--quiet", type=int, default=8, help="quiet steps that every case wants (default 8)")
    add("--foreign-limit", type=float, default=0.1, help="CPUs that others may use in one (default 0.1)")
    add("--model", nargs="+", choices=list(MODELS), help="only these")
    add("--layout", nargs="+", help="only these")
    options = parser.parse_args()
    if options.fresh and not options.calibrate:
        parser.error("--fresh forgets the calibration, too: add --calibrate")
    return options


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
