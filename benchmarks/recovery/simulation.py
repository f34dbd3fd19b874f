"""Simulation of the goodput of long runs under published failure rates.

It takes seconds, on any machine.

OMP_NUM_THREADS=1 python -m benchmarks.recovery.simulation [--days 90] [--runs 8] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Sequence

from benchmarks.common import RESULTS, commit, table
from benchmarks.recovery.goodput import daly_interval, optimal_intervals, simulate_goodput, young_interval
from wanma.planner.forecast.failure_model import (
    LLAMA3_FAILURE_RATES,
    CheckpointTier,
    CheckpointTiers,
    FailureRates,
    expected_goodput,
)
from wanma.planner.forecast.goodput import (
    DISK_RESTART_SECONDS,
    MEMORY_RESTART_SECONDS,
    PARTNER_RESTART_SECONDS,
)

STEP, DEVICES = 6.0, (1_024, 16_384, 100_000)
MEMORY, PARTNER = (
    CheckpointTier(0.05, MEMORY_RESTART_SECONDS, 0.5),
    CheckpointTier(0.05, PARTNER_RESTART_SECONDS, 1.0),
)
DISK = CheckpointTier(0.05, DISK_RESTART_SECONDS, 60.0)
SYSTEMS = {
    "disk, training waits 30 s; 10 min": CheckpointTiers(CheckpointTier(30.0, 600.0)),
    "disk in the background; 10 min": CheckpointTiers(CheckpointTier(0.05, 600.0, 60.0)),
    "disk in the background; 2 min": CheckpointTiers(DISK),
    "and in memory; 10 s": CheckpointTiers(DISK, None, MEMORY),
    "and on the partner node; 30 s": CheckpointTiers(DISK, PARTNER, MEMORY),
    "the same, a replica less for 1 h": CheckpointTiers(
        DISK, PARTNER, MEMORY, replica_loss_seconds=3600 / 128
    ),
}
RSC1 = FailureRates.from_counts(0, 6.5, 0, devices=8, days=1000)
"""Failure rate of RSC-1: 6.50 in 1,000 days of a node of 8 A100 (Kokolis et al. 2025, arXiv 2410.21680)."""
PUBLISHED = (("Llama 3", 16_384, 0.90), ("MegaScale", 12_288, 0.90), ("ByteRobust", 9_600, 0.97))
TIERS = ["checkpoints; recovery time", "GPUs", "optimal intervals, steps", "closed form", "simulated"]
IN_MEMORY = ["GPUs", "steps", "1 s", "10 s", "60 s", "600 s"]
CHECKPOINTS = ["GPUs", "minutes", "60 s", "120 s", "600 s", "1,800 s"]
CHECKS = ["wait", "Young", "Daly", "search", "goodput at Daly's", "simulated at the search's"]
RUNS = [
    "run",
    "GPUs",
    "hours, Llama 3's rate",
    "hours, RSC-1's",
    "goodput, %",
    "minutes per failure, Llama 3's rate",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=float, default=90, help="of every simulated run")
    parser.add_argument("--runs", type=int, default=8, help="of every cell, each with its own failures")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    def simulated(recovery: CheckpointTiers, every: Sequence[float], devices: int) -> str:
        """Return the mean and standard deviation over the runs, as text."""
        runs = [
            simulate_goodput(LLAMA3_FAILURE_RATES, recovery, every, devices, options.days, at)
            for at in range(options.runs)
        ]
        return f"{100 * statistics.mean(runs):.2f} ± {100 * statistics.stdev(runs):.2f}"

    def system(name: str, recovery: CheckpointTiers, devices: int) -> list[str]:
        every = optimal_intervals(LLAMA3_FAILURE_RATES, recovery, devices, STEP)
        steps = ", ".join(f"{seconds / STEP:.0f}" for seconds in every)
        share = f"{100 * expected_goodput(LLAMA3_FAILURE_RATES, recovery, every, devices):.2f}"
        return [name, f"{devices:,}", steps, share, simulated(recovery, every, devices)]

    def in_memory(devices: int, steps: int) -> list[str]:
        near = [CheckpointTier(0.05, restore, 0.5) for restore in (1.0, 10.0, 60.0, 600.0)]
        every = (STEP * steps, STEP * steps, STEP * max(steps, 100))
        return [
            f"{devices:,}",
            f"{steps:,}",
            *(simulated(CheckpointTiers(DISK, at, at), every, devices) for at in near),
        ]

    def checkpoints(devices: int, minutes: int) -> list[str]:
        disks = [CheckpointTier(0.05, restore, 60.0) for restore in (60.0, 120.0, 600.0, 1800.0)]
        every = (STEP, STEP, 60.0 * minutes)
        shares = (simulated(CheckpointTiers(disk, PARTNER, MEMORY), every, devices) for disk in disks)
        return [f"{devices:,}", str(minutes), *shares]

    def check(stall: float) -> list[str]:
        mean, recovery = (
            LLAMA3_FAILURE_RATES.mean_seconds_between(16_384),
            CheckpointTiers(CheckpointTier(stall, 600.0)),
        )
        every, daly = (
            optimal_intervals(LLAMA3_FAILURE_RATES, recovery, 16_384, 0.01),
            daly_interval(stall, mean),
        )
        share = 100 * expected_goodput(LLAMA3_FAILURE_RATES, recovery, (daly,), 16_384)
        row = [f"{stall:g}", *(f"{seconds:,.1f}" for seconds in (young_interval(stall, mean), daly, *every))]
        return [*row, f"{share:.2f}", simulated(recovery, every, 16_384)]

    def published(name: str, devices: int, share: float) -> list[str]:
        hours = [rates.mean_seconds_between(devices) / 3600 for rates in (LLAMA3_FAILURE_RATES, RSC1)]
        return [
            name,
            f"{devices:,}",
            *(f"{x:.2f}" for x in (*hours, 100 * share, 60 * (1 - share) * hours[0])),
        ]

    command = (
        f"python -m benchmarks.recovery.simulation --days {options.days:g} --runs {options.runs} --write"
    )
    text = f"""# Long runs under failures, simulated

{datetime.date.today()}, wanma at {commit()}: `{command}`.
No hardware takes part. Goodput in %, mean ± standard deviation of the runs; failure rates of Llama 3's run,
steps of 6 s. Recovery time is the time from a failure to the next step. Summary and assumptions:
[Simulated goodput](recovery-goodput.md).

## Kinds of checkpoints

{table(TIERS, [system(name, where, devices) for name, where in SYSTEMS.items() for devices in DEVICES])}
## Interval of in-memory checkpoints in steps, and their recovery time; on disk every 100 steps or more

{table(IN_MEMORY, [in_memory(devices, steps) for devices in DEVICES for steps in (1, 10, 100, 1000)])}
## Interval of checkpoints on disk in minutes, and their recovery time; in memory every step

{table(CHECKPOINTS, [checkpoints(devices, minutes) for devices in DEVICES for minutes in (1, 10, 100)])}
## Optimal interval in seconds beside Young and Daly: disk only, 16,384 GPUs, recovery time 10 min

{table(CHECKS, [check(stall) for stall in (0.05, 5.0, 30.0, 300.0, 1800.0)])}
## Published runs: hours between failures, and the time per failure that their goodput leaves

{table(RUNS, [published(*run) for run in PUBLISHED])}"""
    print(text)
    if options.write:
        (RESULTS / "recovery-simulation.md").write_text(text)


if __name__ == "__main__":
    main()
