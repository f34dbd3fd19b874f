"""Contenders as commands: wanma through `wanma train`, each recipe through torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.commands import (
    TIMEOUT_SECONDS,
    Command,
    prepare_start,
    read_record,
    train_once,
    wanma_command,
    with_speed,
)
from benchmarks.common import BenchmarkError
from benchmarks.parallel.axes import AXES, Axis, even_cuts
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.meter.disturbance import DisturbanceRule
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.programs.execution import execute
from wanma.bench.programs.watched_program import ExecutionRule
from wanma.bench.turns.own_clock import OwnClock
from wanma.elastic.workers.environment import make_worker_environment
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import usable_cores
from wanma.job.sections.cluster import ClusterSection
from wanma.models.config.presets import DECODER_PRESETS

MIN_SHARED_STEPS = 10
"""Fewest steps of a contender while both took turns."""
COMPARED_STEPS = 8
"""Steps of a long run whose losses are compared: rounding errors grow from step to step."""


@dataclass(frozen=True)
class Setting:
    """Settings of one comparison; equal settings are pooled."""

    axis: str
    ranks: int
    precision: str
    preset: str
    heads: int
    """Attention heads, which tensor ranks must divide; 0: the preset's own."""
    vocabulary: int
    sequence: int
    batch: int
    """Samples per step, of all ranks."""
    micro_batches: int
    """Micro-batches of a pipeline."""
    cuts: str
    """Stage cuts; own: wanma's by cost, torchtitan's by count; same: torchtitan's for both."""
    warmup: int
    """Steps before the measured ones."""
    steps: int
    """Measured steps; in turns, all steps of a run."""
    turn_seconds: float = 0.0
    """Seconds of a turn, in which one contender runs and the other is stopped; 0: each runs alone."""

    @property
    def what(self) -> Axis:
        return AXES[self.axis]

    @property
    def total_steps(self) -> int:
        # One more than is measured: wanma's last step also saves the final checkpoint.
        return self.warmup + self.steps + 1

    @property
    def per_rank(self) -> int:
        """Samples per step of one data rank."""
        return self.batch // self.ranks if self.what.splits_samples else self.batch

    def job(self, one_process: bool = False) -> str:
        """Return the job file; recipes read model, data, training and layout from the same text."""
        heads = f"heads = {self.heads}\n" if self.heads else ""
        layout = "" if one_process else self.what.layout.replace("RANKS", str(self.ranks))
        if self.what.pipelined:
            layout += f"\nmicro_batch = {self.batch // self.micro_batches}"
            if self.cuts == "same":
                layout += f"\nstage_cuts = {list(self._even_cuts())}"
        else:
            layout += f"\nmicro_batch = {self.per_rank}"
        return f"""\
[model]
preset = "{self.preset}"
vocabulary = {self.vocabulary}
{heads}
[data]
text = ["stdlib"]
sequence_length = {self.sequence}
validation_fraction = 0.0

[train]
steps = {self.total_steps}
global_batch = {self.batch}
precision = "{self.precision}"
learning_rate = 1e-3
schedule = "constant"
weight_decay = 0.1
gradient_clip = 1.0

[[train.parameter_groups]]  # decay for all, as one plain AdamW(model.parameters()) has it
match = "*"
weight_decay = 0.1

[parallel]
{layout.strip()}

[cluster]
device = "cpu"

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""

    def _even_cuts(self) -> tuple[int, ...]:
        stages = self.ranks * (1 if self.axis == "pp-1f1b" else 2)
        return even_cuts(DECODER_PRESETS[self.preset].layers, stages)


def torchrun(setting: Setting, *script: str) -> Command:
    """Return the command of a script on the setting's ranks, with wanma's allocator and threads."""
    return Command(
        ("torchrun", "--standalone", f"--nproc-per-node={setting.ranks}", *script), tuned_environment(setting)
    )


def tuned_environment(setting: Setting) -> dict[str, str]:
    """Return the variables that wanma gives its ranks."""
    plan = Plan(dp_replicate=setting.ranks, threads_per_rank=max(usable_cores() // setting.ranks, 1))
    return make_worker_environment(ClusterSection(), plan)


def peer_command(setting: Setting) -> Command:
    """Return the command of the recipe, or of wanma in one process."""
    if setting.what.recipe is None:
        return wanma_command()
    return torchrun(
        setting,
        f"benchmarks/parallel/recipes/{setting.what.recipe}",
        *("--job", "job.toml", "--result", "result.json", f"--batch={setting.per_rank}"),
    )


def measure(setting: Setting, wanma: bool, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once and measure.

    Args:
        wanma: True for wanma on several ranks, False for its peer.
        folder: an empty folder.

    Raises:
        BenchmarkError: the contender failed or did not record every step.
    """
    alone = not wanma and setting.what.recipe is None
    command = wanma_command() if wanma else peer_command(setting)
    record = train_once(command, setting.job(one_process=alone), setting.total_steps, venv, folder)
    return with_speed(record, setting.warmup, setting.steps, setting.batch * setting.sequence)


def measure_in_turns(setting: Setting, venv: Path, rule: DisturbanceRule, folder: Path) -> dict[str, Any]:
    """Train with both contenders at once, of which one runs at a time, as `wanma bench --turns` does.

    Args:
        setting: settings of the comparison.
        venv: the peers' environment.
        rule: rule of disturbances.
        folder: an empty folder.

    Returns:
        a record by contender, as `measure` returns it; its speed is of the steps that both made in turns.

    Raises:
        BenchmarkError: a contender failed, did not record every step, or made too few in turns.
    """
    commands = {"wanma": wanma_command(), "peer": peer_command(setting)}
    contenders = []
    for name, command in commands.items():
        (folder / name).mkdir()
        alone = name == "peer" and setting.what.recipe is None
        start = prepare_start(command, setting.job(one_process=alone), venv, folder / name)
        contenders.append((start.contender(name), folder / name))
    measurements = execute(
        contenders,
        0,
        ExecutionRule(timeout_seconds=TIMEOUT_SECONDS, turn_seconds=setting.turn_seconds),
        make_meter=MachineMeter,
        find_disturbances=rule,
    )
    records = {}
    for one, command in zip(measurements, commands.values(), strict=True):
        if one.error:
            raise BenchmarkError(f"{one.contender} {one.error}")
        records[one.contender] = read_record(command, setting.total_steps, folder / one.contender)
    shared = shared_step_seconds(setting, measurements, records)
    tokens = setting.batch * setting.sequence
    return {
        one.contender: {
            "tokens_per_second": round(tokens / median(shared[one.contender]), 1),
            **records[one.contender],
            "losses": records[one.contender]["losses"][:COMPARED_STEPS],
            "foreign_cpu": one.machine.foreign_cpu,
            "disturbed": bool(one.disturbances),
        }
        for one in measurements
    }


def shared_step_seconds(
    setting: Setting, measurements: Sequence[Measurement], records: Mapping[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """Return the seconds of the steps that all contenders made in turns, without stops; takes out `times`.

    Raises:
        BenchmarkError: a contender made fewer than `MIN_SHARED_STEPS`.
    """
    times = {name: record.pop("times")[:-1] for name, record in records.items()}
    began = max(one[setting.warmup - 1] for one in times.values())
    ended = min(one[-1] for one in times.values())
    found = {}
    for one in measurements:
        assert one.turns is not None
        clock, stamps = OwnClock(one.started, one.turns.stops), times[one.contender]
        inside = [clock.seconds_at(time) for time in stamps if began <= time <= ended]
        found[one.contender] = [after - before for before, after in pairwise(inside)]
        if len(found[one.contender]) < MIN_SHARED_STEPS:
            raise BenchmarkError(
                f"{one.contender} made {len(found[one.contender])} steps while both took turns; more --steps"
            )
    return found


def default_setting(axis: str, ranks: int, precision: str) -> Setting:
    """Return settings with about the same work for every mesh dimension: 2,048 tokens per step."""
    what = AXES[axis]
    setting = Setting(
        axis=axis,
        ranks=ranks,
        precision=precision,
        preset="gpt-17m",
        heads=8,
        vocabulary=8192,
        sequence=256,
        batch=8,
        micro_batches=8 if what.pipelined else 1,
        cuts="own",
        warmup=2,
        steps=5 if precision == "fp32" else 9,
    )
    if what.experts:
        return replace(setting, preset="gpt-moe-43m", heads=0)
    if what.context:
        return replace(setting, sequence=2048, batch=1)
    return setting
