"""Tracker of Weights & Biases; its own variables say where: WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.observe.trackers.tracker import Scalars, TrackedRun
from wanma.observe.trackers.wandb_file import STEP_KEY, newest_steps

_EXIT_CODES = {"finished": 0, "interrupted": 0}
"""Exit code by outcome; another is 1, which W&B shows as failed."""


class WandbTracker:
    """Tracker of one start of a run; all starts of a run are one group.

    Offline runs of W&B cannot be resumed, so each start is a run of its own; what an earlier start wrote
    is read back from its file.
    """

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def open(self, run: TrackedRun) -> Mapping[str, int] | None:
        folders = [Path(folder) for folder in run.state.get("folders", ())]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wanma"),
            group=run.name,
            name=run.name if not folders else f"{run.name}-{len(folders) + 1}",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=self._wandb.Settings(console="off", x_disable_stats=True),
        )
        # W&B's own step ends with the first row of it, and a validation comes after the record of its step.
        self._run.define_metric("*", step_metric=STEP_KEY)
        # `dir` of a run is the folder of its media, below that of its record.
        run.state.setdefault("folders", []).append(str(Path(self._run.dir).parent))
        if not folders or not folders[-1].is_dir():
            return None  # what was synchronized may be removed
        return newest_steps(folders)

    def log(self, scalars: Sequence[Scalars]) -> None:
        for entry in scalars:
            self._run.log({**entry.values, STEP_KEY: entry.step, "time": entry.time})

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, 1))
