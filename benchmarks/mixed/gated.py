"""Command `wanma` whose ranks wait at a gate after each step.

GATE=FILE python -m benchmarks.mixed.gated train job.toml --run-dir FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.mixed.gate import Gate
from wanma.job.run.worker import WorkerContext

VARIABLE = "GATE"
"""Environment variable with the path of the gate's file."""


def main() -> int:
    from wanma.api.run import job_run
    from wanma.cli import main as command

    job_run.ENTRY = f"benchmarks.mixed.gated:{train_worker.__name__}"
    return command.main(sys.argv[1:])


def train_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run `wanma train`'s rank entry point; the time at the gate is excluded from steps."""
    from wanma.training.loop import train_worker as main
    from wanma.training.run.trainer import Trainer
    from wanma.training.step.parameter_update import StepTotals

    gate = Gate(Path(os.environ[VARIABLE]), worker.world_size)
    record = Trainer.record_step

    def record_and_wait(self: Trainer, totals: StepTotals) -> None:
        record(self, totals)
        began = time.perf_counter()
        gate.wait(worker.rank, self.state.step)
        self._step_started += time.perf_counter() - began

    Trainer.record_step = record_and_wait  # type: ignore[method-assign]  # in this process alone
    main.train_worker(worker, payload)


if __name__ == "__main__":
    sys.exit(main())
