"""Run of one rank beyond its single steps: state, checkpoints and records.

Both ways of training end their steps here: the job's loop (`training/loop/training_loop.py`) and a
user's own loop (`training/loop/session.py`). A `Trainer` neither reads data nor runs the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTime
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import AppliedStep
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.observe.recorder import Recorder
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel
from wanma.training.balancing.rank_timing import RankTimingReporter
from wanma.training.balancing.share_allocation import Rebalance
from wanma.training.balancing.share_rebalancer import ShareChange, ShareRebalancer
from wanma.training.checkpointing.checkpoint_saves import CheckpointSaves
from wanma.training.checkpointing.error_feedback_state import check_compression_patterns
from wanma.training.checkpointing.in_memory_checkpoints import InMemoryCheckpoints
from wanma.training.checkpointing.private_folders import find_private_folders
from wanma.training.checkpointing.replica_check import ReplicaCheck
from wanma.training.checkpointing.resume import ResumeResult, resume
from wanma.training.checkpointing.run_identity import UNKNOWN_IDENTITY, Identity, with_optimization
from wanma.training.loss.validation_metrics import missing_values_text, validation_fields
from wanma.training.optimizer.learning_rate_schedule import learning_rate_function, schedule_change_note
from wanma.training.optimizer.named_optimizer import check_parameter_patterns
from wanma.training.optimizer.user_optimizer import NO_USER_OPTIMIZATION, UserOptimization
from wanma.training.run.initial_state import build_training_state
from wanma.training.run.rank_memory import peak_rank_memory_bytes, reset_peak_memory
from wanma.training.run.run_records import (
    RankStepLog,
    open_recorder,
    record_recovery,
    record_share_change,
    record_start,
    warn_per_node,
)
from wanma.training.run.skip_reason import find_skip_reason
from wanma.training.run.start_health_check import HealthReport
from wanma.training.run.step_data import StepData
from wanma.training.run.step_metrics import (
    model_flops_utilization,
    open_gpu_sampler,
    parallel_metrics,
)
from wanma.training.run.step_profiler import StepProfiler
from wanma.training.run.step_times import PhaseTimer, StepTimes
from wanma.training.sites.outer_optimizer import OuterStepResult
from wanma.training.sites.site_synchronizer import SiteSynchronizer
from wanma.training.step.device_metrics import DeviceMetrics
from wanma.training.step.parameter_update import (
    StepTotals,
    apply_update,
    call_gradient_hooks,
    reduce_delayed_gradient_norm,
    reduce_step_totals,
)

FINAL_IN_MEMORY_TIMEOUT_SECONDS = 5.0
"""Seconds that a failed rank may take to finish its in-memory checkpoint, from which the run resumes."""


class Trainer:
    """Run of one rank, from its resume point on.

    Args:
        flops_per_sample: model FLOPs of one sample, forward and backward; None when unknown.
        peak_flops_per_second: of one rank's device; None when unknown.
        restore: choice of the initial state.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: WorkerContext,
        parallel_mesh: ParallelMesh,
        parallel_model: ParallelModel,
        *,
        targets_per_sample: int,
        identity: Identity = UNKNOWN_IDENTITY,
        user_optimization: UserOptimization = NO_USER_OPTIMIZATION,
        flops_per_sample: float | None = None,
        peak_flops_per_second: float | None = None,
        restore: Callable[..., ResumeResult] = resume,
    ) -> None:
        self.job, self.worker, self.parallel_mesh = job, worker, parallel_mesh
        self._devices = plan.world_size
        self.profiler = StepProfiler(worker, is_on_gpu=plan.device == "cuda")
        self.phases = PhaseTimer()
        self._targets_per_sample = targets_per_sample
        self._flops_per_sample = flops_per_sample
        self._peak_flops_per_second = peak_flops_per_second
        train = job.train
        self._learning_rate_at = learning_rate_function(train, user_optimization.schedule)
        check_parameter_patterns(parallel_model.parameter_names, train)
        check_compression_patterns(parallel_model.parameter_names, plan)
        self.state = build_training_state(job, plan, parallel_mesh, parallel_model, user_optimization)
        self._times = StepTimes(self.phases, parallel_model)
        same_tensors = plan.cross_site_stage_group(worker.rank)
        folders = find_private_folders(worker)
        self._saves = CheckpointSaves(
            job, plan, worker, self.state, same_tensors, self.message, self._record_event, folders
        )
        identity = with_optimization(identity, user_optimization)
        resumed = restore(self.state, job, plan, worker, identity, folders)
        self._identity = resumed.identity
        self._share_rebalancer = ShareRebalancer(job, plan, parallel_mesh, parallel_model, self.state)
        self._replica_check = ReplicaCheck(
            self.state,
            worker,
            replicas=same_tensors,
            device=parallel_mesh.device,
            is_enabled=job.checkpoint.compare_replicas,
        )
        self._in_memory_checkpoints = InMemoryCheckpoints(
            job,
            plan,
            worker,
            self.state,
            replicas=same_tensors,
            identity=resumed.identity,
            check_replicas=self._replica_check.check,
            interval_steps=resumed.in_memory_interval_steps,
        )
        interval = job.observe.gradient_norms_every_steps
        self._device_metrics = DeviceMetrics(parallel_model, parallel_mesh, interval)
        self._last_device_metrics: dict[str, Any] = {}
        self._log = RankStepLog(job, worker)
        self._timing_reporter = RankTimingReporter(plan, parallel_mesh, worker.supervisor_client)
        self._recorder: Recorder | None = None
        note = schedule_change_note(resumed.saved_settings, train, user_optimization, self.state.step)
        self._open_records(plan, resumed, targets_per_sample, [*resumed.warnings, *([note] if note else [])])
        self._share_rebalancer.messages.clear()
        self._saves.uploads.request(self.state.step)
        self._unrecorded_restart = worker.restart  # until the first step after it is finished
        self._retried_steps = worker.restart.retried_steps if worker.restart is not None else ()
        self._resume_result, self._resumed_step = resumed, self.state.step
        records_gpu = self._recorder is not None and plan.device == "cuda"
        self._gpu = open_gpu_sampler(parallel_mesh.device, self.message) if records_gpu else None
        reset_peak_memory(plan.device)
        self._learning_rate, self._global_batch = 0.0, 0
        self._timed_plan = self.plan
        self._share_change: ShareChange | None = None
        bad_samples = RunDirectory(worker.run_directory).bad_samples(worker.rank)
        self.step_data = StepData(bad_samples, parallel_mesh, self.message, job.data, worker)
        self._outer_result: OuterStepResult | AppliedStep | None = None
        """Outer update after the last step, or update of parameter servers; None: there was none."""
        self._step_started = time.perf_counter()

    def _open_records(
        self, plan: Plan, resumed: ResumeResult, targets_per_sample: int, warnings: list[str]
    ) -> None:
        """Open the recorder on rank 0, and report how the run starts."""
        job, worker, compression = self.job, self.worker, self.state.parallel_model.compression
        if worker.rank == 0:
            self._recorder = open_recorder(job, worker, first_step=self.state.step + 1)
            of_run = (self.state.step, job.train.steps, plan, targets_per_sample)
            record_start(
                self._recorder,
                *of_run,
                nodes=len(worker.local_world_sizes) or 1,
                is_restart=worker.restart is not None,
                source=resumed.checkpoint_name,
            )
            for text in [
                *resumed.messages,
                *self._in_memory_checkpoints.messages,
                *self._share_rebalancer.messages,
            ]:
                self._recorder.message(text)
            for text in warnings:
                self._recorder.message(text, "warning")
        if compression is not None and compression.warning:
            warn_per_node(compression.warning, worker, self._recorder)

    @property
    def plan(self) -> Plan:
        """Plan of the next step: shares of the batch may move between steps."""
        return self._share_rebalancer.plan

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool) -> None:
        """Close files. A failed run gives a pending save some time: its other ranks may be gone."""
        self.profiler.close(failed)
        try:
            self._saves.close(failed)
        finally:
            self._in_memory_checkpoints.close(FINAL_IN_MEMORY_TIMEOUT_SECONDS if failed else None)
            if self._gpu is not None:
                self._gpu.close()
            if self._recorder is not None:
                self._recorder.close()

    def loss_multiplier(self, global_batch: int) -> float:
        """Return the loss multiplier before backward: it divides by the targets of a full batch."""
        divisor = self.state.parallel_model.gradient_divisor
        return divisor * self.state.loss_scale.value / (global_batch * self._targets_per_sample)

    def finish_step(self, loss_sum: Tensor, target_count: Tensor, global_batch: int) -> StepTotals:
        """Agree on the step's numbers and update the weights: once per step, after the last backward."""
        state, train = self.state, self.job.train
        rate, is_last = self._learning_rate_at(state.step), state.step + 1 == train.steps
        self._end_forward_backward()
        # A rank alone agrees with nobody; on a GPU it waits here for its own kernels.
        is_alone = self.plan.world_size == 1 and self.plan.device == "cpu"
        with self.phases.phase("optimizer" if is_alone else "communication"):
            agreement, decision = self._agree(loss_sum, target_count, global_batch, is_last)
            skip_reason = find_skip_reason(
                agreement,
                loss_sum,
                state,
                train,
                self.parallel_mesh,
                retried_steps=self._retried_steps,
                non_finite_sample_names=self.step_data.non_finite_sample_names,
                sample_names=self.step_data.sample_names,
                record_event=self._record_event,
            )
            is_applied = agreement.is_finite and not skip_reason
            self._last_device_metrics = self._device_metrics.end_step(agreement, is_applied=is_applied)
        sites = state.site_synchronizer
        with self.phases.phase("optimizer"):
            applied = apply_update(
                agreement, state.named_optimizer, train, rate, state.loss_scale, skip=bool(skip_reason)
            )
            if applied and state.weight_average is not None:
                state.weight_average.update()
            if sites is not None:
                self._apply_delayed_gradients(sites, agreement, rate, is_last)
        state.end_step(applied, global_batch)
        if sites is not None:
            with self.phases.phase("communication"):
                self._outer_result = sites.synchronize(state.step, agreement.site_target_counts, is_last)
        if applied and agreement.has_gradients and train.spike != "ignore":
            state.anomaly_detector.record_update(agreement.loss, agreement.gradient_norm)
        if not applied:
            self.message(
                f"step {state.step}: skipped, {skip_reason or f'gradient norm {agreement.gradient_norm}'}"
                + (f"; loss scale now {state.loss_scale.value:g}" if state.loss_scale.enabled else ""),
                "warning",
            )
        self._learning_rate, self._global_batch = rate, global_batch
        self._share_change = self._share_rebalancer.apply_change(decision)
        self.worker.supervisor_client.report_finished_step(state.step)
        return agreement

    def _end_forward_backward(self) -> None:
        """Take the times of forward and backward, and settle the in-memory checkpoint of an earlier step."""
        if self.parallel_mesh.device.type == "cuda":
            # The next phase reads numbers, and would be charged with all the work queued before them.
            with self.phases.phase("forward_backward"):
                torch.cuda.current_stream().synchronize()
        self._times.end_forward_backward()
        self._timed_plan = self.plan
        self._share_rebalancer.record_compute(self._times.compute.pace)
        with self.phases.phase("checkpoint"):
            # Before the agreement, which then implies that all ranks have settled.
            self._in_memory_checkpoints.finish_pending()

    def _agree(
        self, loss_sum: Tensor, target_count: Tensor, global_batch: int, is_last: bool
    ) -> tuple[StepTotals, Rebalance | None]:
        """Reduce the step's numbers over all ranks, and return them with the decision on batch shares."""
        state, plan, rank = self.state, self.plan, self.worker.rank
        sites, step = state.site_synchronizer, state.step + 1
        factor = self.loss_multiplier(global_batch) / state.parallel_model.gradient_divisor
        call_gradient_hooks(
            state.parallel_model.gradient_hooks,
            state.named_optimizer,
            target_count,
            self.parallel_mesh,
            factor,
        )
        of_snapshots = self._in_memory_checkpoints.local_status()
        of_times = self._times.exchanged_terms(plan, rank, global_batch)
        of_data = self.step_data.exchanged_terms()
        agreement = reduce_step_totals(
            loss_sum,
            target_count,
            self.worker.supervisor_client.is_drain_requested(),
            state.named_optimizer,
            self.parallel_mesh,
            step=step,
            effective_loss_multiplier=factor,
            is_suspend_requested=self.worker.supervisor_client.is_suspend_requested(),
            extra_terms=(*of_snapshots, *of_times, *of_data, *self._share_rebalancer.local_timings()),
            normalization=sites.exchange_gradients(step, factor, is_last) if sites is not None else None,
            loss_scale=state.loss_scale,
            device_terms=self._device_metrics.local_terms(step, state.named_optimizer),
            read_device_sums=self._device_metrics.take_sums,
        )
        if sites is not None:
            sites.set_target_count(step, agreement.target_count)
        sums = iter(agreement.extra_sums)
        for text in self._in_memory_checkpoints.apply_global_status(tuple(islice(sums, len(of_snapshots)))):
            self.message(text)
        self._times.take_exchanged_sums(tuple(islice(sums, len(of_times))), plan, rank, global_batch)
        self.step_data.take_exchanged_sums(tuple(islice(sums, len(of_data))))
        return agreement, self._share_rebalancer.decide(tuple(sums))

    def record_step(self, totals: StepTotals) -> None:
        """Record the step just finished, with all that was done for it. Validation is not step time."""
        now = time.perf_counter()
        phases, spent = self._times.take_phases()
        self._saves.report_completed()
        seconds = now - self._step_started - phases["validation"]
        self._step_started = now
        self._log.log_step(
            self.state.step, totals.loss, totals.gradient_norm, seconds, self.parallel_mesh.device.type
        )
        pace = self._times.compute.pace
        self._timing_reporter.report_step(phases, pace, self._global_batch, self._timed_plan)
        self._share_rebalancer.record_step(phases, seconds)
        self._write_record(totals, seconds, phases, spent)
        with self.phases.phase("checkpoint"):
            self._in_memory_checkpoints.start_if_due(
                seconds - phases["checkpoint"],
                is_last=totals.is_drain_requested
                or totals.is_suspend_requested
                or self.state.is_over(self.job.train),
            )

    def _write_record(
        self,
        totals: StepTotals,
        seconds: float,
        phases: dict[str, float],
        communication_seconds: CommunicationTime,
    ) -> None:
        if self._recorder is None:
            return
        self._record_recovery()
        self._recorder.step(
            {
                "step": self.state.step,
                "loss": totals.loss,
                "tokens_per_second": totals.target_count / seconds,
                "step_seconds": seconds,
                "grad_norm": totals.gradient_norm,
                "samples": self.state.samples,
                "learning_rate": self._learning_rate,
                "phases": phases,
                **({"loss_scale": self.state.loss_scale.value} if self.state.loss_scale.enabled else {}),
                **self._times.metrics(),
                **self.step_data.metrics(),
                **communication_seconds.numbers(),
                "memory_bytes": peak_rank_memory_bytes(self.parallel_mesh.device.type),
                **self._last_device_metrics,
                **parallel_metrics(self.state.parallel_model),
                **(self._outer_result.metrics() if self._outer_result is not None else {}),
                **(self._gpu.collect() if self._gpu is not None else {}),
                "mfu": model_flops_utilization(
                    self._flops_per_sample,
                    self._global_batch,
                    seconds,
                    self._devices,
                    self._peak_flops_per_second,
                ),
            }
        )
        while self._share_rebalancer.messages:
            self.message(self._share_rebalancer.messages.pop(0), "warning")
        if self._share_change is not None:
            record_share_change(self._recorder, self._share_change)

    def record_validation(self, values: dict[str, float | None], target_count: int) -> None:
        """Record a validation result; a loss that is not finite does not become the best.

        Args:
            values: loss and metrics by name; None: no sample counts for it.
            target_count: number of targets.
        """
        loss, best = values["loss"], self.state.best_loss
        if loss is not None and math.isfinite(loss) and (best is None or loss < best):
            self.state.best_loss = loss
        self._record_event(
            "validation", step=self.state.step, targets=target_count, **validation_fields(values)
        )
        if text := missing_values_text(values, self.job):
            self.message(f"step {self.state.step:,}: {text}", "warning")
        reason = self.state.early_stopping.record_validation(self.state.step, values, self.job.train)
        if reason:
            self.message(reason)

    def save(self, metric: float | None = None, *, is_final: bool = False) -> None:
        """Start saving the state after the current step; wait only for the copy.

        Args:
            metric: metric by which the best checkpoints are kept.
            is_final: true if the state stays as it is until `finish`.

        Raises:
            AllRanksError: ranks differ in what they should hold alike; nothing is saved.
        """
        self.worker.supervisor_client.report_progress(self.state.step, "checkpoint")
        with self.phases.phase("checkpoint"):
            self._replica_check.check()
            self._saves.save(self._identity.state_values(), metric, is_final)
        if self.state.parallel_model.disk_pool is not None:
            self.state.parallel_model.disk_pool.release_pages()

    def suspend(self, is_saved: bool) -> None:
        """Keep the state of the step just finished in memory, or on disk, and wait until it is there.

        Args:
            is_saved: true if that step's checkpoint is being written already.

        Raises:
            AllRanksError: ranks differ in what they should hold alike.
        """
        self.worker.supervisor_client.report_suspend()
        self.worker.supervisor_client.report_progress(self.state.step, "pausing")
        if not self._in_memory_checkpoints.checkpoint_now() and not is_saved:
            self.save()
        self._saves.report(self._saves.wait())

    def message(self, text: str, level: str = "info") -> None:
        """Show the user a message, once: only rank 0 does."""
        if self._recorder is not None:
            self._recorder.message(text, level)

    def _record_event(self, kind: str, **fields: Any) -> None:
        """Record an event, once: only rank 0 does."""
        if self._recorder is not None:
            self._recorder.event(kind, **fields)

    def record_health(self, health: HealthReport) -> None:
        """Record the result of the health check before the start."""
        if self._recorder is not None:
            self._recorder.event("health_check", **health.event_fields, text=health.text)
            for warning in health.warnings:
                self.message(warning, "warning")

    def finish(self, outcome: str) -> None:
        """Wait for pending saves and record the end.

        Raises:
            WanmaError: the last state could not be saved.
        """
        if self._resumed_step == self.state.step and self._resume_result.source in ("memory", "partner"):
            self.save()  # the earlier ranks had no room for it on disk
        results = self._saves.wait()
        failure = self._saves.last_error(results, outcome)
        self._in_memory_checkpoints.checkpoint_if_save_failed(failure is not None)
        if failure is not None:
            raise failure
        self._saves.report(results)
        self._saves.uploads.wait_for_pending(self.state.step, outcome, self.message)
        self._record_event("finish", step=self.state.step, outcome=outcome, best_loss=self.state.best_loss)

    # ---------------------------------------------------------------- inside

    def _apply_delayed_gradients(
        self, site_synchronizer: SiteSynchronizer, totals: StepTotals, learning_rate: float, is_last: bool
    ) -> None:
        """Apply further gradients that have arrived from the sites: at the end of a job, all pending ones."""
        state = self.state
        while (summed := site_synchronizer.pop_delayed_gradient(is_last)) is not None:
            delayed_totals = reduce_delayed_gradient_norm(
                totals, state.named_optimizer, self.parallel_mesh, summed
            )
            if apply_update(
                delayed_totals, state.named_optimizer, self.job.train, learning_rate, state.loss_scale
            ):
                if state.weight_average is not None:
                    state.weight_average.update()
            else:
                self.message(
                    f"delayed gradients with norm {delayed_totals.gradient_norm} are skipped", "warning"
                )

    def _record_recovery(self) -> None:
        """Record a failure and its cost, once, when the first step after it is finished."""
        if self._unrecorded_restart is None or self._recorder is None:
            return
        restart, self._unrecorded_restart = self._unrecorded_restart, None
        record_recovery(self._recorder, restart, self._resume_result.source, self._resumed_step)
