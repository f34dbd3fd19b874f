"""Times of a step beside the clock of its phases: compute, waits for other ranks, bubble of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wanma.collectives.timing.communication_timer import CommunicationTime
from wanma.job.plan.plan import Plan
from wanma.observe.metrics.phase_timer import PhaseTimer
from wanma.parallel.parallelize import ParallelModel
from wanma.parallel.pipeline.bubble_exchange import bubble_seconds, operation_terms
from wanma.parallel.profiling.compute_timer import ComputeTime


class StepTimes:
    """Times of the step in progress, of one rank.

    Args:
        phases: timer of the phases.
        parallel_model: this rank's part of the model, with its timers.
    """

    def __init__(self, phases: PhaseTimer, parallel_model: ParallelModel) -> None:
        self._phases, self._model = phases, parallel_model
        self.compute = ComputeTime(0.0, None)
        """Compute of forward and backward, without waits for other ranks."""
        self._exposed_seconds: dict[str, float] = {}
        """Waits inside forward and backward, by kind of communication."""
        self._bubble_seconds: float | None = None

    def end_forward_backward(self) -> None:
        """Take the times of forward and backward; called once per step, right after its last backward.

        The host of a GPU has just waited for all that was queued.
        """
        timer = self._model.communication_timer
        if timer.clock is None:
            self.compute = self._model.compute_timer.pop()
        else:
            self.compute = self._model.compute_timer.pop(timer.read_waits())
            if self._model.pipeline is not None:
                self._model.pipeline.read_times()
            timer.clock.restart()
        # Where compute is unknown, so are the waits in it.
        self._exposed_seconds = {} if self.compute.seconds is None else timer.exposed_so_far()

    def exchanged_terms(self, plan: Plan, rank: int, global_batch: int) -> tuple[float, ...]:
        """Return the numbers that the rank adds to the step's all-reduce, as many on every rank."""
        pipeline = self._model.pipeline
        return operation_terms(pipeline.operations, plan, rank, global_batch) if pipeline is not None else ()

    def take_exchanged_sums(self, sums: Sequence[float], plan: Plan, rank: int, global_batch: int) -> None:
        """Compute the bubble from the sums of `exchanged_terms`; only rank 0 records it."""
        if rank == 0:
            self._bubble_seconds = bubble_seconds(sums, plan, global_batch)

    def take_phases(self) -> tuple[dict[str, float], CommunicationTime]:
        """Return the seconds by phase, and those of communication by kind, and start anew.

        Waits for other data ranks inside forward and backward are moved to the phase of communication. Of the
        other kinds those of a validation, which is not step time, are left out.
        """
        phases, spent = self._phases.collect(), self._model.communication_timer.take_totals()
        data_wait_seconds = self._exposed_seconds.get("data", 0.0)
        phases["communication"] += data_wait_seconds
        phases["forward_backward"] = max(phases["forward_backward"] - data_wait_seconds, 0.0)
        of_data = {kind: seconds for kind, seconds in spent.exposed_seconds.items() if kind == "data"}
        return phases, CommunicationTime(self._exposed_seconds | of_data, spent.total_seconds)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the step that ended; none where compute is unknown."""
        if self.compute.seconds is None:
            return {}
        bubble = {} if self._bubble_seconds is None else {"bubble_seconds": self._bubble_seconds}
        return {"compute_seconds": self.compute.seconds, **bubble}
