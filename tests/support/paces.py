"""Ranks that tell times by their rows, as a machine without any noise would: for tests of shares that
move."""

from __future__ import annotations

from collections.abc import Mapping

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.training.balancing.share_rebalancer import ShareRebalancer


def last_rank_takes_thrice() -> None:
    """Seconds of a row by data rank: three for the last one, one for the others."""
    _tell(lambda rank, ranks, step: 3.0 if rank == ranks - 1 else 1.0)  # noqa: ARG005  # always


def last_rank_takes_thrice_after_five_steps() -> None:
    """A second for a row; from the sixth step on, three for the last rank."""
    _tell(lambda rank, ranks, step: 3.0 if rank == ranks - 1 and step >= 5 else 1.0)


def last_rank_takes_thrice_in_short_steps() -> None:
    """Steps of a hundredth of a second, which tell little."""
    _tell(lambda rank, ranks, step: 3.0 if rank == ranks - 1 else 1.0, step_seconds=0.01)  # noqa: ARG005


def all_take_the_same() -> None:
    """A second for a row."""
    _tell(lambda rank, ranks, step: 1.0)  # noqa: ARG005  # wherever


def _tell(row_seconds, step_seconds: float = 1.0) -> None:  # type: ignore[no-untyped-def]  # a lambda
    worked, step_ended = ShareRebalancer.record_compute, ShareRebalancer.record_step

    def told(self: ShareRebalancer, seconds: float) -> None:  # the clock's own
        rank, plan, step = self._parallel_mesh.data_rank, self.plan, self._state.step
        rows = len(plan.batch_rows(global_batch_size(self._job.train, step), rank))
        worked(self, rows * row_seconds(rank, plan.data_parallel_size, step))

    def ended(self: ShareRebalancer, phases: Mapping[str, float], seconds: float) -> None:
        step_ended(self, dict.fromkeys(phases, 0.0), step_seconds)

    ShareRebalancer.record_compute, ShareRebalancer.record_step = told, ended  # type: ignore[method-assign]  # a test's
