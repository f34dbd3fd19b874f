"""Ways for a run to fail at an exact step; `run_job` takes them as `patch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wanma.training.snapshots import StepSnapshots
from wanma.training.trainer import Trainer


class InjectedError(RuntimeError):
    pass


def _before(step: int, is_due: Callable[[Trainer], bool]) -> None:
    finish_step = Trainer.finish_step

    def failing(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if self.state.step + 1 == step and is_due(self):
            raise InjectedError(f"injected before the update of step {step}")
        return finish_step(self, *arguments, **keywords)

    Trainer.finish_step = failing  # type: ignore[method-assign]


def rank_0_fails_in_step_4() -> None:
    _before(4, lambda trainer: trainer.worker.rank == 0)


def rank_1_fails_in_step_4() -> None:
    _before(4, lambda trainer: trainer.worker.rank == 1)


def rank_1_has_no_memory_for_snapshots() -> None:
    """Or rank 0, where it is alone."""
    right = StepSnapshots._require_memory

    def require(self: StepSnapshots, needed: int) -> None:
        last = self._worker.rank == self._worker.world_size - 1
        right(self, 1 << 60 if last else needed)

    StepSnapshots._require_memory = require  # type: ignore[method-assign]
