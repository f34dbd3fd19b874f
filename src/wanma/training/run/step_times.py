"""Times of a step: the clock of its phases, compute, waits for other ranks, bubble of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from wanma.collectives.timing.communication_timer import CommunicationTime
from wanma.job.plan.plan import Plan
from wanma.parallel.parallelize import ParallelModel
from wanma.parallel.pipeline.bubble_exchange import bubble_seconds, operation_terms
from wanma.parallel.profiling.compute_timer import ComputeTime

PHASES = ("data", "forward_backward", "communication", "optimizer", "checkpoint", "host", "validation")
"""Phases of a step record; `communication` is its exposed part, not the overlapped one. `host` is the Python
of the training loop outside the others: records, reports to the supervisor, hooks."""


class PhaseTimer:
    """Timer that adds up seconds by phase; `collect` returns them and starts anew.

        with timer.phase("forward_backward"):
            ...
            with timer.phase("communication"):  # counted here, and no longer as forward_backward
                ...
        record["phases"] = timer.collect()

    Work of a GPU counts when the host waits for it, not when it was started.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._active_phases: list[str] = []
        """Phases entered and not left, outermost first; only the innermost one's clock runs."""
        self._phase_start = 0.0

    def phase(self, name: str) -> Self:
        """Begin a phase, until the end of the `with` that this is called in; may be nested."""
        if name not in self._seconds:
            raise ValueError(f"unknown phase {name!r}: one of {', '.join(PHASES)}")
        self._attribute_elapsed()
        self._active_phases.append(name)
        return self

    def __enter__(self) -> None:
        """Do nothing: the clock runs since the call of `phase`."""

    def __exit__(self, *_: object) -> None:
        self._attribute_elapsed()
        self._active_phases.pop()

    def collect(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, for every phase of `PHASES`.

        An open phase keeps running, and its time so far is included.
        """
        self._attribute_elapsed()
        phase_seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return phase_seconds

    def _attribute_elapsed(self) -> None:
        """Add the time since the last change to the running phase."""
        now = time.perf_counter()
        if self._active_phases:
            self._seconds[self._active_phases[-1]] += now - self._phase_start
        self._phase_start = now


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
