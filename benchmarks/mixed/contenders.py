"""One sample of each contender: the same training on two ranks, one of them held to a share of a core."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, clean_environment, run_command
from benchmarks.mixed.quota import held_back
from benchmarks.recovery.watch import read_lines
from wanma.data.open import prepare
from wanma.job.load import load_job
from wanma.job.run_directory import RunDirectory

TIMEOUT_SECONDS = 900.0
CONTENDERS = ("apart", "even", "planned", "dynamic", "changed")
"""apart: two trainings of one rank each, side by side, which exchange nothing: their sum is the ideal. even,
planned: shares that stay, equal ones or in proportion to the quota. dynamic: shares that begin even and
follow the ranks' times. changed: likewise, but the quota is set in the middle of the run."""


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
    def planned(self) -> tuple[int, int]:
        """Samples in proportion to the cores that each rank has."""
        first = round(self.batch * 100 / (100 + self.quota))
        return first, self.batch - first

    @property
    def total_steps(self) -> int:
        # One more than is measured: the last step also saves the final checkpoint.
        return self.settle + self.steps + 1

    def job(self, contender: str, rank: int = 0) -> str:
        """The job file of a contender; of `apart` each rank has its own."""
        batch = self.planned[rank] if contender == "apart" else self.batch
        shares = f"batch_shares = {list(self.planned)}" if contender == "planned" else ""
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
        path.write_text(setting.job("even"))
        prepare(load_job(path).data)


def measure(setting: Setting, contender: str, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once.

    Returns:
        a sample: `tokens_per_second` over the measured steps, `losses`, `moves` of shares as (step, shares),
        and of `changed` the step after which the quota held, and the seconds of every step.

    Raises:
        BenchmarkError: a command failed, or the quota was never set.
    """
    names = ("first", "second") if contender == "apart" else ("run",)
    runs = [RunDirectory(folder / name) for name in names]
    commands = []
    for rank, run in enumerate(runs):
        job = folder / f"{run.path.name}.toml"
        job.write_text(setting.job(contender, rank))
        train = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(run.path)]
        commands.append(shlex.join(train))
    change = setting.settle if contender == "changed" else 0
    # Of two trainings apart the second one is the slow one, whose only rank is 0.
    with ExitStack() as stack:
        rank = 0 if contender == "apart" else 1
        held = stack.enter_context(held_back(runs[-1], rank, setting.quota, after_step=change))
        finished = run_command(
            ["sh", "-c", "pids=''; " + "".join(f"{one} & pids=\"$pids $!\"; " for one in commands)
             + "for pid in $pids; do wait $pid || exit 1; done"],
            clean_environment(venv),
            folder / "output.log",
            TIMEOUT_SECONDS,
        )  # fmt: skip
    if held.since is None:
        raise BenchmarkError(f"{contender}: the quota was never set; the run was over before")
    lines = [read_lines(run.metrics) for run in runs]
    events = read_lines(runs[-1].events)
    sample: dict[str, Any] = {
        "tokens_per_second": round(together(lines, setting.settle), 1),
        "losses": [line["loss"] for line in lines[0]],
        "moves": [[one["step"], one["batch_shares"]] for one in events if one["kind"] == "shares"],
        "foreign_cpu": round(finished.foreign_cpu, 3),
        "command_seconds": round(finished.seconds, 1),
    }
    if change:
        ends = [line["time"] for line in lines[0]]
        sample["changed_after"] = sum(end < held.since for end in ends)
        sample["step_seconds"] = [round(line["step_seconds"], 4) for line in lines[0]]
        sample["step_tokens"] = setting.batch * setting.sequence
    return sample


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
