"""One sample of each contender: the same training on two ranks, one of them held to a share of a core."""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, Finished, clean_environment, run_command
from benchmarks.mixed.quota import Held, held_back
from benchmarks.recovery.watch import read_lines
from benchmarks.turns import Start, blocks, take_turns
from wanma.data.open import prepare
from wanma.job.load import load_job
from wanma.job.run_directory import RunDirectory
from wanma.training.balance import Pace, Unit, best_shares

Shares = tuple[int, int]
"""Samples of a step of each rank."""

TIMEOUT_SECONDS = 900.0
BLOCK_SECONDS = 10.0
"""Of a round in turns, on each contender's clock."""
WARMUP_STEPS = 3
"""Before the first of them."""
PLANNING_STEPS = 12
"""After as many for warming up, by which shares are planned."""
CONTENDERS = ("apart", "even", "planned", "dynamic", "changed")
"""apart: two trainings of one rank each, side by side, which exchange nothing: their sum is the ideal. even,
planned: shares that stay, equal ones or those that `plan_shares` finds. dynamic: shares that begin even and
follow the ranks' times. changed: likewise, but the quota is set in the middle of the run."""

IN_TURNS = ("even", "planned")
"""Those that can be stopped and go on: shares that move follow measured times, which a stop would be in."""


@dataclass(frozen=True)
class Setting:
    """Everything that fixes one comparison; equal settings are pooled."""

    quota: int
    """Per cent of a core that the second rank has."""
    steps: int
    """Measured ones."""
    settle: int
    """Steps before them."""
    layers: int
    hidden: int
    sequence: int
    batch: int
    """Samples of a step, of all ranks."""
    micro_batch: int

    @property
    def by_quota(self) -> Shares:
        """Samples in proportion to the cores that each rank has, whatever a step takes beside its samples."""
        first = round(self.batch * 100 / (100 + self.quota))
        return first, self.batch - first

    @property
    def total_steps(self) -> int:
        # One more than is measured: the last step also saves the final checkpoint.
        return self.settle + self.steps + 1

    def samples(self, contender: str, planned: Shares, rank: int = 0) -> int:
        """Of a step of a contender's run; of `apart` each rank has its own."""
        return planned[rank] if contender == "apart" else self.batch

    def job(self, contender: str, planned: Shares, rank: int = 0) -> str:
        """The job file of a contender; of `apart` each rank has its own."""
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
steps = {self.total_steps}
global_batch = {batch}
learning_rate = 1e-3
schedule = "constant"

[parallel]
dp_replicate = {1 if contender == "apart" else 2}
micro_batch = {self.micro_batch}
balance = "{balance}"
{shares}

[cluster]
device = "cpu"
threads_per_rank = 1

[checkpoint]
every_steps = 0
snapshots = "off"
keep = 1
keep_best = false

[observe]
console = "quiet"
"""


def prepare_data(setting: Setting) -> None:
    """Build the token file, once, for all contenders."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(setting.job("even", setting.by_quota))
        prepare(load_job(path).data)


def plan_shares(setting: Setting, venv: Path) -> Shares:
    """Shares that make the slower rank's step the shortest, by what each takes alone under its quota.

    Alone means side by side with the other, as in `apart`: a step's time is then what it takes for each
    sample, and what it takes whatever its samples, as wanma's planner and its balance have it.

    Raises:
        BenchmarkError: as of `measure`.
    """
    short = replace(setting, settle=WARMUP_STEPS, steps=PLANNING_STEPS)
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        training = Training(short, "apart", setting.by_quota, Path(folder))
        training.carry_out(venv)
        paces = [
            pace(read_lines(run.metrics)[short.settle : -1], samples)
            for run, samples in zip(training.runs, setting.by_quota, strict=True)
        ]
    shares = best_shares(paces, setting.batch, Unit())
    assert shares is not None
    return shares[0], shares[1]


def pace(lines: Sequence[Mapping[str, Any]], samples: int) -> Pace:
    """Of a rank whose steps of so many samples are these."""
    computing = statistics.median(line["phases"]["forward_backward"] for line in lines)
    whole = statistics.median(line["step_seconds"] for line in lines)
    return Pace(computing / samples, whole - computing)


def measure(setting: Setting, contender: str, planned: Shares, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once.

    Returns:
        a sample: `tokens_per_second` over the measured steps, `losses`, `moves` of shares as (step, shares),
        and of `changed` the step after which the quota held, and the seconds of every step.

    Raises:
        BenchmarkError: a command failed, or the quota was never set.
    """
    training = Training(setting, contender, planned, folder)
    finished, since = training.carry_out(venv)
    runs, change = training.runs, training.change
    lines = [read_lines(run.metrics) for run in runs]
    events = read_lines(runs[-1].events)
    sample: dict[str, Any] = {
        "tokens_per_second": round(together(lines, setting.settle), 1),
        "losses": [line["loss"] for line in lines[0]],
        "planned_shares": list(planned),
        "moves": [[one["step"], one["batch_shares"]] for one in events if one["kind"] == "shares"],
        "foreign_cpu": round(finished.foreign_cpu, 3),
        "command_seconds": round(finished.seconds, 1),
    }
    if change:
        ends = [line["time"] for line in lines[0]]
        sample["changed_after"] = sum(end < since for end in ends)
        sample["step_seconds"] = [round(line["step_seconds"], 4) for line in lines[0]]
        sample["step_tokens"] = setting.batch * setting.sequence
    return sample


def measure_in_turns(
    setting: Setting, contender: str, planned: Shares, venv: Path, folder: Path, turn_seconds: float
) -> list[dict[str, Any]]:
    """Train with shares that stay and as the ideal does, at once, of which one runs at a time.

    Returns:
        a round for each block of `BLOCK_SECONDS`.

    Raises:
        BenchmarkError: as of `measure`.
    """
    trainings, starts = {}, {}
    for name in ("apart", contender):
        (folder / name).mkdir()
        trainings[name] = Training(setting, name, planned, folder / name)
        log = folder / name / "output.log"
        starts[name] = Start(trainings[name].command, clean_environment(venv), log)
    with ExitStack() as stack:
        held = [stack.enter_context(training.held_back()) for training in trainings.values()]
        pairs = take_turns(starts, turn_seconds, TIMEOUT_SECONDS)
    if any(one.since is None for one in held):
        raise BenchmarkError(f"{contender}: a quota was never set")
    times: dict[str, list[float]] = {}
    owners: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for owner, (name, training) in enumerate(trainings.items()):
        for rank, run in enumerate(training.runs):
            stream = f"{name} {rank}"
            times[stream] = [line["time"] for line in read_lines(run.metrics)][:-1]
            owners[stream] = owner
            tokens[stream] = setting.samples(name, planned, rank) * setting.sequence
    rounds = []
    for block in blocks(pairs, times, WARMUP_STEPS, BLOCK_SECONDS, owners):
        taken: dict[str, Any] = {}
        for owner, name in enumerate(trainings):
            mine = [stream for stream, of in owners.items() if of == owner]
            speed = sum(block.steps[stream] * tokens[stream] for stream in mine) / BLOCK_SECONDS
            foreign = max(block.foreign_cpu[stream] for stream in mine)
            taken[name] = {
                "tokens_per_second": round(speed, 1),
                "planned_shares": list(planned),
                "moves": [],
                "foreign_cpu": round(foreign, 3),
            }
        rounds.append(taken)
    return rounds


class Training:
    """One contender's commands, and its runs: of `apart` two, each of one rank.

    Args:
        folder: of its jobs and runs.
    """

    def __init__(self, setting: Setting, contender: str, planned: Shares, folder: Path) -> None:
        self._contender, self._folder = contender, folder
        self._quota = setting.quota
        self.change = setting.settle if contender == "changed" else 0
        """Steps before the quota is set."""
        names = ("first", "second") if contender == "apart" else ("run",)
        self.runs = [RunDirectory(folder / name) for name in names]
        commands = []
        for rank, run in enumerate(self.runs):
            job = folder / f"{run.path.name}.toml"
            job.write_text(setting.job(contender, planned, rank))
            train = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(run.path)]
            commands.append(shlex.join(train))
        begin = "".join(f'{one} & pids="$pids $!"; ' for one in commands)
        self.command = ["sh", "-c", f"pids=''; {begin}for pid in $pids; do wait $pid || exit 1; done"]

    def carry_out(self, venv: Path) -> tuple[Finished, float]:
        """Run the commands to their ends.

        Returns:
            what they took, and the Unix time from which the quota held.

        Raises:
            BenchmarkError: a command failed, or the quota was never set.
        """
        with self.held_back() as held:
            log = self._folder / "output.log"
            finished = run_command(self.command, clean_environment(venv), log, TIMEOUT_SECONDS)
        if held.since is None:
            raise BenchmarkError(f"{self._contender}: the quota was never set; the run was over before")
        return finished, held.since

    def held_back(self) -> AbstractContextManager[Held]:
        """While inside, the slow rank has its quota, from when its process is there."""
        # Of two trainings apart the second one is the slow one, whose only rank is 0.
        rank = len(self.runs) % 2
        return held_back(self.runs[-1], rank, self._quota, after_step=self.change)


def together(runs: Sequence[Sequence[Mapping[str, Any]]], settle: int) -> float:
    """Tokens per second of runs side by side, while all of them are at their measured steps."""
    begin = max(run[settle - 1]["time"] for run in runs)
    end = min(run[-2]["time"] for run in runs)
    total = 0.0
    for run in runs:
        inside = [line for line in run if begin < line["time"] <= end]
        if len(inside) < 2:
            raise BenchmarkError("the trainings side by side hardly overlapped; measure more steps")
        seconds = inside[-1]["time"] - inside[0]["time"]
        total += sum(line["tokens_per_second"] * line["step_seconds"] for line in inside[1:]) / seconds
    return total
