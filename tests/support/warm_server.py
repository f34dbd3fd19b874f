"""Preparation of the process that all ranks of `support.ranks` are forked from: done once, at its import.

It trains a small model for a step, so that no rank has to look up operators, build their dispatch and import
the rest again: about a quarter of the CPU time of a run in one process, and little of a run in four. Then it
shields everything so far from garbage collection, which would copy the pages that ranks share.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch

from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import train


def train_a_step(folder: Path) -> None:
    """Train in this process, in fp64 as most comparisons do, and save nothing that a run could find."""
    text = folder / "text"
    text.write_text("".join(f"{number} horses. " for number in range(200)))
    job = {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "dropout": 0.1},
        "data": {"text": [str(text)], "sequence_length": 16, "cache": str(folder / "cache")},
        "train": {"steps": 1, "global_batch": 2, "precision": "fp64", "validation_samples": 1},
        "checkpoint": {"every_steps": 0},
    }
    directory = folder / "run"
    RunDirectory(directory).create()
    train(
        WorkerContext.single_process(directory),
        TrainRequest(Job.model_validate(job), Plan(micro_batch=1, precision="fp64")),
    )


# Where there is an accelerator, autograd starts threads for it, which no fork survives.
if not Path("/dev/nvidiactl").exists():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="wanma-test-") as scratch:
        train_a_step(Path(scratch))
gc.collect()
gc.freeze()
