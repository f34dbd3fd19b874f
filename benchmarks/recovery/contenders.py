"""Contenders as commands, and a sample of each: wanma, torchrun with checkpoints, torchft."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import BenchmarkError, clean_environment, run_command
from benchmarks.recovery.watch import ProcessorTime, Watch, cost, read_lines
from wanma.elastic.workers.environment import make_worker_environment
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import usable_cores
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection

TIMEOUT_SECONDS = 300.0
LEAST_COPY_SECONDS = 1e-3
"""Minimum seconds of a step's checkpoint phase with an in-memory checkpoint; else it takes some 0.03 ms."""
LEARNING_RATE, GRADIENT_CLIP = 1e-3, 1.0


@dataclass(frozen=True)
class Contender:
    """Way to train the task and to continue after a failure."""

    title: str
    kind: str
    """Kind: wanma, torchrun or torchft; those of a kind end with the same weights without a failure."""
    options: tuple[str, ...] = ()


DISK = "checkpoint.every_steps=10"
IN_MEMORY_EVERY_STEP = Contender(
    "wanma, an in-memory checkpoint every step", "wanma", ("checkpoint.in_memory_every_steps=1", DISK)
)
PARTS: Mapping[str, Mapping[str, Contender]] = {
    "torchrun": {
        "wanma-1": IN_MEMORY_EVERY_STEP,
        "torchrun-1": Contender("torchrun, a checkpoint on disk every step", "torchrun", ("--every=1",)),
        "wanma-auto": Contender(
            "wanma, in-memory checkpoints auto", "wanma", ("checkpoint.in_memory_every_steps=auto", DISK)
        ),
        "torchrun-10": Contender("torchrun, a checkpoint on disk every 10", "torchrun", ("--every=10",)),
        "wanma-off": Contender(
            "wanma, a checkpoint on disk every 10", "wanma", ("checkpoint.in_memory_every_steps=off", DISK)
        ),
    },
    "torchft": {
        "wanma-1": IN_MEMORY_EVERY_STEP,
        "torchft": Contender("torchft", "torchft"),
    },
    "in-memory": {
        every: Contender(every, "wanma", (f"checkpoint.in_memory_every_steps={every}",))
        for every in ("off", "1", "2", "5", "10", "auto")
    },
    "supervisor": {
        "wanma-auto": Contender(
            "wanma, in-memory checkpoints auto", "wanma", ("checkpoint.in_memory_every_steps=auto",)
        )
    },
}
"""Contenders measured together, by part.

A rank is killed beside one peer or the other; or none is, at each interval of in-memory checkpoints, or
while the supervisor's processor time is measured."""


@dataclass(frozen=True)
class Setting:
    """Settings of one comparison; equal settings are pooled."""

    part: str
    ranks: int
    steps: int
    kill_after: int
    """Step whose end precedes the kill of the last rank by half a step; 0: no kill."""
    warmup: int
    """Steps before the measured ones without a kill; the last step is not measured either."""
    hidden: int
    heads: int
    layers: int
    sequence: int
    batch: int
    """Samples per step, of all ranks."""

    @property
    def model(self) -> dict[str, int]:
        """Arguments of the model in benchmarks/startup/model.py."""
        return {
            "sequence": self.sequence,
            "hidden": self.hidden,
            "heads": self.heads,
            "layers": self.layers,
        }

    def job(self, corpus: str, cache: str) -> str:
        arguments = ", ".join(f"{name} = {value}" for name, value in self.model.items())
        return f"""\
[model]
factory = "benchmarks.startup.model:TinyDecoder"
arguments = {{ {arguments} }}

[data]
text = ["{corpus}"]
sequence_length = {self.sequence}
validation_fraction = 0.0
cache = "{cache}"

[train]
steps = {self.steps}
global_batch = {self.batch}
learning_rate = {LEARNING_RATE}
schedule = "constant"
gradient_clip = {GRADIENT_CLIP}

[[train.parameter_groups]]
match = "*"
weight_decay = 0.1

[parallel]
dp_replicate = {self.ranks}
micro_batch = {self.batch // self.ranks}

[cluster]
device = "cpu"

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""

    def task(self) -> dict[str, Any]:
        """Task for the peers' scripts, the same as the job."""
        rates = {"learning_rate": LEARNING_RATE, "gradient_clip": GRADIENT_CLIP}
        return {"steps": self.steps, "model": self.model, **rates}


@dataclass(frozen=True)
class Command:
    """Command of a contender.

    `job.toml` and `task.json` are with the inputs; the other names in a folder of the sample's own.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        tuned = make_worker_environment(ClusterSection(), Plan())
        stated = [f"{name}={value}" for name, value in self.environment.items() if name not in tuned]
        return " ".join([*stated, *self.arguments])


def command(setting: Setting, contender: Contender) -> Command:
    if contender.kind == "wanma":
        return Command(("wanma", "train", "job.toml", *contender.options, "--run-dir", "run"), {})
    plan = Plan(dp_replicate=setting.ranks, threads_per_rank=max(usable_cores() // setting.ranks, 1))
    tuned = make_worker_environment(ClusterSection(), plan)
    given = ("--task", "task.json", "--progress", "progress")
    if contender.kind == "torchft":
        cluster = ("python", "benchmarks/recovery/peers/torchft_cluster.py", str(setting.ranks))
        return Command((*cluster, *given), tuned)
    torchrun = ("torchrun", "--standalone", f"--nproc-per-node={setting.ranks}")
    # With a shared rendezvous store a restart meets the keys of the start before: it fails, or stalls.
    return Command(
        (
            *(*torchrun, "--max-restarts=3", "--monitor-interval=0.1"),
            *("benchmarks/recovery/peers/train_ddp.py", *given, "--checkpoint", "newest.pt"),
            *contender.options,
        ),
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **tuned},
    )


def measure(
    setting: Setting, contender: Contender, inputs: Path, venv: Path, *, kill: bool
) -> dict[str, Any]:
    """Train once, with the setting's kill or undisturbed to the end.

    Returns:
        a sample: `digest` of the final weights and optimizer state, `final_loss`, values of `cost`, and of
        torchft also its losses; without a kill `step_seconds`, and the interval of in-memory checkpoints.

    Raises:
        BenchmarkError: the contender failed, or did not continue.
    """
    what = command(setting, contender)
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as temporary:
        folder = Path(temporary)
        places = {name: str(inputs / name) for name in ("job.toml", "task.json")}
        places |= {name: str(folder / name) for name in ("run", "progress", "newest.pt")}
        reader = WanmaRun(folder) if contender.kind == "wanma" else PeerRun(folder)
        watch = Watch(reader.progress, setting.kill_after, lambda: reader.process(setting.ranks - 1))
        processor = None
        if kill:
            watch.start()
        elif setting.part == "supervisor" and isinstance(reader, WanmaRun):
            processor = ProcessorTime(reader.progress, setting.warmup, setting.steps - 1, reader.supervision)
            processor.start()
        finished = run_command(
            [places.get(argument, argument) for argument in what.arguments],
            {**clean_environment(venv), **what.environment},
            folder / "output.log",
            TIMEOUT_SECONDS,
        )
        sample = {
            "digest": reader.digest(),
            "final_loss": reader.final_loss(setting.ranks),
            "command_seconds": round(finished.seconds, 2),
        }
        if not kill:
            taken = {} if processor is None else {"processor": processor.finish()}
            return {**sample, **reader.untroubled(setting), **taken}
        lines = watch.finish()
        assert watch.killed is not None
        resumed = reader.resumed(lines, watch.killed, setting.ranks)
        return {**sample, **cost(lines, watch.killed, resumed), **reader.facts(lines, watch.killed, setting)}


class WanmaRun:
    """Records of a run of wanma."""

    def __init__(self, folder: Path) -> None:
        self._run = RunDirectory(folder / "run")
        self.progress = self._run.metrics

    def process(self, rank: int) -> int:
        """Return the process of a rank in the first generation, with which its log begins."""
        found = re.search(r"generation 1, process (\d+)", self._run.rank_log(rank).read_text())
        if found is None:
            raise BenchmarkError(f"{self._run.rank_log(rank)} does not say which process rank {rank} is")
        return int(found[1])

    def supervision(self) -> dict[str, int]:
        """Return the processes above the ranks."""
        fork_server = psutil.Process(self.newest_process(0)).ppid()
        return {"supervisor": psutil.Process(fork_server).ppid(), "fork server": fork_server}

    def newest_process(self, rank: int) -> int:
        """Return the process of a rank in the newest generation."""
        found = re.findall(r"generation \d+, process (\d+)", self._run.rank_log(rank).read_text())
        return int(found[-1])

    def digest(self) -> str:
        """Return the digest of the last checkpoint's files: weights and optimizer state."""
        newest = max(self._run.checkpoints.glob("step-*/manifest.json"))
        files = json.loads(newest.read_text())["manifest"]["files"]
        return " ".join(f"{files[name]['sha256']}" for name in sorted(files))

    def final_loss(self, _ranks: int) -> float:
        return float(read_lines(self.progress)[-1]["loss"])

    def resumed(self, _lines: Sequence[Mapping[str, Any]], killed: float, _ranks: int) -> float:
        starts = [event for event in self._events("start") if event["time"] > killed]
        if len(starts) != 1:
            raise BenchmarkError(f"wanma's ranks started again {len(starts)} times after one was killed")
        return float(starts[0]["time"])

    def facts(self, _lines: Sequence[Mapping[str, Any]], _killed: float, _setting: Setting) -> dict[str, Any]:
        """Return the run's own record of its recovery."""
        (told,) = self._events("recovery")
        kept = ("source", "repeated_steps", "seconds", "attempt")
        return {"told": {name: told[name] for name in kept}}

    def untroubled(self, setting: Setting) -> dict[str, Any]:
        """Return the seconds of the measured steps, and the interval of in-memory checkpoints."""
        if not setting.warmup:
            return {}
        times = [line["time"] for line in read_lines(self.progress)]
        count = setting.steps - setting.warmup - 1
        seconds = (times[setting.warmup + count - 1] - times[setting.warmup - 1]) / count
        measured = read_lines(self.progress)[setting.warmup : setting.warmup + count]
        return {
            "step_seconds": round(seconds, 5),
            "every": interval(self._events("message")),
            "copies": copies(measured),
        }

    def _events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self._run.events) if event["kind"] == kind]


def copies(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the extra time of steps with in-memory checkpoints, as a share of their two neighbours' time.

    A disturbance of the machine affects neighbours alike.

    Args:
        steps: a run's records of consecutive steps.
    """
    copied = [step["phases"]["checkpoint"] > LEAST_COPY_SECONDS for step in steps]
    seconds = [step["step_seconds"] for step in steps]
    longer = []
    for number in range(1, len(steps) - 1):
        if copied[number] and not copied[number - 1] and not copied[number + 1]:
            beside = (seconds[number - 1] + seconds[number + 1]) / 2
            longer.append(round(seconds[number] / beside - 1, 4))
    return longer


def interval(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the steps between in-memory checkpoints that a run chose last; None if it chose none."""
    texts = (re.match(r"in-memory checkpoint every (?:(\d+) )?step", line["text"]) for line in messages)
    chosen = [int(found[1] or 1) for found in texts if found is not None]
    return chosen[-1] if chosen else None


class PeerRun:
    """Records of a peer's script in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "progress"
        self.progress = self._folder / "rank-0.jsonl"

    def process(self, rank: int) -> int:
        return int((self._folder / f"rank-{rank}.pid").read_text())

    def digest(self) -> str:
        return (self._folder / "digest").read_text()

    def final_loss(self, ranks: int) -> float:
        """Return the mean final loss over the ranks."""
        last = [read_lines(self._folder / f"rank-{rank}.jsonl")[-1]["loss"] for rank in range(ranks)]
        return float(sum(last) / ranks)

    def resumed(self, lines: Sequence[Mapping[str, Any]], killed: float, ranks: int) -> float:
        """Return the time of the first line of a new start, or of torchft's step without the dead rank."""
        for line in lines:
            is_other = line["generation"] > 0 or line.get("participants", ranks) < ranks
            if line["time"] > killed and (is_other or not line.get("committed", True)):
                return float(line["time"])
        raise BenchmarkError("the ranks that were left did not carry on; train for longer")

    def facts(self, lines: Sequence[Mapping[str, Any]], killed: float, setting: Setting) -> dict[str, Any]:
        """Return torchft's losses: steps that were computed and discarded, samples that no step has seen."""
        if "participants" not in lines[-1]:
            return {}
        after = [line for line in lines if line["time"] > killed]
        committed = [line for line in after if line["committed"]]
        missing = [setting.ranks - line["participants"] for line in committed]
        short = [line for line, absent in zip(committed, missing, strict=True) if absent]
        whole = [line["time"] for line in committed if short and line["time"] > short[-1]["time"]]
        return {
            "discarded_steps": len(after) - len(committed),
            "lost_samples": sum(missing) * (setting.batch // setting.ranks),
            "whole_again_seconds": round(whole[0] - killed, 4) if whole else None,
        }

    def untroubled(self, _setting: Setting) -> dict[str, Any]:
        return {}
