"""Long runs under published failure rates: the share of useful time, simulated. Seconds, on any machine.

OMP_NUM_THREADS=1 python -m benchmarks.recovery.simulation [--days 90] [--runs 8] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Sequence

from benchmarks.common import RESULTS, commit, table
from wanma.planner.reliability import (
    LLAMA3,
    Copy,
    Failures,
    Recovery,
    best_intervals,
    daly_interval,
    simulate,
    useful_share,
    young_interval,
)

STEP, DEVICES = 6.0, (1_024, 16_384, 100_000)
MEMORY, PARTNER, DISK = Copy(0.05, 10.0, 0.5), Copy(0.05, 30.0, 1.0), Copy(0.05, 120.0, 60.0)
SYSTEMS = {
    "disk, training waits 30 s; 10 min": Recovery(Copy(30.0, 600.0)),
    "disk in the background; 10 min": Recovery(Copy(0.05, 600.0, 60.0)),
    "disk in the background; 2 min": Recovery(DISK),
    "and own memory; 10 s": Recovery(DISK, None, MEMORY),
    "and a partner's memory; 30 s": Recovery(DISK, PARTNER, MEMORY),
    "the same, shrinks for 1 h": Recovery(DISK, PARTNER, MEMORY, shrink_seconds=3600 / 128),
}
RSC1 = Failures.observed(0, 6.5, 0, devices=8, days=1000)
PUBLISHED = (("Llama 3", 16_384, 0.90), ("MegaScale", 12_288, 0.90), ("ByteRobust", 9_600, 0.97))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=float, default=90, help="of every simulated run")
    parser.add_argument("--runs", type=int, default=8, help="of every cell, each with its own failures")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    def played(recovery: Recovery, every: Sequence[float], devices: int) -> str:
        """Mean and standard deviation over the runs."""
        shares = [
            100 * simulate(LLAMA3, recovery, every, devices, options.days, seed)
            for seed in range(options.runs)
        ]
        return f"{statistics.mean(shares):.2f} ± {statistics.stdev(shares):.2f}"

    systems, disks = [], []
    for name, recovery in SYSTEMS.items():
        for devices in DEVICES:
            every = best_intervals(LLAMA3, recovery, devices, STEP)
            share = f"{100 * useful_share(LLAMA3, recovery, every, devices):.2f}"
            steps = ", ".join(f"{seconds / STEP:.0f}" for seconds in every)
            systems.append([name, f"{devices:,}", steps, share, played(recovery, every, devices)])
    grids = []
    for devices in DEVICES:
        for steps in (1, 10, 100, 1000):
            row = [f"{devices:,}", f"{steps:,}"]
            for restore in (1.0, 10.0, 60.0, 600.0):
                near = Copy(0.05, restore, 0.5)
                row.append(
                    played(
                        Recovery(DISK, near, near),
                        (STEP * steps, STEP * steps, STEP * max(steps, 100)),
                        devices,
                    )
                )
            grids.append(row)
        for minutes in (1, 10, 100):
            row = [f"{devices:,}", str(minutes)]
            for restore in (60.0, 120.0, 600.0, 1800.0):
                recovery = Recovery(Copy(0.05, restore, 60.0), PARTNER, MEMORY)
                row.append(played(recovery, (STEP, STEP, 60.0 * minutes), devices))
            disks.append(row)
    checks = []
    for stall in (0.05, 5.0, 30.0, 300.0, 1800.0):
        mean, recovery = LLAMA3.seconds_between(16_384), Recovery(Copy(stall, 600.0))
        every = best_intervals(LLAMA3, recovery, 16_384, 0.01)
        row = [f"{x:,.1f}" for x in (stall, young_interval(stall, mean), daly_interval(stall, mean), *every)]
        share = 100 * useful_share(LLAMA3, recovery, (daly_interval(stall, mean),), 16_384)
        checks.append([*row, f"{share:.2f}", played(recovery, every, 16_384)])
    means = [
        [f"{devices:,}", *(f"{rates.seconds_between(devices) / 3600:.2f}" for rates in (LLAMA3, RSC1))]
        for devices in (*DEVICES, 131_072)
    ]
    allowed = []
    for name, devices, useful in PUBLISHED:
        minutes = (1 - useful) * LLAMA3.seconds_between(devices) / 60
        allowed.append([name, f"{devices:,}", f"{useful:.0%}", f"{minutes:.1f}"])
    command = (
        f"python -m benchmarks.recovery.simulation --days {options.days:g} --runs {options.runs} --write"
    )
    places = ["copies; from failure to next step", "GPUs", "best steps between", "formula", "played"]
    allowances = ["run", "GPUs", "useful", "minutes lost to each"]
    text = f"""# Long runs under failures, simulated

{datetime.date.today()}, wanma at {commit()}: `{command}`.
No hardware is needed. Shares of useful time in %, mean ± standard deviation of the runs; failures as in
Llama 3's, steps of 6 s. What is assumed: [docs/reliability.md](../../docs/reliability.md).

## Where copies are kept

{table(places, systems)}
## Steps between snapshots, own and partner's, and their seconds to recover; disk every 100 steps or more

{table(["GPUs", "steps", "1 s", "10 s", "60 s", "600 s"], grids)}
## Minutes between checkpoints on disk and its seconds to recover; snapshots every step

{table(["GPUs", "minutes", "60 s", "120 s", "600 s", "1,800 s"], disks)}
## Best interval beside Young and Daly: one place, 16,384 GPUs, 10 min to recover; in seconds

{table(["stall", "Young", "Daly", "found", "share at Daly's", "played at found"], checks)}
## Hours between failures

{table(["GPUs", "Llama 3", "RSC-1"], means)}
## What published shares leave for a failure at Llama 3's rate

{table(allowances, allowed)}"""
    print(text)
    if options.write:
        (RESULTS / "recovery-simulation.md").write_text(text)


if __name__ == "__main__":
    main()
