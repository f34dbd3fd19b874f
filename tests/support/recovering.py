"""A small job that fails and goes on from memory, without a supervisor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.images import Held, workers
from support.ranks import Outcome, run_job
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Restart

RESTART = Restart("rank 0 failed", 0.0, 3, 1)


def job(folder: Path, snapshots: Any = 1, every_steps: int = 0, **train: Any) -> dict[str, Any]:
    saved = {"every_steps": every_steps, "in_memory_every_steps": snapshots}
    keys = {"steps": 6, "global_batch": 6, "deterministic": True, "schedule": "constant"}
    keys |= {"validation_samples": 4, "weight_average": 0.5, **train}
    text, model = Path(__file__).parents[1] / "training", {**DECODER, "dropout": 0.1}
    return text_job(folder, model, text=text, sequence_length=32, checkpoint=saved, **keys)


def fail(folder: Path, text: dict[str, Any], plan: Plan, held: Held, patch: str) -> None:
    with pytest.raises(AssertionError, match="failed"):
        run_job(
            folder,
            text,
            plan,
            patch=f"support.faults:{patch}",
            workers=workers(held, range(plan.world_size)),
        )


def recover(folder: Path, text: dict[str, Any], plan: Plan, held: Held, step: int) -> tuple[Outcome, Held]:
    after = Held(plan.world_size)
    told = {
        rank: {"memory_files": after.images(rank, held, step), "generation": 2, "restart": RESTART}
        for rank in range(plan.world_size)
    }
    return run_job(folder, text, plan, workers=told), after


def cut_back(outcome: Outcome, step: int, directory: Path) -> Path:
    """Copy a run into `directory` as one that was killed before its next checkpoint after `step`."""
    shutil.copytree(outcome.directory, directory)
    for path in (directory / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return directory


def messages(outcome: Outcome) -> str:
    return (outcome.directory / "events.jsonl").read_text()
