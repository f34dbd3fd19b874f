"""Schedule of a run's in-memory checkpoints: the job's interval, or one that costs next to nothing.

finish_pending                     before a step's ranks agree: no rank overwrites what another still needs
local_status, apply_global_status  status that ranks exchange within the all-reduce that every step has
start_if_due                       begins the next in-memory checkpoint where it is due
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import psutil
import torch.distributed as dist

from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer, InMemoryCheckpointResult
from wanma.checkpoint.in_memory.partner_replication import PartnerReplicator
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import usable_memory_bytes
from wanma.job.run.worker import MemoryFilePaths, WorkerContext
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.cost.offload import keeps_state_on_disk
from wanma.training.checkpointing.in_memory_interval import COST_HISTORY, AdaptiveInterval, ReplicationCost
from wanma.training.checkpointing.run_identity import Identity
from wanma.training.checkpointing.training_state import TrainingState, random_state

_UNTOUCHED_COST = 4.0
"""Cost of an in-memory checkpoint in new memory, relative to later ones; measured with 1 GB a rank."""
MAX_PARTNER_WAIT_SECONDS = 1.0
"""Longest wait in seconds for partner nodes, where the job fixes the interval; and no longer than a step."""
INTERVAL_KEY = "snapshots_every"
"""Key of the interval in the state of an in-memory checkpoint, read by ranks that resume from it."""
_STEP_HISTORY = 20
"""Number of newest step times that count."""
_BASELINE_STEPS = 5
"""Number of early steps without an exchange, two after each exchange, from which its cost is known."""


class InMemoryCheckpoints:
    """Maker of one rank's in-memory checkpoints; none without a supervisor, or if the job disables them.

    Args:
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        state: training state.
        replicas: ranks of this pipeline stage.
        identity: identity of the run.
        check_replicas: raises if ranks differ that should not. All ranks call it together, before each
            checkpoint.
        interval_steps: interval of the ranks before this recovery, in steps; None: not known.

    Raises:
        JobError: the job asks for in-memory checkpoints that this plan cannot have.
        WanmaError: the memory for them cannot be opened.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: WorkerContext,
        state: TrainingState,
        *,
        replicas: Sequence[int],
        identity: Identity,
        check_replicas: Callable[[], None],
        interval_steps: int | None = None,
    ) -> None:
        self.messages: list[str] = []
        """Messages for the user at the start."""
        self._plan, self._worker, self._state = plan, worker, state
        self._replicas, self._identity, self._check_replicas = replicas, identity, check_replicas
        self._fixed_interval = (
            job.checkpoint.in_memory_every_steps
            if isinstance(job.checkpoint.in_memory_every_steps, int)
            else None
        )
        self._interval = AdaptiveInterval(interval_steps)
        self._last_step = state.step
        if worker.restart is not None and worker.restart.retained_step is not None:
            # The memory files hold a later step, which a run that fails for good leaves behind.
            self._last_step = max(state.step, worker.restart.retained_step - 1)
        self._buffers = frozenset(f"model.{name}" for name, _ in state.parallel_model.named_buffers())
        self._costs: deque[float] = deque(maxlen=COST_HISTORY)
        self._estimated_costs: list[float] = []
        """Costs to expect after those in new memory, until one is known."""
        self._step_seconds: deque[float] = deque(maxlen=_STEP_HISTORY)
        """Seconds of steps beside which nothing was sent to a partner node; where the interval is open,
        without the first step and those beside a copy, which slows down more than its own core."""
        self._replication_cost = ReplicationCost()
        self._completed_count = 0
        self._replica_check_seconds = 0.0
        """Seconds of the replica check before the newest in-memory checkpoint."""
        self._background_seconds = 0.0
        """Seconds by which the background used the computing cores in the current step."""
        self._has_new_cost = False
        """True if an in-memory checkpoint was completed in this step."""
        self._failure: WanmaError | None = None
        self._is_replication_pending = False
        """True if some rank has not ended its exchange with a partner node."""
        self._requires_partner = job.checkpoint.partner is True
        self._checkpointer = self._open(job)

    def _open(self, job: Job) -> InMemoryCheckpointer | None:
        memory_files, setting = self._worker.memory_files, job.checkpoint.in_memory_every_steps
        if setting == "off":
            if self._requires_partner:
                raise JobError(
                    "checkpoint.partner = true, but checkpoint.in_memory_every_steps = 'off'",
                    "set checkpoint.in_memory_every_steps = 'auto', or checkpoint.partner = 'auto'",
                )
            return None
        if memory_files is None:
            if self._fixed_interval is not None:
                self.messages.append(
                    f"checkpoint.in_memory_every_steps = {setting} has no effect: a run without a "
                    "supervisor keeps no in-memory checkpoints"
                )
            return None
        if keeps_state_on_disk(self._plan):
            reason = "the plan keeps state on disk, because it does not fit in memory"
            if self._fixed_interval is not None:
                raise JobError(
                    f"checkpoint.in_memory_every_steps = {setting}, but {reason}",
                    "set checkpoint.in_memory_every_steps = 'off'",
                )
            self.messages.append(
                f"in-memory checkpoints are disabled: {reason}; recovery from a failure uses the "
                "newest checkpoint on disk"
            )
            return None
        worker = self._worker
        return InMemoryCheckpointer(
            replicator=self._open_partner(job, memory_files),
            memory_files=memory_files,
            rank=worker.rank,
            world_size=worker.world_size,
            generation=worker.generation,
            replicas=self._replicas,
            node_ranks=worker.node_ranks,
            layout=layout_key(self._plan, worker),
        )

    def _open_partner(self, job: Job, memory_files: MemoryFilePaths) -> PartnerReplicator | None:
        """Open the exchange with a partner node; all ranks call it, or none does."""
        worker = self._worker
        if len(worker.local_world_sizes) < 2:
            if self._requires_partner:
                raise JobError(
                    "checkpoint.partner = true, but the run is on one node, which has no partner",
                    "set cluster.nodes, or checkpoint.partner = 'auto'",
                )
            return None
        if job.checkpoint.partner is False:
            return None
        silence = timedelta(seconds=job.cluster.hang_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=silence, group_desc="partner")
        busy = (
            None
            if self._fixed_interval is not None
            else lambda: self._state.parallel_model.communication_timer.is_busy
        )
        return PartnerReplicator(memory_files, worker.rank, worker.local_world_sizes, group, busy)

    def finish_pending(self) -> None:
        """Complete the pending in-memory checkpoint, before the ranks agree on a step and change their state.

        Raises:
            WanmaError: it failed, and the job insists.
        """
        self._background_seconds, self._has_new_cost = 0.0, False
        if self._checkpointer is None:
            return
        try:
            copied = self._checkpointer.wait_for_copy()
        except WanmaError as error:
            self._record_failure(error)
            return
        if copied is not None:
            self._record_cost(copied)
        self._is_replication_pending = self._checkpointer.is_replicating(self._partner_wait_seconds())

    def local_status(self) -> tuple[float, ...]:
        """Return the numbers that this rank adds to the step's all-reduce; empty where it is disabled."""
        if self._checkpointer is None:
            return ()
        costs = self._costs or self._estimated_costs
        cost = median(costs) if costs else 0.0
        step = median(self._step_seconds) if self._step_seconds else 0.0
        partner = self._checkpointer.replicator
        cost += (
            self._replication_cost.cost_seconds(step)
            if costs
            else self._replication_cost.slowdown_seconds(step)
        )
        broken = partner is not None and bool(partner.failure_reason)
        return (
            cost,
            step,
            float(self._failure is not None),
            float(self._is_replication_pending),
            float(broken),
        )

    def apply_global_status(self, sums: Sequence[float]) -> list[str]:
        """Act on the sums of all ranks' numbers, alike on each; return messages for the user.

        Args:
            sums: sums of `local_status` over the ranks.

        Raises:
            WanmaError: the exchange with partner nodes broke off, and the job insists on it.
        """
        if self._checkpointer is None:
            return []
        cost, step, failures, sending, broken = (total / self._worker.world_size for total in sums)
        self._is_replication_pending = sending > 0
        if failures:
            return [self._disable()]
        dropped = [self._stop_replication()] if broken else []
        return dropped + self._set_interval(cost, step)

    def _set_interval(self, cost: float, step: float) -> list[str]:
        is_news = self._has_new_cost or self._replication_cost.has_new_cost or self._interval.steps is None
        if self._fixed_interval is not None or not is_news or cost <= 0 or step <= 0:
            return []
        if not self._interval.update(cost, step, self._replication_cost.min_interval_steps):
            return []
        interval = self._interval.steps or 1
        return [
            f"in-memory checkpoint every {f'{interval} steps' if interval > 1 else 'step'}: "
            f"{duration_text(cost)} each, step {duration_text(step)}, overhead {cost / (interval * step):.2%}"
        ]

    def start_if_due(self, seconds: float, is_last: bool) -> None:
        """Begin an in-memory checkpoint if one is due; until `finish_pending` the state must not change.

        Args:
            seconds: seconds of the step, without waits for in-memory checkpoints and checkpoints.
            is_last: true if it leaves a checkpoint, and the ranks end.

        Raises:
            WanmaError: there can be none, and the job insists; or ranks differ.
        """
        if self._checkpointer is None:
            return
        undisturbed_seconds = max(seconds - self._background_seconds, 0.0)
        is_alone = not self._replication_cost.record_step(undisturbed_seconds, self._is_replication_pending)
        is_usual = self._completed_count > 0 and not self._has_new_cost
        if is_alone and (is_usual or self._fixed_interval is not None):
            self._step_seconds.append(undisturbed_seconds)
        step, interval = self._state.step, self._interval_steps
        if is_last or interval is None or step < self._last_step + interval:
            return
        if self._needs_baseline_steps and self._replication_cost.steps_since_replication < 2:
            return
        if self._is_replication_pending:
            return  # older copies are needed until all nodes have complete new ones
        self._begin()

    def checkpoint_now(self) -> bool:
        """Make an in-memory checkpoint of the step just finished, complete on all ranks on return.

        All ranks call it, between two steps.

        Returns:
            False if some rank can have none.
        """
        if self._checkpointer is None:
            return False
        while self._checkpointer.is_replicating(1.0):  # until all nodes' copies of one step are complete
            self._worker.supervisor_client.report_progress(self._state.step, "waiting for partner nodes")
        if self._worker.world_size > 1:
            dist.barrier()
        self._begin()
        try:
            self._checkpointer.wait_for_copy()
        except WanmaError as error:
            self._record_failure(error)
        reason = self._failure.message if self._failure is not None else None
        return all(text is None for text in self._gather_reasons(reason))

    def checkpoint_if_save_failed(self, failed: bool) -> None:
        """Make an in-memory checkpoint if any rank's last save on disk failed; all ranks call it."""
        if self._checkpointer is not None and any(self._gather_reasons("not saved" if failed else None)):
            self.checkpoint_now()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Close the memory files; first finish the pending checkpoint, or wait `timeout_seconds` for it."""
        if self._checkpointer is not None:
            self._checkpointer.close(timeout_seconds)
            self._checkpointer = None

    # ---------------------------------------------------------------- inside

    def _begin(self) -> None:
        assert self._checkpointer is not None
        step = self._last_step = self._state.step
        if self._checkpointer.replicator is not None:
            self._replication_cost.start()
        began = time.perf_counter()
        self._check_replicas()
        self._replica_check_seconds = time.perf_counter() - began
        if self._failure is not None:
            return
        tensors = self._state.checkpoint_tensors()
        try:
            if not self._completed_count:
                self._require_memory(self._checkpointer.required_bytes(tensors))
            self._checkpointer.start(
                step,
                tensors,
                {
                    **self._state.state_values(),
                    **self._identity.state_values(),
                    INTERVAL_KEY: self._interval.steps,
                },
                {"random": random_state()},
                # The error feedback changes in the next backward, before this checkpoint is complete.
                mutable_names=self._buffers | self._state.error_feedback_tensors().keys(),
            )
        except WanmaError as error:
            self._record_failure(error)
            self._checkpointer.skip()

    def _partner_wait_seconds(self) -> float:
        """Return the seconds that a due in-memory checkpoint may wait for partner nodes to have the last one.

        Where the job leaves the interval open, the next step will do as well.
        """
        if (
            self._fixed_interval is None
            or not self._step_seconds
            or self._state.step + 1 < self._last_step + self._fixed_interval
        ):
            return 0.0
        return min(median(self._step_seconds), MAX_PARTNER_WAIT_SECONDS)

    @property
    def _needs_baseline_steps(self) -> bool:
        """Need of more steps without an exchange, to know the cost of one."""
        has_partner = self._checkpointer is not None and self._checkpointer.replicator is not None
        return self._fixed_interval is None and has_partner and len(self._step_seconds) < _BASELINE_STEPS

    @property
    def _interval_steps(self) -> int | None:
        """Interval in steps that is in force; None: the cost is known, and the time of a step not yet.

        After a recovery, too, the first in-memory checkpoint is made at once: its cost is measured again, and
        new nodes hold one.
        """
        has_cost = self._costs or self._estimated_costs
        return self._fixed_interval or (self._interval.steps if has_cost else 1)

    def _record_cost(self, result: InMemoryCheckpointResult) -> None:
        """Record the cost of an in-memory checkpoint.

        On CPUs the background computes on cores that training would have.
        """
        self._completed_count += 1
        self._has_new_cost = True
        if self._plan.device == "cpu":
            self._background_seconds = max(result.cpu_seconds - result.wait_seconds, 0.0)
            if self._checkpointer is not None and self._checkpointer.replicator is not None:
                # Of the previous exchange: this one is still in progress.
                self._replication_cost.cpu_seconds = self._checkpointer.replicator.cpu_seconds
        seconds = self._replica_check_seconds + result.start_seconds + result.wait_seconds
        seconds += self._background_seconds
        if result.is_memory_new:
            self._estimated_costs.append(seconds / _UNTOUCHED_COST)
        else:
            self._costs.append(seconds)

    def _require_memory(self, needed: int) -> None:
        needed *= self._worker.local_world_size
        free = min(psutil.virtual_memory().available, usable_memory_bytes())
        if needed > free:
            raise WanmaError(
                f"the memory files of this node's ranks need {bytes_text(needed)}, but only "
                f"{bytes_text(free)} of memory are free",
                "set checkpoint.in_memory_every_steps = 'off', use more nodes, or shard the state "
                "(parallel.shard)",
            )

    def _record_failure(self, error: WanmaError) -> None:
        if self._fixed_interval is not None:
            raise error
        self._failure = error

    def _stop_replication(self) -> str:
        """Stop the exchange with partner nodes, after that of some broke off; all ranks call it together."""
        assert self._checkpointer is not None
        local_reason = (
            self._checkpointer.replicator.failure_reason if self._checkpointer.replicator is not None else ""
        )
        self._checkpointer.stop_replication()
        reason = next(filter(None, self._gather_reasons(local_reason or None)))
        text = f"partner copies of in-memory checkpoints are disabled: {reason}"
        if self._requires_partner:
            raise WanmaError(
                text, "set checkpoint.partner = 'auto' to continue the run without partner copies"
            )
        return f"{text}; recovery from a node failure uses the newest checkpoint on disk"

    def _gather_reasons(self, local_reason: str | None) -> list[str | None]:
        return all_gather_objects(local_reason, self._worker.world_size)

    def _disable(self) -> str:
        """Stop in-memory checkpoints; all ranks call it together, because some rank could make none."""
        reasons = self._gather_reasons(self._failure.message if self._failure is not None else None)
        self.close()
        reason = next(reason for reason in reasons if reason is not None)
        return _without(f"in-memory checkpoints are disabled: {reason}")


def _without(text: str) -> str:
    return f"{text}; recovery from a failure uses the newest checkpoint on disk"


def layout_key(plan: Plan, worker: WorkerContext) -> str:
    """Return the layout key: text that decides which rank holds which part, and which of equals keeps it."""
    common_plan = plan.with_changes(threads_per_rank=0, compile=False)  # each node has its own
    return f"{common_plan!r} on nodes of {worker.local_world_sizes} ranks"
