"""Schedule of a run's in-memory checkpoints: the job's interval, or one that costs next to nothing.

settle          before a step's ranks agree: no rank overwrites what another still needs
shared, agreed  status that ranks exchange within the all-reduce that every step has
step_ended      begins the next in-memory checkpoint where it is due
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import psutil
import torch.distributed as dist

from wanma.checkpoint.in_memory.in_memory_checkpointer import Snapshots, Taken
from wanma.checkpoint.in_memory.partner_replication import Partner
from wanma.hardware.discovery.resource_limits import usable_memory_bytes
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Images, Worker
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.memory.in_memory_checkpoints import COST_SHARE, steps_between
from wanma.training.checkpointing.run_identity import Identity
from wanma.training.checkpointing.training_state import TrainingState, random_state

_MARGIN = 1.2
"""Factor by which a new interval exceeds the needed one, so that it stays."""
_UNUSUAL = 2
"""Number of first in-memory checkpoints whose cost does not count: untouched memory is slow."""
LONGEST_WAIT_SECONDS = 1.0
"""Longest wait in seconds for partner nodes, where the job fixes the interval; and no longer than a step."""
EVERY = "snapshots_every"
"""Key of the interval in the state of an in-memory checkpoint, read by ranks that resume from it."""
_COSTS, _STEPS = 5, 20
"""Numbers of newest costs and of newest step times that count."""
_COMPARED = 5
"""Number of early steps without an exchange, two after each exchange, from which its cost is known."""
_NOTICED = 1.02
"""Ratio of step times, with an exchange to without, above which the difference is its cost."""


class Interval:
    """Interval between in-memory checkpoints, in steps, at which they cost next to nothing; 1 until known."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps

    def consider(self, cost_seconds: float, step_seconds: float, least: int = 1) -> bool:
        """Choose the interval anew; return whether it has changed.

        It is lengthened where it is too short, and shortened where half of it would do.

        Args:
            cost_seconds: seconds of an in-memory checkpoint.
            step_seconds: seconds of a step without one.
            least: shortest interval in steps, at any cost.
        """
        needed = max(steps_between(cost_seconds, step_seconds), least)
        if self.steps is not None and self.steps / 2 <= needed <= self.steps:
            return False
        before, self.steps = self.steps, max(round(_MARGIN * needed), 1)
        return self.steps != before


class Exchanges:
    """Cost of the exchange with a partner node: steps beside it take longer.

    They share cores and the network with it. All ranks see the same steps, and so count alike.
    """

    def __init__(self) -> None:
        self.processor_seconds = 0.0
        """Core seconds of the newest exchange, where training computes on the same cores."""
        self.steps_since = 0
        """Number of steps without an exchange since the newest one."""
        self.is_news = False
        """True if an exchange ended in the newest step."""
        self._ended: deque[tuple[float, int]] = deque(maxlen=_COSTS)
        """Seconds and number of the steps beside each of the newest exchanges."""
        self._count: int | None = None
        """Number of steps so far beside the current exchange; None without one."""
        self._seconds = 0.0
        """Seconds of the steps beside the current exchange."""

    def begin(self) -> None:
        self._count, self._seconds = 0, 0.0

    def step_ended(self, seconds: float, goes_on: bool) -> bool:
        """Note a step; return whether an exchange was in progress.

        Args:
            seconds: seconds of the step.
            goes_on: true if an exchange is in progress at its end.
        """
        self.is_news = False
        if self._count is None:
            self.steps_since += 1
            return False
        self.steps_since = 0
        self._count += 1
        self._seconds += seconds
        if not goes_on:
            self._ended.append((self._seconds, self._count))
            self._count, self.is_news = None, True
        return True

    def cost_seconds(self, step_seconds: float) -> float:
        """Return the cost of one exchange in seconds: training's loss, and at least the core seconds.

        Args:
            step_seconds: seconds of a step without one; 0: not known yet.
        """
        return max(self.lost_seconds(step_seconds), self.processor_seconds)

    def lost_seconds(self, step_seconds: float) -> float:
        """Return the seconds that one exchange adds to the steps beside it in total; 0 where it may be noise.

        Of each exchange all steps count: over a slow link some may be much longer, and most not at all.
        """
        if not self._ended or step_seconds <= 0:
            return 0.0
        longer = median(seconds - steps * step_seconds for seconds, steps in self._ended)
        steps = median(steps for _, steps in self._ended)
        return longer if longer > (_NOTICED - 1) * step_seconds * steps else 0.0

    @property
    def least_steps(self) -> int:
        """Fewest steps from one exchange to the next that keep even an unnoticed cost within its share.

        A step beside one may then be longer by up to `_NOTICED`: only so many of all steps are beside one.
        """
        if not self._ended:
            return 1
        steps = median(steps for _, steps in self._ended)
        return math.ceil(round(steps * (_NOTICED - 1) / COST_SHARE, 6))


class StepSnapshots:
    """Maker of one rank's in-memory checkpoints; none where nobody would keep them, or the job wants none.

    Args:
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        state: training state.
        replicas: ranks of this pipeline stage.
        identity: identity of the run.
        compare: raises if ranks differ that should not. All ranks call it together, before each checkpoint.
        every: interval of the ranks before this recovery, in steps; None: not known.

    Raises:
        JobError: the job asks for in-memory checkpoints that this plan cannot have.
        WanmaError: the memory for them cannot be opened.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: Worker,
        state: TrainingState,
        *,
        replicas: Sequence[int],
        identity: Identity,
        compare: Callable[[], None],
        every: int | None = None,
    ) -> None:
        self.notes: list[str] = []
        """Messages for the user at the start."""
        self._plan, self._worker, self._state = plan, worker, state
        self._replicas, self._identity, self._compare = replicas, identity, compare
        self._fixed = (
            job.checkpoint.in_memory_every_steps
            if isinstance(job.checkpoint.in_memory_every_steps, int)
            else None
        )
        self._interval = Interval(every)
        self._last_step = state.step
        if worker.restart is not None and worker.restart.kept_step is not None:
            # The memory files hold a later step, which a run that fails for good leaves behind.
            self._last_step = max(state.step, worker.restart.kept_step - 1)
        self._buffers = frozenset(f"model.{name}" for name, _ in state.parallel.named_buffers())
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)
        """Seconds of steps beside which nothing was sent to a partner node."""
        self._exchanges = Exchanges()
        self._taken = 0
        self._compare_seconds = 0.0
        """Seconds of the replica check before the newest in-memory checkpoint."""
        self._hidden_seconds = 0.0
        """Seconds by which the background used the computing cores in the current step."""
        self._is_news = False
        """True if an in-memory checkpoint was completed in this step."""
        self._failure: WanmaError | None = None
        self._is_sending = False
        """True if some rank has not ended its exchange with a partner node."""
        self._insists_on_partner = job.checkpoint.partner is True
        self._snapshots = self._open(job)

    def _open(self, job: Job) -> Snapshots | None:
        images, wanted = self._worker.images, job.checkpoint.in_memory_every_steps
        if wanted == "off":
            if self._insists_on_partner:
                raise JobError(
                    "checkpoint.partner = true, but checkpoint.in_memory_every_steps = 'off'",
                    "set checkpoint.in_memory_every_steps = 'auto', or checkpoint.partner = 'auto'",
                )
            return None
        if images is None:
            if self._fixed is not None:
                self.notes.append(
                    f"checkpoint.in_memory_every_steps = {wanted} has no effect: without a supervisor nobody "
                    "keeps them"
                )
            return None
        if "disk" in (self._plan.offload_parameters, self._plan.offload_optimizer):
            reason = "this plan keeps state on disk, because memory has no room for it"
            if self._fixed is not None:
                raise JobError(
                    f"checkpoint.in_memory_every_steps = {wanted}, but {reason}",
                    "set checkpoint.in_memory_every_steps = 'off'",
                )
            self.notes.append(
                f"no snapshots in memory: {reason}; a failure goes back to the newest checkpoint"
            )
            return None
        worker = self._worker
        return Snapshots(
            partner=self._open_partner(job, images),
            images=images,
            rank=worker.rank,
            world_size=worker.world_size,
            generation=worker.generation,
            replicas=self._replicas,
            node_ranks=worker.node_ranks,
            layout=layout_of(self._plan, worker),
        )

    def _open_partner(self, job: Job, images: Images) -> Partner | None:
        """Open the exchange with a partner node; all ranks call it, or none does."""
        worker = self._worker
        if len(worker.ranks_by_node) < 2:
            if self._insists_on_partner:
                raise JobError(
                    "checkpoint.partner = true, but the run is on one node, which has no partner",
                    "set cluster.nodes, or checkpoint.partner = 'auto'",
                )
            return None
        if job.checkpoint.partner is False:
            return None
        silence = timedelta(seconds=job.cluster.hang_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=silence, group_desc="partner")
        busy = None if self._fixed is not None else lambda: self._state.parallel.communication.is_busy
        return Partner(images, worker.rank, worker.ranks_by_node, group, busy)

    def settle(self) -> None:
        """Complete the pending in-memory checkpoint, before the ranks agree on a step and change their state.

        Raises:
            WanmaError: it failed, and the job insists.
        """
        self._hidden_seconds, self._is_news = 0.0, False
        if self._snapshots is None:
            return
        try:
            taken = self._snapshots.settle()
        except WanmaError as error:
            self._fail(error)
            return
        if taken is not None:
            self._note(taken)
        self._is_sending = self._snapshots.is_sending(self._patience())

    def shared(self) -> tuple[float, ...]:
        """Return the numbers that this rank adds to the step's all-reduce; empty where it is disabled."""
        if self._snapshots is None:
            return ()
        cost = median(self._costs) if self._costs else 0.0
        step = median(self._step_seconds) if self._step_seconds else 0.0
        partner = self._snapshots.partner
        cost += self._exchanges.cost_seconds(step) if self._costs else self._exchanges.lost_seconds(step)
        broken = partner is not None and bool(partner.problem)
        return cost, step, float(self._failure is not None), float(self._is_sending), float(broken)

    def agreed(self, sums: Sequence[float]) -> list[str]:
        """Act on the sums of all ranks' numbers, alike on each; return messages for the user.

        Args:
            sums: sums of `shared` over the ranks.

        Raises:
            WanmaError: the exchange with partner nodes broke off, and the job insists on it.
        """
        if self._snapshots is None:
            return []
        cost, step, failures, sending, broken = (total / self._worker.world_size for total in sums)
        self._is_sending = sending > 0
        if failures:
            return [self._turn_off()]
        dropped = [self._drop_partner()] if broken else []
        return dropped + self._set_interval(cost, step)

    def _set_interval(self, cost: float, step: float) -> list[str]:
        is_news = self._is_news or self._exchanges.is_news
        if self._fixed is not None or not is_news or cost <= 0 or step <= 0:
            return []
        if not self._interval.consider(cost, step, self._exchanges.least_steps):
            return []
        every = self._interval.steps or 1
        return [
            f"snapshots in memory: every {f'{every} steps' if every > 1 else 'step'} "
            f"({duration_text(cost)} beside {duration_text(step)} a step: {cost / (every * step):.2%})"
        ]

    def step_ended(self, seconds: float, is_last: bool) -> None:
        """Begin an in-memory checkpoint if one is due; the state must not change before the next `settle`.

        Args:
            seconds: seconds of the step, without waits for in-memory checkpoints and checkpoints.
            is_last: true if it leaves a checkpoint, and the ranks end.

        Raises:
            WanmaError: there can be none, and the job insists; or ranks differ.
        """
        if self._snapshots is None:
            return
        alone = max(seconds - self._hidden_seconds, 0.0)
        if not self._exchanges.step_ended(alone, self._is_sending):
            self._step_seconds.append(alone)
        step = self._state.step
        if is_last or step < self._last_step + self._every:
            return
        if self._compares and self._exchanges.steps_since < 2:
            return
        if self._is_sending:
            return  # older copies are needed until all nodes have complete new ones
        self._begin()

    def keep_now(self) -> bool:
        """Make an in-memory checkpoint of the step just finished, complete on all ranks on return.

        All ranks call it, between two steps.

        Returns:
            False if some rank can have none.
        """
        if self._snapshots is None:
            return False
        while self._snapshots.is_sending(1.0):  # until all nodes' copies of one step are complete
            self._worker.control.progress(self._state.step, "waiting for partner nodes")
        if self._worker.world_size > 1:
            dist.barrier()
        self._begin()
        try:
            self._snapshots.settle()
        except WanmaError as error:
            self._fail(error)
        reason = self._failure.message if self._failure is not None else None
        return all(one is None for one in self._everyones(reason))

    def keep_if_unsaved(self, failed: bool) -> None:
        """Make an in-memory checkpoint if any rank's last save on disk failed; all ranks call it."""
        if self._snapshots is not None and any(self._everyones("not saved" if failed else None)):
            self.keep_now()

    def close(self, seconds: float | None = None) -> None:
        """Close the memory files; finish the pending in-memory checkpoint first, or wait `seconds` for it."""
        if self._snapshots is not None:
            self._snapshots.close(seconds)
            self._snapshots = None

    # ---------------------------------------------------------------- inside

    def _begin(self) -> None:
        assert self._snapshots is not None
        step = self._last_step = self._state.step
        if self._snapshots.partner is not None:
            self._exchanges.begin()
        began = time.perf_counter()
        self._compare()
        self._compare_seconds = time.perf_counter() - began
        if self._failure is not None:
            return
        tensors = self._state.tensors()
        try:
            if not self._taken:
                self._require_memory(self._snapshots.bytes_to_take(tensors))
            self._snapshots.begin(
                step,
                tensors,
                {**self._state.values(), **self._identity.values(), EVERY: self._interval.steps},
                {"random": random_state()},
                # The error feedback changes in the next backward, before this checkpoint is complete.
                changing=self._buffers | self._state.kept_of_gradients().keys(),
            )
        except WanmaError as error:
            self._fail(error)
            self._snapshots.leave_out()

    def _patience(self) -> float:
        """Return the seconds that a due in-memory checkpoint may wait for partner nodes to have the last one.

        Where the job leaves the interval open, the next step will do as well.
        """
        if (
            self._fixed is None
            or not self._step_seconds
            or self._state.step + 1 < self._last_step + self._fixed
        ):
            return 0.0
        return min(median(self._step_seconds), LONGEST_WAIT_SECONDS)

    @property
    def _compares(self) -> bool:
        """Need of more steps without an exchange, to know the cost of one."""
        has_partner = self._snapshots is not None and self._snapshots.partner is not None
        return self._fixed is None and has_partner and len(self._step_seconds) < _COMPARED

    @property
    def _every(self) -> int:
        """Interval in steps that is in force.

        After a recovery, too, the first in-memory checkpoints are made step by step: their cost is measured
        anew, and new nodes hold copies at once.
        """
        return self._fixed or (self._interval.steps if self._costs else None) or 1

    def _note(self, taken: Taken) -> None:
        """Record the cost of an in-memory checkpoint.

        On CPUs the background computes on cores that training would have.
        """
        self._taken += 1
        self._is_news = True
        if self._plan.device == "cpu":
            self._hidden_seconds = max(taken.processor_seconds - taken.settle_seconds, 0.0)
            if self._snapshots is not None and self._snapshots.partner is not None:
                # Of the previous exchange: this one is still in progress.
                self._exchanges.processor_seconds = self._snapshots.partner.processor_seconds
        if self._taken > _UNUSUAL:
            seconds = self._compare_seconds + taken.begin_seconds + taken.settle_seconds
            self._costs.append(seconds + self._hidden_seconds)

    def _require_memory(self, needed: int) -> None:
        needed *= self._worker.local_world_size
        free = min(psutil.virtual_memory().available, usable_memory_bytes())
        if needed > free:
            raise WanmaError(
                f"snapshots of this node's ranks take {bytes_text(needed)} of memory, of which "
                f"{bytes_text(free)} are free",
                "set checkpoint.in_memory_every_steps = 'off', use more machines, or shard the state "
                "(parallel.shard)",
            )

    def _fail(self, error: WanmaError) -> None:
        if self._fixed is not None:
            raise error
        self._failure = error

    def _drop_partner(self) -> str:
        """Stop the exchange with partner nodes, after that of some broke off; all ranks call it together."""
        assert self._snapshots is not None
        mine = self._snapshots.partner.problem if self._snapshots.partner is not None else ""
        self._snapshots.drop_partner()
        reason = next(filter(None, self._everyones(mine or None)))
        text = f"no more copies of snapshots on partner nodes: {reason}"
        if self._insists_on_partner:
            raise WanmaError(text, "without checkpoint.partner = true the run would go on without them")
        return f"{text}; after the loss of a node the run goes back to its newest checkpoint"

    def _everyones(self, mine: str | None) -> list[str | None]:
        reasons: list[str | None] = [mine] * self._worker.world_size
        if self._worker.world_size > 1:
            dist.all_gather_object(reasons, mine)
        return reasons

    def _turn_off(self) -> str:
        """Stop in-memory checkpoints; all ranks call it together, because some rank could make none."""
        reasons = self._everyones(self._failure.message if self._failure is not None else None)
        self.close()
        reason = next(reason for reason in reasons if reason is not None)
        return _without(f"no more snapshots in memory: {reason}")


def _without(text: str) -> str:
    return f"{text}; after a failure the run goes back to its newest checkpoint"


def layout_of(plan: Plan, worker: Worker) -> str:
    """Return the layout key: text that decides which rank holds which part, and which of equals keeps it."""
    everywhere = plan.but(threads_per_rank=0, compile=False)  # each node has its own
    return f"{everywhere!r} on nodes of {worker.ranks_by_node} ranks"
