"""Measurement of the bubble of wanma's pipelines, beside the theory in its planner."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.commands import Command
from benchmarks.common import clean_environment, run_command
from benchmarks.parallel.bubble import Operation, Step, measured_share, replayed_share, unevenness
from benchmarks.parallel.contenders import Setting, default_setting, torchrun
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import usable_cores
from wanma.job.sections.parallel import Schedule

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Bubble:
    """Pipeline settings; equal ones are pooled.

    Blocks have one size and small ends, so that stages are even.
    """

    bubble: Schedule
    ranks: int
    preset: str = "gpt-10m"
    layers: int = 8
    sequence: int = 256
    micro_batches: int = 8
    warmup: int = 2
    steps: int = 8

    @property
    def setting(self) -> Setting:
        """Settings as a comparison's, whose job and ranks this takes."""
        return replace(
            default_setting("pp-1f1b", self.ranks, "fp32"),
            preset=self.preset,
            heads=0,
            vocabulary=320,
            sequence=self.sequence,
            batch=self.micro_batches,
            micro_batches=self.micro_batches,
            warmup=self.warmup,
            steps=self.steps,
        )

    def job(self) -> str:
        text = self.setting.job().replace('schedule = "1f1b"', f'schedule = "{self.bubble}"')
        return text.replace("vocabulary =", f"layers = {self.layers}\nvocabulary =")

    @property
    def command(self) -> Command:
        return torchrun(
            self.setting, "benchmarks/parallel/bubble_rank.py", "--job", "job.toml", "--folder", "run"
        )


def measure_bubble(pipeline: Bubble, venv: Path, folder: Path) -> dict[str, Any]:
    """Train once; return idle shares, as medians over the measured steps.

    Raises:
        BenchmarkError: the run failed.
    """
    (folder / "job.toml").write_text(pipeline.job())
    places = {name: str(folder / name) for name in ("job.toml", "run")}
    command = pipeline.command
    finished = run_command(
        [places.get(argument, argument) for argument in command.arguments],
        {**clean_environment(venv), **command.environment},
        folder / "output.log",
        _TIMEOUT_SECONDS,
    )
    plan = Plan.from_json(json.loads((folder / "run" / "plan.json").read_text())["plan"])
    by_rank = [
        json.loads((folder / "run" / f"operations-{rank}.json").read_text()) for rank in range(plan.pp)
    ]
    chosen = range(pipeline.warmup, pipeline.warmup + pipeline.steps)
    steps: list[Step] = [
        [[Operation(**one) for one in rank[number]] for rank in by_rank] for number in chosen
    ]
    return {
        "theory": bubble_fraction(plan.schedule, plan.pp, plan.virtual_stages, pipeline.micro_batches),
        # Ranks that share a core give it to each other while they wait: the clock then tells nothing.
        "measured": _middle([measured_share(step) for step in steps]) if plan.pp <= usable_cores() else None,
        "replayed": _middle([replayed_share(step, plan.stage_count) for step in steps]),
        "unevenness": _middle([unevenness(step) for step in steps]),
        "cuts": list(plan.stage_cuts),
        "command_seconds": round(finished.seconds, 2),
    }


def _middle(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def bubble_fraction(schedule: Schedule, pp: int, virtual_stages: int, micro_batches: int) -> float:
    """Return the pipeline bubble: share of a step in which a rank waits, 0 .. 1.

    It counts from the first forward to the last backward, and holds for equal stages, free communication, and
    a backward that takes twice the forward, one half for the input gradients and one for the weight
    gradients. In units of one stage's forward, with p ranks, v stages each and m micro-batches, a rank works
    3·v·m and waits

        gpipe, 1f1b               3 (p − 1)   Huang et al. 2019, Narayanan et al. 2021 (section 2.2.1)
        interleaved_1f1b          3 (p − 1)   Narayanan et al. 2021 (section 2.2.2)
        interleaved_zero_bubble     (p − 1)   Qi et al. 2023 (section 2.3, ZB-H1)
        zbv                         (p − 1)   Qi et al. 2023 (section 6), which leaves out that the ranks
                                              begin one after the other and wait for each other at the end
        dualpipev                   (p − 1)   DeepSeek 2025 (DualPipe's table), likewise

    from m = p micro-batches on (zbv: 2p − 1). Fewer do not fill the pipeline, and ranks wait longer.
    """
    waits = (3 if schedule in ("gpipe", "1f1b", "interleaved_1f1b") else 1) * (pp - 1)
    return waits / (3 * virtual_stages * micro_batches + waits)
