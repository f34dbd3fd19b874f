"""Trainer of the chief of parameter servers, which records, validates and saves what servers have applied."""

from __future__ import annotations

import time

import numpy as np
import torch

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import AppliedStep
from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.training.run.trainer import Trainer
from wanma.training.step.parameter_update import StepTotals


class ChiefTrainer(Trainer):
    """Trainer whose steps are made elsewhere."""

    records_staleness = False
    checked_plan: Plan | None = None
    """Plan of the workers while user's code is tried under it; None: the chief's own."""

    @property
    def plan(self) -> Plan:
        return self.checked_plan or super().plan

    def seconds_since_record(self) -> float:
        """Return the time since the last recorded step, which the next ones share."""
        return time.perf_counter() - self._step_started

    def take_step(self, record: AppliedStep, seconds: float) -> None:
        """Count a step that the servers have applied.

        Args:
            record: the step.
            seconds: time of the step until now.
        """
        self._step_started = time.perf_counter() - seconds
        samples = global_batch_size(self.job.train, self.state.step)
        self._end_forward_backward()
        self.state.end_step(record.applied, samples)
        self._learning_rate, self._global_batch = record.learning_rate, samples
        self._outer_result = record if self.records_staleness else None
        self.step_data.take_exchanged_sums(record.data_sums, record.bad_places)
        if not record.applied:
            self.message(f"step {self.state.step}: skipped, gradient norm {record.gradient_norm}", "warning")
        if record.applied and record.statistics and record.statistics[0]:
            self._apply_statistics(record)

    def record_step(self, totals: StepTotals) -> None:
        """Record the step just finished, and only then report it: a successor makes no step again."""
        super().record_step(totals)
        self.worker.supervisor_client.report_finished_step(self.state.step)

    def _apply_statistics(self, record: AppliedStep) -> None:
        """Update batch statistics once, by the sums of all workers."""
        packed = torch.from_numpy(sum(np.frombuffer(one, np.float64) for one in record.statistics))
        place = 0
        for module in find_step_statistics_modules(self.state.parallel_model.module).values():
            parts = []
            for like in module.pop_sums():
                parts.append(packed[place : place + like.numel()].view_as(like).to(like))
                place += like.numel()
            module.apply_sums(*parts)


def applied_totals(record: AppliedStep) -> StepTotals:
    """Return what the record of a step says, as a step of the chief's own would."""
    return StepTotals(
        loss=record.loss,
        target_count=record.target_count,
        gradient_norm=record.gradient_norm,
        gradient_multiplier=1.0,
        is_drain_requested=False,
    )
