"""Contenders beside the ideal: the same training on two ranks, one of them limited to a share of a core."""

from __future__ import annotations

import itertools
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, Start, clean_environment, run_command
from benchmarks.mixed.gate import Gate
from benchmarks.mixed.gated import VARIABLE
from benchmarks.mixed.quota import Held, held_back
from benchmarks.mixed.turns import (
    ForeignCpuBetween,
    blocks,
    foreign_cpu,
    own_times,
    steps_between,
    take_turns_by_steps,
)
from benchmarks.recovery.watch import read_lines
from wanma.bench.meter.disturbance import DisturbanceRule
from wanma.bench.turns.own_clock import OwnClock
from wanma.job.run.run_directory import RunDirectory
from wanma.training.balancing.share_allocation import RankSpeed, ShareGranularity, minimax_shares
from wanma.training.balancing.share_rebalancer import MIN_WINDOW_STEPS

Shares = tuple[int, int]
"""Samples per step of each rank."""

TIMEOUT_SECONDS = 900.0
BLOCK_SECONDS = 5.0
"""Seconds of a round, on each contender's clock."""
NEAR_SECONDS = 2.0
"""Seconds before and after a step, on the ideal's clock, over which its speed is averaged for comparison."""
PLANNING_WARMUP, PLANNING_STEPS = 3, 12
"""Steps of warm-up, and steps from which shares are planned."""
IDEAL = "apart"
"""Name of the ideal: two trainings of one rank each, side by side, without exchanges; their speeds add up."""
CONTENDERS = {"even": 1, "planned": 1, "dynamic": 1, "changed": MIN_WINDOW_STEPS}
"""Contenders with different shares of the batch, and the runs that count as one pair.

even, planned: constant shares, equal ones or those that `plan_shares` finds. dynamic: shares that begin even
and follow the ranks' times. changed: the same, but the quota is set in the middle of the run, in each run at
another step of the window over which times are observed."""
MANY_STEPS = 100_000
"""Steps of the ideal, which is ended from outside."""


@dataclass(frozen=True)
class Setting:
    """Settings of one comparison; equal settings are pooled."""

    quota: int
    """CPU quota of the second rank, in per cent of a core."""
    steps: int
    """Measured steps."""
    settle: int
    """Steps before the measured ones."""
    layers: int
    hidden: int
    sequence: int
    batch: int
    """Samples per step, of all ranks."""
    micro_batch: int

    @property
    def by_quota(self) -> Shares:
        """Return samples in proportion to the cores of each rank, as if steps had no fixed cost."""
        first = round(self.batch * 100 / (100 + self.quota))
        return first, self.batch - first

    @property
    def total_steps(self) -> int:
        # One more than is measured: the last step also saves the final checkpoint.
        return self.settle + self.steps + 1

    def samples(self, contender: str, planned: Shares, rank: int = 0) -> int:
        """Return the samples per step of a contender's run; of the ideal each rank has its own."""
        return planned[rank] if contender == IDEAL else self.batch

    def job(self, contender: str, planned: Shares, steps: int, rank: int = 0) -> str:
        """Return the job file of a contender; of the ideal each rank has its own."""
        batch = self.samples(contender, planned, rank)
        shares = f"batch_shares = {list(planned)}" if contender == "planned" else ""
        balance = "on" if contender in ("dynamic", "changed") else "off"
        return f"""\
[model]
family = "decoder"
layers = {self.layers}
hidden = {self.hidden}
heads = 4
vocabulary = 512

[data]
text = ["stdlib"]
sequence_length = {self.sequence}
validation_fraction = 0.0

[train]
steps = {steps}
global_batch = {batch}
learning_rate = 1e-3
schedule = "constant"

[parallel]
dp_replicate = {1 if contender == IDEAL else 2}
micro_batch = {self.micro_batch}
load_balancing = "{balance}"
{shares}

[cluster]
device = "cpu"
threads_per_rank = 1

[checkpoint]
every_steps = 0
keep = 1
keep_best = false

[observe]
console = "quiet"
"""


def plan_shares(setting: Setting, venv: Path) -> Shares:
    """Return the shares with the shortest step of the slower rank, by each rank's speed alone.

    Alone means side by side with the other, as in the ideal: a step's time is then its time per sample, and
    its time independent of the samples, as in wanma's planner and load balancing.

    Raises:
        BenchmarkError: a command failed, or the quota was never set.
    """
    by_quota, steps = setting.by_quota, PLANNING_WARMUP + PLANNING_STEPS + 1
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        training = Training(setting, IDEAL, by_quota, Path(folder), steps)
        log = Path(folder) / "output.log"
        with training.held_back() as held:
            run_command(training.command, clean_environment(venv), log, TIMEOUT_SECONDS)
        told(held)
        paces = [
            pace(read_lines(run.metrics)[PLANNING_WARMUP:-1], samples)
            for run, samples in zip(training.runs, by_quota, strict=True)
        ]
    shares = minimax_shares(paces, setting.batch, ShareGranularity())
    assert shares is not None
    return shares[0], shares[1]


def pace(lines: Sequence[Mapping[str, Any]], samples: int) -> RankSpeed:
    """Return the pace of a rank with these steps of so many samples."""
    computing = statistics.median(line["phases"]["forward_backward"] for line in lines)
    whole = statistics.median(line["step_seconds"] for line in lines)
    return RankSpeed(computing / samples, whole - computing)


def measure(
    setting: Setting,
    contender: str,
    planned: Shares,
    venv: Path,
    folder: Path,
    number: int,
    rule: DisturbanceRule,
) -> dict[str, Any]:
    """Train a contender and the ideal at once, of which one runs at a time.

    The contender runs a step, and then the ideal for the same time.

    Args:
        setting: settings of the comparison.
        contender: name of the contender.
        planned: planned shares.
        venv: environment of both.
        folder: an empty folder.
        number: number of the contender's earlier runs.
        rule: rule of disturbances.

    Returns:
        `rounds`, blocks of `BLOCK_SECONDS` with the tokens per second of both; `moves` of shares as (step,
        shares); and of `changed`, `steps` after the quota held, with the ideal's speed near each.

    Raises:
        BenchmarkError: a command failed, or a quota was never set.
    """
    change = setting.settle + number % MIN_WINDOW_STEPS if contender == "changed" else 0
    trainings = {
        contender: Training(setting, contender, planned, folder, setting.total_steps, change),
        IDEAL: Training(setting, IDEAL, planned, folder, MANY_STEPS),
    }
    gate = folder / "gate"
    environment = {**clean_environment(venv), VARIABLE: str(gate)}
    starts = {
        name: Start(training.command, environment, folder / name / "output.log")
        for name, training in trainings.items()
    }
    with ExitStack() as stack:
        held = {name: stack.enter_context(training.held_back()) for name, training in trainings.items()}
        clocks, meter = take_turns_by_steps(
            starts, Gate(gate, ranks=2, first=setting.settle), TIMEOUT_SECONDS
        )
    since = {name: told(one) for name, one in held.items()}
    streams = {
        f"{name} {rank}": Stream(owner, [line["time"] for line in read_lines(run.metrics)][:-1], tokens)
        for owner, (name, training) in enumerate(trainings.items())
        for rank, run in enumerate(training.runs)
        for tokens in [setting.samples(name, planned, rank) * setting.sequence]
    }
    run = trainings[contender].runs[0]
    events = [event for event in read_lines(run.events) if event["kind"] == "batch_shares"]
    sample: dict[str, Any] = {
        "planned_shares": list(planned),
        "moves": [[event["step"], event["batch_shares"]] for event in events],
        "rounds": rounds(clocks, streams, setting.settle, meter.foreign_cpu),
    }
    if contender == "changed":
        own = streams[f"{contender} 0"]
        sample["changed_after"] = sum(end < since[contender] for end in own.ends)
        sample["steps"] = beside_the_ideal(clocks, streams, sample["changed_after"], meter.foreign_cpu)
    for one in (*sample["rounds"], *sample.get("steps", ())):
        one["disturbed"] = bool(rule(replace(meter.usage, foreign_cpu=one["foreign_cpu"])))
    return sample


@dataclass(frozen=True)
class Stream:
    """Steps of one run.

    Attributes:
        owner: 0, the contender, or 1, the ideal, which has two runs.
        ends: ends of the steps, in seconds since 1970.
        tokens: tokens per step.
    """

    owner: int
    ends: list[float]
    tokens: int


def rounds(
    clocks: Sequence[OwnClock], streams: Mapping[str, Stream], settle: int, foreign: ForeignCpuBetween
) -> list[dict[str, Any]]:
    """Return each block after the settling: tokens per second of contender and ideal, and foreign CPUs."""
    times = {name: stream.ends for name, stream in streams.items()}
    owners = {name: stream.owner for name, stream in streams.items()}
    found = []
    for block in blocks(clocks, times, settle, BLOCK_SECONDS, foreign, owners):
        speeds = [0.0, 0.0]
        for name, stream in streams.items():
            speeds[stream.owner] += block.steps[name] * stream.tokens / BLOCK_SECONDS
        found.append(
            {
                "tokens_per_second": round(speeds[0], 1),
                "ideal": round(speeds[1], 1),
                "foreign_cpu": round(block.foreign_cpu, 3),
            }
        )
    return found


def beside_the_ideal(
    clocks: Sequence[OwnClock], streams: Mapping[str, Stream], after: int, foreign: ForeignCpuBetween
) -> list[dict[str, Any]]:
    """Return the contender's later steps: seconds, the ideal's tokens per second, and foreign CPUs."""
    times = {name: own_times(clocks[stream.owner], stream.ends) for name, stream in streams.items()}
    own = next(times[name] for name, stream in streams.items() if stream.owner == 0)
    ideal = {name: times[name] for name, stream in streams.items() if stream.owner == 1}
    found = []
    for began, ended in itertools.pairwise(own[after - 1 :]):
        near = (
            max(began - NEAR_SECONDS, *(ends[0] for ends in ideal.values())),
            min(ended + NEAR_SECONDS, *(ends[-1] for ends in ideal.values())),
        )
        tokens = sum(steps_between(near, ends) * streams[name].tokens for name, ends in ideal.items())
        found.append(
            {
                "seconds": round(ended - began, 4),
                "ideal": round(tokens / (near[1] - near[0]), 1),
                "foreign_cpu": round(foreign_cpu(clocks, near, foreign), 3),
            }
        )
    return found


class Training:
    """Commands and runs of one contender; the ideal has two runs, each of one rank.

    Args:
        folder: folder of its jobs and runs.
        change: steps before the quota is set.
    """

    def __init__(
        self,
        setting: Setting,
        contender: str,
        planned: Shares,
        folder: Path,
        steps: int,
        change: int = 0,
    ) -> None:
        self._quota, self._change = setting.quota, change
        is_ideal = contender == IDEAL
        self.runs = [RunDirectory(folder / name) for name in (("first", "second") if is_ideal else ("run",))]
        commands = []
        for rank, run in enumerate(self.runs):
            job = folder / f"{run.path.name}.toml"
            job.write_text(setting.job(contender, planned, steps, rank))
            module = "wanma" if is_ideal else "benchmarks.mixed.gated"
            train = [sys.executable, "-m", module, "train", str(job), "--run-dir", str(run.path)]
            commands.append(shlex.join(train))
        begin = "".join(f'{one} & pids="$pids $!"; ' for one in commands)
        self.command = ["sh", "-c", f"pids=''; {begin}for pid in $pids; do wait $pid || exit 1; done"]

    def held_back(self) -> AbstractContextManager[Held]:
        """Limit the slow rank to its quota while inside, from the start of its process."""
        # Of two trainings apart the second one is the slow one, whose only rank is 0.
        rank = len(self.runs) % 2
        return held_back(self.runs[-1], rank, self._quota, after_step=self._change)


def told(held: Held) -> float:
    """Return the Unix time from which a quota held.

    Raises:
        BenchmarkError: it never held.
    """
    if held.since is None:
        raise BenchmarkError("a quota was never set; the run was over before")
    return held.since
