"""Cost of observing a run: processor time and memory of its supervisor with and without metrics and alerts.

    python benchmarks/diagnosis/cost.py --seconds 120

Both runs train the same job for the same time; metrics are read every five seconds, as by Prometheus.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common import ROOT, commit, machine
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.endpoint import TARGETS_FOLDER

READ_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, each of two runs")
    seconds = parser.parse_args().seconds
    off_cpu, off_memory, *_ = observed(seconds, is_on=False)
    on_cpu, on_memory, ranks_cpu, host = observed(seconds, is_on=True)
    print(f"{machine()}; wanma at {commit()}; {seconds:g} s of examples/gpt.toml")
    print(f"ranks: {ranks_cpu:.1f} s of processor time")
    print(f"supervisor without: {off_cpu:.2f} s, {off_memory / 2**20:.1f} MiB")
    print(f"supervisor with metrics and alerts: {on_cpu:.2f} s, {on_memory / 2**20:.1f} MiB")
    print(f"metrics and alerts take {(on_cpu - off_cpu) / ranks_cpu:.2%} of the ranks' time")
    print(f"rank 0 spends {host:.2%} of its steps in the loop's own Python, its records among it")


def observed(seconds: float, *, is_on: bool) -> tuple[float, float, float, float]:
    """Train for a time; return the supervisor's processor seconds and bytes, and the ranks' seconds.

    The last number is the share of the phase `host` in rank 0's steps.
    """
    with tempfile.TemporaryDirectory(prefix="wanma-cost-") as name:
        run = RunDirectory(Path(name) / "runs" / "cost")
        words = ["--metrics-port", "0"] if is_on else ["observe.alerts=false"]
        command = [str(Path(sys.executable).with_name("wanma")), "train", str(ROOT / "examples" / "gpt.toml")]
        process = subprocess.Popen(
            [*command, "train.steps=100000", "--run-dir", str(run.path), *words],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        supervisor = psutil.Process(process.pid)
        while not run.metrics.is_file():
            time.sleep(0.2)
        first_cpu, first_ranks = _cpu_seconds([supervisor]), _cpu_seconds(supervisor.children(recursive=True))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(READ_SECONDS)
            if is_on:
                (file,) = (run.path.parent / TARGETS_FOLDER).glob("*.json")
                address = json.loads(file.read_text())[0]["targets"][0]
                urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()
        used, memory = _cpu_seconds([supervisor]) - first_cpu, supervisor.memory_info().rss
        ranks = _cpu_seconds(supervisor.children(recursive=True)) - first_ranks
        process.send_signal(signal.SIGTERM)
        process.wait()
        steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        host = sum(step["phases"]["host"] for step in steps) / sum(step["step_seconds"] for step in steps)
        return used, float(memory), ranks, host


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


if __name__ == "__main__":
    main()
