"""Contenders as commands: wanma through `wanma train`, each peer through torchrun and its own script."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, clean_environment, cores, run_command
from benchmarks.turns import Start
from wanma.elastic.workers.environment import make_worker_environment
from wanma.job.plan.plan import Plan
from wanma.job.sections.cluster import ClusterSection

TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Peer:
    """Peer of wanma, with the layout of wanma that shards the same state."""

    title: str
    script: str | None
    """Script in `peers/`; None: wanma itself in one process."""
    layout: str
    """Lines of wanma's [parallel] section; RANKS stands for the number of ranks."""
    environment: Mapping[str, str]


PEERS = {
    "ddp": Peer("PyTorch DDP", "train_ddp.py", "dp_replicate = RANKS", {}),
    "fsdp2": Peer("PyTorch FSDP2", "train_fsdp2.py", 'dp_shard = RANKS\nshard = "parameters"', {}),
    "accelerate": Peer("Accelerate", "train_accelerate.py", "dp_replicate = RANKS", {}),
    "fabric": Peer("Lightning Fabric (DDP)", "train_fabric.py", "dp_replicate = RANKS", {}),
    "deepspeed": Peer(
        "DeepSpeed ZeRO-1",
        "train_deepspeed.py",
        'dp_shard = RANKS\nshard = "optimizer"',
        {"DS_ACCELERATOR": "cpu"},
    ),
    "one-process": Peer("wanma, one process with all cores", None, "dp_replicate = RANKS", {}),
}


@dataclass(frozen=True)
class Setting:
    """Settings of one comparison; equal settings are pooled."""

    table: str
    """Table; a: the peer as in its quick start; b: with every public switch that wanma uses."""
    peer: str
    precision: str
    compile: bool
    batch: int
    """Samples per rank and step."""
    ranks: int
    preset: str
    vocabulary: int
    sequence: int
    warmup: int
    """Steps before the measured ones."""
    steps: int
    """Measured steps."""

    @property
    def global_batch(self) -> int:
        return self.ranks * self.batch

    @property
    def total_steps(self) -> int:
        # One more than is measured: wanma's last step also saves the final checkpoint.
        return self.warmup + self.steps + 1

    def job(self, one_process: bool) -> str:
        """Return the job file; peers read model, data and training from the same text."""
        layout = PEERS[self.peer].layout.replace("RANKS", str(self.ranks))
        return f"""\
[model]
preset = "{self.preset}"
vocabulary = {self.vocabulary}

[data]
text = ["stdlib"]
sequence_length = {self.sequence}
validation_fraction = 0.0

[train]
steps = {self.total_steps}
global_batch = {self.global_batch}
precision = "{self.precision}"
learning_rate = 1e-3
schedule = "constant"
weight_decay = 0.1
gradient_clip = 1.0

[[train.parameter_groups]]  # decay for all, as one plain AdamW(model.parameters()) of the peers has it
match = "*"
weight_decay = 0.1

[parallel]
{"auto = true" if one_process else layout}
compile = {str(self.compile).lower()}

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""


@dataclass(frozen=True)
class Command:
    """Command of a contender; `job.toml`, `run` and `result.json` are in a folder of the sample's own."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), shlex.join(self.arguments)])


def wanma_command() -> Command:
    return Command(("wanma", "train", "job.toml", "--run-dir", "run"), {})


def peer_command(setting: Setting) -> Command:
    """Return the peer's command; in table b with wanma's own environment and optimizer kernel."""
    peer = PEERS[setting.peer]
    if peer.script is None:
        return wanma_command()
    arguments = [
        *("torchrun", "--standalone", f"--nproc-per-node={setting.ranks}"),
        f"benchmarks/train/peers/{peer.script}",
        *("--job", "job.toml", "--result", "result.json", f"--batch={setting.batch}"),
        *(["--compile"] if setting.compile else []),
        *(["--fused"] if setting.table == "b" else []),
    ]
    environment = dict(peer.environment)
    if setting.table == "b":
        plan = Plan(dp_replicate=setting.ranks, threads_per_rank=max(cores() // setting.ranks, 1))
        environment |= make_worker_environment(ClusterSection(), plan)
    return Command(tuple(arguments), environment)


def measure(setting: Setting, wanma: bool, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once and measure.

    Args:
        wanma: True for wanma on several ranks, False for the setting's peer.
        folder: an empty folder.

    Raises:
        BenchmarkError: the contender failed or did not record every step.
    """
    alone = not wanma and PEERS[setting.peer].script is None
    command = wanma_command() if wanma else peer_command(setting)
    record = train_once(command, setting.job(one_process=alone), setting.total_steps, venv, folder)
    tokens = setting.global_batch * setting.sequence
    return with_speed(record, setting.warmup, setting.steps, tokens)


def train_once(command: Command, job: str, steps: int, venv: Path, folder: Path) -> dict[str, Any]:
    """Run a contender on a job of `steps` steps; return its record: times, losses and facts.

    Args:
        folder: an empty folder.

    Raises:
        BenchmarkError: the contender failed or did not record every step.
    """
    start = prepare_start(command, job, venv, folder)
    finished = run_command(start.command, start.environment, start.log, TIMEOUT_SECONDS)
    return {
        **read_record(command, steps, folder),
        "foreign_cpu": round(finished.foreign_cpu, 3),
        "command_seconds": round(finished.seconds, 2),
    }


def prepare_start(command: Command, job: str, venv: Path, folder: Path) -> Start:
    """Write the job into the contender's folder; return its start there."""
    (folder / "job.toml").write_text(job)
    places = {name: str(folder / name) for name in ("job.toml", "run", "result.json")}
    return Start(
        [places.get(argument, argument) for argument in command.arguments],
        {**clean_environment(venv), **command.environment},
        folder / "output.log",
    )


def read_record(command: Command, steps: int, folder: Path) -> dict[str, Any]:
    """Return times and losses of all steps, and facts.

    Raises:
        BenchmarkError: a step is missing.
    """
    result = folder / "result.json"
    record: dict[str, Any] = json.loads(result.read_text()) if result.exists() else _read_run(folder / "run")
    if len(record["times"]) != steps:
        raise BenchmarkError(f"{command}\nrecorded {len(record['times'])} of {steps} steps")
    return record


def with_speed(record: dict[str, Any], warmup: int, steps: int, tokens_per_step: int) -> dict[str, Any]:
    """Return a record with tokens per second of `steps` steps after `warmup` ones, instead of its times."""
    times = record.pop("times")
    window = times[warmup + steps - 1] - times[warmup - 1]
    return {"tokens_per_second": round(steps * tokens_per_step / window, 1), **record}


def _read_run(run: Path) -> dict[str, Any]:
    """Return times and losses of a wanma run, from its metrics."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run / "plan.json").read_text())["plan"]
    return {
        "times": [step["time"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "threads": plan["threads_per_rank"],
    }
