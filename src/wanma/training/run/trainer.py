"""Run of one rank beyond its single steps: state, checkpoints and records.

Both ways of training end their steps here: the job's loop (`training/loop/training_loop.py`) and a
user's own loop (`training/loop/session.py`). A `Trainer` neither reads data nor runs the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from wanma.checkpoint.save.checkpointer import Checkpointer, SaveResult, failure_of_last_save
from wanma.collectives.timing.communication_timer import Spent
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.job.sections.job import Job
from wanma.observe.metrics.memory import reset_peak
from wanma.observe.metrics.mfu import model_flops_utilization
from wanma.observe.metrics.phase_timer import PhaseTimer
from wanma.observe.recorder import Recorder
from wanma.parallel.memory.disk_pool import pool_of_state
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel
from wanma.training.balancing.rank_timing import OwnWork
from wanma.training.balancing.share_rebalancer import Moved, ShareMoves
from wanma.training.checkpointing.checkpoint_uploads import Uploads
from wanma.training.checkpointing.error_feedback_state import check_compressed
from wanma.training.checkpointing.in_memory_checkpoints import StepSnapshots
from wanma.training.checkpointing.replica_check import ReplicaCheck
from wanma.training.checkpointing.resume import Resumed, resume
from wanma.training.checkpointing.run_identity import UNKNOWN, Identity
from wanma.training.checkpointing.training_state import random_state
from wanma.training.loss.best_metric import best_rule
from wanma.training.loss.validation_metrics import validation_fields
from wanma.training.optimizer.learning_rate_schedule import rates
from wanma.training.optimizer.loss_scale import SMALLEST
from wanma.training.optimizer.named_optimizer import check_patterns
from wanma.training.optimizer.user_optimizer import NONE_OWN, OwnUpdate
from wanma.training.run.initial_state import initial_state
from wanma.training.run.rank_memory import held_bytes
from wanma.training.run.run_records import StepLog, open_recorder, tell_of_machine, tell_recovery, tell_start
from wanma.training.run.start_health_check import Health
from wanma.training.run.step_metrics import compression_numbers, expert_numbers, take_phases, watch_gpu
from wanma.training.sites.outer_optimizer import OuterStep
from wanma.training.sites.site_synchronizer import BetweenSites
from wanma.training.step.anomaly_detection import Policy, check_policy
from wanma.training.step.layer_gradient_norms import LayerNorms
from wanma.training.step.model_statistics import commit_statistics
from wanma.training.step.parameter_update import (
    Agreement,
    agree,
    agree_again,
    apply_update,
    call_hooks,
    what_is_not_finite,
)

WAIT_SECONDS = 5.0
"""Seconds between two signs of life while a checkpoint is being written."""
LAST_SAVE_SECONDS = 60.0
"""Seconds that a failed run may take to finish the checkpoint that it was writing."""
LAST_SNAPSHOT_SECONDS = 5.0
"""Seconds that a failed rank may take to finish its in-memory checkpoint, from which the run resumes."""


class Trainer:
    """Run of one rank, from its resume point on.

    Args:
        flops_per_sample: model FLOPs of one sample, forward and backward; None when unknown.
        peak_flops_per_second: of one rank's device; None when unknown.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: Worker,
        grid: Grid,
        parallel: Parallel,
        *,
        targets_per_sample: int,
        identity: Identity = UNKNOWN,
        own: OwnUpdate = NONE_OWN,
        flops_per_sample: float | None = None,
        peak_flops_per_second: float | None = None,
    ) -> None:
        self.job, self.worker, self.grid = job, worker, grid
        self._devices = plan.world_size
        self.phases = PhaseTimer()
        self._targets_per_sample = targets_per_sample
        self._flops_per_sample = flops_per_sample
        self._peak = peak_flops_per_second
        self._waited_seconds = 0.0
        self._failed_save: SaveResult | None = None
        """Newest failed save that has been reported."""
        train = job.train
        self._rate_of = rates(train, own.schedule)
        check_patterns(parallel.parameter_names, train)
        check_compressed(parallel.parameter_names, plan)
        self.state = initial_state(job, plan, grid, parallel, own)
        same_tensors = plan.stage_group(worker.rank)
        self._uploads = Uploads(job.checkpoint, worker)
        self._checkpointer = self._open_checkpointer(plan, same_tensors)
        resumed = resume(self.state, job, plan, worker, identity)
        self._identity = resumed.identity
        self._shares = ShareMoves(job, plan, grid, parallel, self.state)
        self._replicas = ReplicaCheck(
            self.state,
            worker,
            replicas=same_tensors,
            device=grid.device,
            is_on=job.checkpoint.compare_replicas,
        )
        self._snapshots = StepSnapshots(
            job,
            plan,
            worker,
            self.state,
            replicas=same_tensors,
            identity=resumed.identity,
            compare=self._replicas.compare,
            every=resumed.snapshots_every,
        )
        every = job.observe.gradient_norms_every_steps
        self._layer_norms, self._norms = LayerNorms(parallel.parameter_names, plan, every), dict[str, float]()
        self._log = StepLog(job, worker)
        self._own_work = OwnWork(plan, grid, worker.control)
        self._recorder: Recorder | None = None
        self._open_records(plan, resumed, targets_per_sample)
        self._shares.notes.clear()
        self._uploads.wake(self.state.step)
        self._restart = worker.restart  # until the first step after it is finished
        self._retried_steps = worker.restart.retried_steps if worker.restart is not None else ()
        self._resumed, self._resumed_step = resumed, self.state.step
        records_gpu = self._recorder is not None and plan.device == "cuda"
        self._gpu = watch_gpu(grid.device, self.message) if records_gpu else None
        reset_peak(plan.device)
        self._rate, self._global_batch = 0.0, 0
        self._work_seconds, self._worked_under = 0.0, self.plan
        self._moved: Moved | None = None
        self._noted: dict[str, Tensor] = {}
        self.broken: Callable[[], list[str]] = list
        """Function that names this rank's samples of the current step that are not finite themselves."""
        self._outer: OuterStep | None = None
        """Outer update after the last step; None where no exchange ended."""
        self._step_started = time.perf_counter()

    def _open_checkpointer(self, plan: Plan, same_tensors: list[int]) -> Checkpointer:
        job, worker = self.job, self.worker
        return Checkpointer(
            worker.run_directory / "checkpoints",
            rank=worker.rank,
            world_size=worker.world_size,
            generation=worker.generation,
            keep=job.checkpoint.keep,
            keep_best=job.checkpoint.keep_best,
            best_by=best_rule(job.checkpoint),
            keep_every_steps=job.checkpoint.keep_every_steps,
            in_use=self._uploads.in_use,
            replicas=same_tensors,
            room=pool_of_state(self.state.parallel.scratch, plan),
            still_mine=worker.still_mine,
        )

    def _open_records(self, plan: Plan, resumed: Resumed, targets_per_sample: int) -> None:
        """Open the recorder on rank 0, and report how the run starts."""
        job, worker, compression = self.job, self.worker, self.state.parallel.compression
        if worker.rank == 0:
            self._recorder = open_recorder(job, worker, first_step=self.state.step + 1)
            of_run = (self.state.step, job.train.steps, plan, targets_per_sample)
            tell_start(self._recorder, *of_run, again=worker.restart is not None, source=resumed.label)
            for text in [*resumed.messages, *self._snapshots.notes, *self._shares.notes]:
                self._recorder.message(text)
        if compression is not None and compression.note:
            tell_of_machine(compression.note, worker, self._recorder)

    @property
    def plan(self) -> Plan:
        """Plan of the next step: shares of the batch may move between steps."""
        return self._shares.plan

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool) -> None:
        """Close files. A failed run gives a pending save some time: its other ranks may be gone."""
        try:
            if failed:
                seconds = min(LAST_SAVE_SECONDS, self.job.cluster.hang_timeout_seconds / 2)
                self._report_saves(self._checkpointer.wait(seconds), "")
                self._checkpointer.sweep()
            else:
                self._checkpointer.close()
        finally:
            self._uploads.close()
            self._snapshots.close(LAST_SNAPSHOT_SECONDS if failed else None)
            if self._gpu is not None:
                self._gpu.__exit__(None, None, None)
            if self._recorder is not None:
                self._recorder.close()

    def factor(self, global_batch: int) -> float:
        """Return the loss multiplier before backward: it divides by the targets of a full batch."""
        divisor = self.state.parallel.divisor
        return divisor * self.state.scale.value / (global_batch * self._targets_per_sample)

    def finish_step(self, loss_sum: Tensor, targets: Tensor, global_batch: int) -> Agreement:
        """Agree on the step's numbers and update the weights: once per step, after the last backward."""
        state, train, step = self.state, self.job.train, self.state.step
        rate = self._rate_of(step)
        if self.grid.device.type == "cuda":
            # The next phase reads numbers, and would be charged with all the work queued before them.
            with self.phases.phase("forward_backward"):
                torch.cuda.current_stream().synchronize()
        self._work_seconds, self._worked_under = state.parallel.clock.take(), self.plan
        self._shares.worked(self._work_seconds)
        with self.phases.phase("checkpoint"):
            self._snapshots.settle()  # first: the agreement then implies that all ranks have settled
        sites, is_last = state.sites, step + 1 == train.steps
        with self.phases.phase("communication"):
            factor = self.factor(global_batch) / state.parallel.divisor
            call_hooks(state.parallel.hooks, state.updater, targets, self.grid, factor)
            of_snapshots = self._snapshots.shared()
            agreement = agree(
                loss_sum,
                targets,
                self.worker.control.stop_requested(),
                state.updater,
                self.grid,
                step=step + 1,
                factor=factor,
                pause=self.worker.control.pause_requested(),
                shared=(*of_snapshots, *self._shares.shared()),
                summed=sites.gradients(step + 1, factor, is_last) if sites is not None else None,
                scale=state.scale,
            )
            if sites is not None:
                sites.know(step + 1, agreement.targets)
            for text in self._snapshots.agreed(agreement.shared[: len(of_snapshots)]):
                self.message(text)
            decision = self._shares.agreed(agreement.shared[len(of_snapshots) :])
            wrong = self._what_is_left_out(agreement, loss_sum)
            self._norms = self._layer_norms.measure(step + 1, state.updater, self.grid, agreement.correction)
            self._noted = commit_statistics(state.parallel, self.grid, agreement.is_finite and not wrong)
        with self.phases.phase("optimizer"):
            applied = apply_update(agreement, state.updater, train, rate, state.scale, left_out=bool(wrong))
            if applied and state.average is not None:
                state.average.update()
            if sites is not None:
                self._apply_late(sites, agreement, rate, is_last)
        state.end_step(applied, global_batch)
        if sites is not None:
            with self.phases.phase("communication"):
                self._outer = sites.step_done(state.step, agreement.site_targets, is_last)
        if applied and agreement.has_gradients and train.spike != "ignore":
            state.anomalies.applied(agreement.loss, agreement.gradient_norm)
        if not applied:
            self.message(
                f"step {state.step}: skipped, {wrong or f'gradient norm {agreement.gradient_norm}'}"
                + (f"; loss scale now {state.scale.value:g}" if state.scale.enabled else ""),
                "warning",
            )
        self._rate, self._global_batch = rate, global_batch
        self._moved = self._shares.move(decision)
        self.worker.control.step_done(state.step)
        return agreement

    def record(self, agreement: Agreement) -> None:
        """Record the step just finished, with all that was done for it. Validation is not step time."""
        now = time.perf_counter()
        phases, spent = take_phases(self.phases, self.state.parallel.communication, self.plan.device)
        self._report_saves(self._checkpointer.poll())
        self._uploads.tell(self.message)
        seconds = now - self._step_started - phases["validation"]
        self._step_started = now
        self._log.step(
            self.state.step, agreement.loss, agreement.gradient_norm, seconds, self.grid.device.type
        )
        self._own_work.step(phases, self._work_seconds, self._global_batch, self._worked_under)
        self._shares.step_ended(phases, seconds)
        self._write_record(agreement, seconds, phases, spent)
        with self.phases.phase("checkpoint"):
            self._snapshots.step_ended(
                seconds - phases["checkpoint"],
                is_last=agreement.stop or agreement.pause or self.state.is_over(self.job.train),
            )

    def _write_record(
        self, agreement: Agreement, seconds: float, phases: dict[str, float], spent: Spent
    ) -> None:
        if self._recorder is None:
            return
        self._tell_recovery()
        self._recorder.step(
            {
                "step": self.state.step,
                "loss": agreement.loss,
                "tokens_per_second": agreement.targets / seconds,
                "step_seconds": seconds,
                "grad_norm": agreement.gradient_norm,
                **({"layer_grad_norms": self._norms} if self._norms else {}),
                "samples": self.state.samples,
                "learning_rate": self._rate,
                "phases": phases,
                **spent.numbers(),
                "memory_bytes": held_bytes(self.grid.device.type),
                **expert_numbers(self._noted, agreement.targets),
                **compression_numbers(self.state.parallel.compression),
                **(self._outer.numbers() if self._outer is not None else {}),
                **(self._gpu.take() if self._gpu is not None else {}),
                "mfu": None
                if self._flops_per_sample is None
                else model_flops_utilization(
                    self._flops_per_sample, self._global_batch, seconds, self._devices, self._peak
                ),
            }
        )
        while self._shares.notes:
            self.message(self._shares.notes.pop(0), "warning")
        if self._moved is not None:
            moved = self._moved
            self._recorder.event(
                "batch_shares",
                step=moved.step,
                batch_shares=list(moved.shares),
                previous_batch_shares=list(moved.before),
                level="info",
                text=moved.text,
            )

    def validated(self, loss: float, targets: int, metrics: dict[str, float]) -> None:
        """Record a validation result; a value that is not finite does not become the best."""
        best = self.state.best_loss
        if math.isfinite(loss) and (best is None or loss < best):
            self.state.best_loss = loss
        if self._recorder is not None:
            fields = {"loss": loss, "targets": targets, **validation_fields(metrics)}
            self._recorder.event("validation", step=self.state.step, **fields)
        if reason := self.state.stopping.see(self.state.step, {"loss": loss, **metrics}, self.job.train):
            self.message(reason)

    def save(self, metric: float | None = None) -> None:
        """Start saving the state after the current step; wait only for the copy.

        Raises:
            AgreedError: ranks differ in what they should hold alike; nothing is saved.
        """
        self.worker.control.progress(self.state.step, "checkpoint")
        with self.phases.phase("checkpoint"):
            self._replicas.compare()
            # One save at a time; the result of the last one is reported here, and cannot stop this one.
            began = time.perf_counter()
            self._report_saves(self._wait_for_saves())
            self._waited_seconds = time.perf_counter() - began
            self._checkpointer.save(
                self.state.step,
                self.state.tensors(),
                {**self.state.values(), **self._identity.values()},
                rank_state={"random": random_state()},
                metric=metric,
            )
        if self.state.parallel.scratch is not None:
            self.state.parallel.scratch.rest()

    def pause(self, is_saved: bool) -> None:
        """Keep the state of the step just finished in memory, or on disk, and wait until it is there.

        Args:
            is_saved: true if that step's checkpoint is being written already.

        Raises:
            AgreedError: ranks differ in what they should hold alike.
        """
        self.worker.control.pausing()
        self.worker.control.progress(self.state.step, "pausing")
        if not self._snapshots.keep_now() and not is_saved:
            self.save()
        self._report_saves(self._wait_for_saves())

    def message(self, text: str, level: str = "info") -> None:
        """Show the user a message, once: only rank 0 does."""
        if self._recorder is not None:
            self._recorder.message(text, level)

    def tell_health(self, health: Health) -> None:
        """Record the result of the health check before the start."""
        if self._recorder is not None:
            self._recorder.event("health_check", **health.fields, text=health.text)
            for warning in health.warnings:
                self.message(warning, "warning")

    def finish(self, outcome: str) -> None:
        """Wait for pending saves and record the end.

        Raises:
            WanmaError: the last state could not be saved.
        """
        if self._resumed_step == self.state.step and self._resumed.source in ("memory", "partner"):
            self.save()  # the earlier ranks had no room for it on disk
        results = self._wait_for_saves()
        failure = failure_of_last_save([self._failed_save, *results], self.state.step, outcome)
        self._snapshots.keep_if_unsaved(failure is not None)
        if failure is not None:
            raise failure
        self._report_saves(results)
        self._uploads.finish(self.state.step, outcome, self.message)
        if self._recorder is not None:
            state = self.state
            self._recorder.event("finish", step=state.step, outcome=outcome, best_loss=state.best_loss)

    # ---------------------------------------------------------------- inside

    def _apply_late(self, sites: BetweenSites, agreement: Agreement, rate: float, is_last: bool) -> None:
        """Apply further gradients that have arrived from the sites: at the end of a job, all pending ones."""
        state = self.state
        while (summed := sites.late(is_last)) is not None:
            again = agree_again(agreement, state.updater, self.grid, summed)
            if apply_update(again, state.updater, self.job.train, rate, state.scale):
                if state.average is not None:
                    state.average.update()
            else:
                self.message(f"late gradients of norm {again.gradient_norm} are left out", "warning")

    def _what_is_left_out(self, agreement: Agreement, loss_sum: Tensor) -> str:
        """Return why policy leaves the update out; empty where it is made, or fp16's loss scale decides.

        Raises:
            AgreedError: the policy is another; the same on all ranks.
        """
        state, train, step = self.state, self.job.train, self.state.step + 1
        policy: Policy = train.non_finite
        if agreement.is_finite:
            policy, key = train.spike, "train.spike"
            if policy == "ignore":
                return ""
            wrong = state.anomalies.what_is_wrong(
                agreement.loss, agreement.gradient_norm, train.spike_deviations
            )
        elif state.scale.value > SMALLEST and math.isfinite(agreement.loss):
            return ""
        else:
            key = "train.non_finite"
            wrong = what_is_not_finite(agreement, loss_sum, state.updater, self.grid, self.broken())
        if wrong:
            check_policy(step, wrong, policy, key, self._retried_steps)
            state.anomalies.skip(step)
        return wrong

    def _tell_recovery(self) -> None:
        """Record a failure and its cost, once, when the first step after it is finished."""
        if self._restart is None or self._recorder is None:
            return
        restart, self._restart = self._restart, None
        tell_recovery(self._recorder, restart, self._resumed.source, self._resumed_step)

    def _wait_for_saves(self) -> list[SaveResult]:
        """Wait for pending saves, with signs of life: a slow disk is no hang."""
        results: list[SaveResult] = []
        while self._checkpointer.is_saving:
            self.worker.control.progress(self.state.step, "waiting for a checkpoint to be written")
            results += self._checkpointer.wait(WAIT_SECONDS)
        return results + self._checkpointer.wait()

    def _report_saves(self, results: list[SaveResult], goes_on: str = "; training goes on") -> None:
        for result in results:
            if result.error is not None:
                self._failed_save = result
                self.message(str(WanmaError(result.error.message + goes_on, result.error.hint)), "error")
            elif self._recorder is not None:
                self._recorder.event(
                    "checkpoint",
                    step=result.step,
                    bytes=result.whole_bytes,
                    stall_seconds=result.stall_seconds + self._waited_seconds,
                    write_seconds=result.write_seconds + result.commit_seconds,
                )
            if result.path is not None:
                self._uploads.wake(result.step)
