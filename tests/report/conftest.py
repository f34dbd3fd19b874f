"""Run directories as a training leaves them, written through the real recorder."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.observe.recorder import Recorder
from wanma.observe.sinks.jsonl import JsonLinesSink

JOB = """[model]
preset = "gpt-10m"

[data]
text = ["stdlib"]
sequence_length = 256

[train]
steps = {steps}
global_batch = 32
precision = "bf16"
learning_rate = 0.001

[parallel]
dp_replicate = 2
"""


def make_run(
    path: Path,
    steps: int,
    *,
    total: int | None = None,
    finish: str | None = "finished",
    job: str = JOB,
    loss: Callable[[int], float] | None = None,
) -> RunDirectory:
    """A run of `steps` recorded steps out of `total`, ended with `finish` or, if None, not at all."""
    noise = random.Random(1)
    run = RunDirectory(path)
    run.create()
    total = total or steps
    run.job.write_text(job.format(steps=total))
    plan = Plan(dp_replicate=2, micro_batch=8, precision="bf16")
    reasons = ("logits in fp32", "two replicas: as the job says")
    forecast = Forecast(40 << 20, 40 << 20, 80 << 20, 320 << 20, 64 << 20, reasons=reasons)
    planned = {"plan": plan.to_json(), "forecast": forecast.to_json(), "parameters": 10_236_000}
    write_json(run.plan, planned)
    write_json(run.environment, {"torch": "2.13.0", "python": "3.11.7", "devices": [{"name": "cpu"}]})
    run.rank_log(0).write_text("hello\n")
    recorder = Recorder(run, [JsonLinesSink()], first_step=1)
    recorder.event("start", step=0, steps=total, world_size=2, plan=str(plan))
    for step in range(1, steps + 1):
        share = step / total
        value = loss(step) if loss else 2.1 + 6 * math.exp(-8 * share) + noise.gauss(0, 0.05)
        slow = 12.0 if step == 1 else 0.0
        saving = 0.09 if step % 100 == 0 else 0.0
        seconds = 0.62 + noise.gauss(0, 0.01)
        recorder.step(
            {
                "step": step,
                "loss": value,
                "tokens_per_second": 8192 / (seconds + slow + saving + 0.1),
                "step_seconds": seconds + slow + saving + 0.1,
                "grad_norm": 0.4 + 8 * math.exp(-30 * share) + abs(noise.gauss(0, 0.05)),
                "samples": 32 * step,
                "learning_rate": 1e-3 * min(1, step / max(total / 10, 1)) * (1 - 0.9 * share),
                "phases": {
                    "data": 0.01,
                    "forward_backward": seconds + slow,
                    "communication": 0.06,
                    "optimizer": 0.03,
                    "checkpoint": saving,
                    "validation": 0.0,
                },
                "memory_bytes": (600 << 20) + min(step, 20) * (4 << 20),
                "mfu": 0.31 + noise.gauss(0, 0.005),
            }
        )
        if step % max(total // 6, 1) == 0:
            validation = 2.2 + 6 * math.exp(-8 * share)
            recorder.event(
                "validation", step=step, loss=validation, targets=65536, perplexity=math.exp(validation)
            )
        if step % max(total // 3, 1) == 0:
            recorder.event("checkpoint", step=step, bytes=120 << 20, stall_seconds=0.08, write_seconds=0.4)
    if finish is not None:
        recorder.event("finish", step=steps, outcome=finish, best_loss=2.2)
    recorder.close()
    return run


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """`make_run` below the test's own folder."""

    def make(steps: int, name: str = "gpt", **options: object) -> RunDirectory:
        return make_run(tmp_path / name, steps, **options)  # type: ignore[arg-type]  # passed through

    return make
