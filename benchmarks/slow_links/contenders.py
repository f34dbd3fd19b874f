"""Contenders on two nodes of two ranks each: wanma's ways to sum gradients, and PyTorch's DDP."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import Command, train_once, with_speed
from wanma.bench.programs import limited_link
from wanma.bench.programs.limited_link import ADDRESSES, INTERFACE, PORT
from wanma.elastic.workers.environment import make_worker_environment
from wanma.job.plan.plan import Plan
from wanma.job.sections.cluster import ClusterSection

NODES, RANKS_EACH = 2, 2
RANKS = NODES * RANKS_EACH


@dataclass(frozen=True)
class Contender:
    """Way of wanma to train over the link."""

    title: str
    parallel: tuple[str, ...]
    """Lines of the job's [parallel] section, beside dp_replicate."""
    every: int = 1
    """Steps between two exchanges; a whole multiple of them is measured."""


_SELDOM = 20
_SITES = (f"sites = {NODES}", f"synchronize_every = {_SELDOM}")
OUTER = ("outer_learning_rate = 0.8", "outer_momentum = 0.5")
"""Outer optimizer whose loss `benchmarks/convergence` measures."""

EXPOSED = "exposed_communication_seconds"
"""Metric of a step: seconds that rank 0 waited for communication, by kind."""
CONTENDERS = {
    "plain": Contender("exact, after backward, one ring", ("overlap = false", 'all_reduce = "backend"')),
    "overlap": Contender("exact, during backward, one ring", ('all_reduce = "backend"',)),
    "hierarchical": Contender(
        "exact, after backward, by machines", ("overlap = false", 'all_reduce = "hierarchical"')
    ),
    "both": Contender("exact, during backward, by machines (default)", ()),
    "bf16": Contender("rounded to bf16", ('compression = "bf16"',)),
    "int8": Contender("rounded to int8, with error feedback", ('compression = "int8"',)),
    "topk": Contender("1 % largest elements, with error feedback", ('compression = "topk"',)),
    "powersgd": Contender("PowerSGD of rank 4, with error feedback", ('compression = "powersgd"',)),
    "local_sgd": Contender(
        f"local SGD, mean of weights every {_SELDOM} steps", ('synchronize = "local_sgd"', *_SITES), _SELDOM
    ),
    "diloco": Contender(
        f"DiLoCo, outer update every {_SELDOM} steps", ('synchronize = "diloco"', *_SITES, *OUTER), _SELDOM
    ),
    "streaming": Contender(
        f"DiLoCo, two fragments every {_SELDOM} steps, beside 5 steps each",
        ('synchronize = "diloco"', *_SITES, *OUTER, "fragments = 2", "overlap_steps = 5"),
        _SELDOM,
    ),
}
"""Contenders by name; a further one is a further line."""


@dataclass(frozen=True)
class Setting:
    """Settings of one comparison; equal settings are pooled."""

    contenders: str
    """Names of wanma's contenders, joined by '+'."""
    megabits: float
    """Rate of the link in Mbit/s, each way."""
    delay: float
    """Delay of each packet in seconds, each way."""
    precision: str
    preset: str
    vocabulary: int
    sequence: int
    batch: int
    """Samples per rank and step."""
    warmup: int
    """Steps before the measured ones."""
    steps: int
    """Measured steps of DDP."""

    @property
    def names(self) -> list[str]:
        return self.contenders.split("+")

    @property
    def link(self) -> str:
        return f"{self.megabits:g} Mbit/s, {1000 * self.delay:g} ms"

    @property
    def global_batch(self) -> int:
        return RANKS * self.batch

    def measured_steps(self, way: Contender | None) -> int:
        """Return the measured steps of `way`, or of DDP."""
        every = 1 if way is None else way.every
        return -(-self.steps // every) * every

    def total_steps(self, way: Contender | None) -> int:
        # One more than is measured: wanma's last step also saves the final checkpoint.
        return self.warmup + self.measured_steps(way) + 1

    def job(self, way: Contender | None) -> str:
        """Return the job file; DDP (None) reads model, data and training from the same text."""
        lines = () if way is None else way.parallel
        layout = "\n".join((f"dp_replicate = {RANKS}", f"micro_batch = {self.batch}", *lines))
        return f"""\
[model]
preset = "{self.preset}"
vocabulary = {self.vocabulary}

[data]
text = ["stdlib"]
sequence_length = {self.sequence}
validation_fraction = 0.0

[train]
steps = {self.total_steps(way)}
global_batch = {self.global_batch}
precision = "{self.precision}"
learning_rate = 1e-3
schedule = "constant"
weight_decay = 0.1
gradient_clip = 1.0

[[train.parameter_groups]]  # decay for all, as one plain AdamW(model.parameters()) of DDP's has it
match = "*"
weight_decay = 0.1

[parallel]
{layout}

[cluster]
device = "cpu"
threads_per_rank = 1
nodes = {NODES}
rendezvous = "{ADDRESSES[0]}:{PORT}"
health_check = "never"

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""


def wanma_command(setting: Setting) -> Command:
    words = ("wanma", "train", "job.toml", "--run-dir", "run", "cluster.node_rank={node}")
    return Command((*_over_link(setting), *words), {})


def ddp_command(setting: Setting) -> Command:
    """Return DDP's command, with wanma's allocator, threads and optimizer kernel."""
    words = (
        *("torchrun", f"--nnodes={NODES}", f"--nproc-per-node={RANKS_EACH}", "--node-rank={node}"),
        *(f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"),
        *("benchmarks/slow_links/ddp.py", "--job", "job.toml", "--result", "result.json"),
        f"--batch={setting.batch}",
    )
    tuned = make_worker_environment(ClusterSection(), Plan(dp_replicate=RANKS, threads_per_rank=1))
    return Command((*_over_link(setting), *words), {**tuned, "GLOO_SOCKET_IFNAME": INTERFACE})


def measure(setting: Setting, way: Contender | None, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once and measure.

    Args:
        way: way of wanma, or None for DDP.
        folder: an empty folder.

    Raises:
        BenchmarkError: the contender failed or did not record every step.
    """
    command = ddp_command(setting) if way is None else wanma_command(setting)
    record = train_once(command, setting.job(way), setting.total_steps(way), venv, folder)
    steps, tokens = setting.measured_steps(way), setting.global_batch * setting.sequence
    if way is not None:
        record["waited"] = waited_seconds(folder / "run" / "metrics.jsonl", setting.warmup, steps)
    return with_speed(record, setting.warmup, steps, tokens)


def waited_seconds(metrics: Path, warmup: int, steps: int) -> float | None:
    """Return the mean seconds per step for which rank 0 waited for other data ranks; None if unknown."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()][warmup : warmup + steps]
    told = [line[EXPOSED].get("data", 0.0) for line in lines if EXPOSED in line]
    return sum(told) / len(told) if told else None


def _over_link(setting: Setting) -> tuple[str, ...]:
    """Return the words before a command that runs on both nodes."""
    return ("python", "-m", limited_link.__name__, f"{setting.megabits:g}", f"{setting.delay:g}", "--")
