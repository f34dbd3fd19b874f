"""When a run's snapshots are taken: as often as the job says, or as costs next to nothing.

settle          before a step's ranks agree: no rank overwrites what another still needs
shared, agreed  what ranks tell each other about it, within the all-reduce that every step has
step_ended      begins the next snapshot where it is due
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
"""By which an interval is longer than it had to be as it is chosen, so that it stays."""
_UNUSUAL = 2
"""First snapshots, one into each image: memory that nobody has touched before is slow."""
LONGEST_WAIT_SECONDS = 1.0
"""For partner nodes, where the job says how often snapshots are taken; and not longer than a step."""
EVERY = "snapshots_every"
"""In the state that a snapshot holds: the interval as ranks that go on from it find it."""
_COSTS, _STEPS = 5, 20
"""How many of the last ones count."""
_COMPARED = 5
"""Steps without an exchange that are made early on, two after each exchange, to know what one costs."""
_NOTICED = 1.02
"""Ratio of step times, with an exchange to without, from which on the difference is its cost."""


class Interval:
    """Steps between snapshots, such that they cost next to nothing (`steps_between`); one until then."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps

    def consider(self, cost_seconds: float, step_seconds: float, least: int = 1) -> bool:
        """Choose anew; returns whether the interval is another now.

        It is lengthened where it is too short, and shortened where half of it would do.

        Args:
            cost_seconds: of a snapshot.
            step_seconds: of a step without one.
            least: steps that the interval has at any cost.
        """
        needed = max(steps_between(cost_seconds, step_seconds), least)
        if self.steps is not None and self.steps / 2 <= needed <= self.steps:
            return False
        before, self.steps = self.steps, max(round(_MARGIN * needed), 1)
        return self.steps != before


class Exchanges:
    """Cost of sending copies to a partner node: steps that go on beside it take longer.

    They share cores and the network with it. All ranks see the same steps, and so count alike.
    """

    def __init__(self) -> None:
        self.processor_seconds = 0.0
        """Seconds of a core that the newest one took, where training computes on the same cores."""
        self.steps_since = 0
        """Steps that ended without one since the newest."""
        self.is_news = False
        """One ended in the newest step."""
        self._ended: deque[tuple[float, int]] = deque(maxlen=_COSTS)
        """Of the newest ones: seconds and number of the steps beside each."""
        self._count: int | None = None
        """Steps so far beside the one under way; None: none is."""
        self._seconds = 0.0
        """Seconds of these."""

    def begin(self) -> None:
        self._count, self._seconds = 0, 0.0

    def step_ended(self, seconds: float, goes_on: bool) -> bool:
        """Note a step; returns whether an exchange was under way.

        Args:
            goes_on: one is under way at its end.
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
        """Cost of one exchange: what training loses, and at least the cores' time.

        Args:
            step_seconds: of a step without one; 0: not known yet.
        """
        return max(self.lost_seconds(step_seconds), self.processor_seconds)

    def lost_seconds(self, step_seconds: float) -> float:
        """Seconds by which the steps beside one exchange are longer, all together; 0 where that may be noise.

        Of each exchange all steps count: over a slow link some may be much longer, and most not at all.
        """
        if not self._ended or step_seconds <= 0:
            return 0.0
        longer = median(seconds - steps * step_seconds for seconds, steps in self._ended)
        steps = median(steps for _, steps in self._ended)
        return longer if longer > (_NOTICED - 1) * step_seconds * steps else 0.0

    @property
    def least_steps(self) -> int:
        """Fewest steps from one to the next with which also a cost that nobody notices keeps to its share.

        A step beside one may then be longer by up to `_NOTICED`: only so many of all steps are beside one.
        """
        if not self._ended:
            return 1
        steps = median(steps for _, steps in self._ended)
        return math.ceil(round(steps * (_NOTICED - 1) / COST_SHARE, 6))


class StepSnapshots:
    """One rank's snapshots of a run; nothing where nobody would keep them, or the job wants none.

    Args:
        replicas: ranks of this pipeline stage.
        compare: raises if ranks differ that should not. All ranks call it together, before each snapshot.
        every: steps between the snapshots of the ranks before this recovery; None: not known.

    Raises:
        JobError: the job asks for snapshots that this plan cannot have.
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
        """What to tell the user at the start."""
        self._plan, self._worker, self._state = plan, worker, state
        self._replicas, self._identity, self._compare = replicas, identity, compare
        self._fixed = job.checkpoint.snapshots if isinstance(job.checkpoint.snapshots, int) else None
        self._interval = Interval(every)
        self._last_step = state.step
        if worker.restart is not None and worker.restart.kept_step is not None:
            # The images hold a later step, which a run that fails for good leaves behind.
            self._last_step = max(state.step, worker.restart.kept_step - 1)
        self._buffers = frozenset(f"model.{name}" for name, _ in state.parallel.named_buffers())
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)
        """Seconds of steps beside which nothing went to a partner node."""
        self._exchanges = Exchanges()
        self._taken = 0
        self._compare_seconds = 0.0
        """Of the newest snapshot."""
        self._hidden_seconds = 0.0
        """Of the step under way, what the background took of the cores that compute."""
        self._is_news = False
        """A snapshot was settled in this step."""
        self._failure: WanmaError | None = None
        self._is_sending = False
        """Some rank has not ended its exchange with a partner node."""
        self._insists_on_partner = job.checkpoint.partner is True
        self._snapshots = self._open(job)

    def _open(self, job: Job) -> Snapshots | None:
        images, wanted = self._worker.images, job.checkpoint.snapshots
        if wanted == "off":
            if self._insists_on_partner:
                raise JobError(
                    "checkpoint.partner = true, but checkpoint.snapshots = 'off'",
                    "set checkpoint.snapshots = 'auto', or checkpoint.partner = 'auto'",
                )
            return None
        if images is None:
            if self._fixed is not None:
                self.notes.append(
                    f"checkpoint.snapshots = {wanted} has no effect: without a supervisor nobody keeps them"
                )
            return None
        if "disk" in (self._plan.offload_parameters, self._plan.offload_optimizer):
            reason = "this plan keeps state on disk, because memory has no room for it"
            if self._fixed is not None:
                raise JobError(
                    f"checkpoint.snapshots = {wanted}, but {reason}", "set checkpoint.snapshots = 'off'"
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
        """All ranks call it, or none does."""
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
        silence = timedelta(seconds=job.cluster.hang_seconds)
        group = dist.new_group(backend="gloo", timeout=silence, group_desc="partner")
        busy = None if self._fixed is not None else lambda: self._state.parallel.communication.is_busy
        return Partner(images, worker.rank, worker.ranks_by_node, group, busy)

    def settle(self) -> None:
        """Wait for the snapshot under way, before the ranks agree on a step and then change their state.

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
        """What this rank tells the others; each gets the sums. Nothing, on all of them, without snapshots."""
        if self._snapshots is None:
            return ()
        cost = median(self._costs) if self._costs else 0.0
        step = median(self._step_seconds) if self._step_seconds else 0.0
        partner = self._snapshots.partner
        cost += self._exchanges.cost_seconds(step) if self._costs else self._exchanges.lost_seconds(step)
        broken = partner is not None and bool(partner.problem)
        return cost, step, float(self._failure is not None), float(self._is_sending), float(broken)

    def agreed(self, sums: Sequence[float]) -> list[str]:
        """Act on what all ranks told, all of them alike; returns what to tell the user.

        Args:
            sums: over the ranks, of `shared`.

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
        """Begin a snapshot if one is due; nothing changes the state before the next `settle`.

        Args:
            seconds: of the step, without what it waited for snapshots and checkpoints.
            is_last: it leaves a checkpoint, and the ranks end.

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
            return  # until all nodes' copies of one step are whole, those of the step before are needed
        self._begin()

    def keep_now(self) -> bool:
        """Have a snapshot of the step that was just finished, whole on all ranks when this returns.

        All ranks call it, when no step is under way. False: there can be none, on some of them at least.
        """
        if self._snapshots is None:
            return False
        while self._snapshots.is_sending(1.0):  # until all nodes' copies of one step are whole
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
        """Have a snapshot of the last step if its checkpoint failed on any rank; all ranks call it."""
        if self._snapshots is not None and any(self._everyones("not saved" if failed else None)):
            self.keep_now()

    def close(self, seconds: float | None = None) -> None:
        """Leave the images as they are; one under way is finished first, or `seconds` waited for."""
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
                # What is left out of gradients changes in the next backward, before this is settled.
                changing=self._buffers | self._state.kept_of_gradients().keys(),
            )
        except WanmaError as error:
            self._fail(error)
            self._snapshots.leave_out()

    def _patience(self) -> float:
        """Seconds that a snapshot due after this step may wait for partner nodes to have the one before.

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
        """Return whether steps without an exchange are still wanted, to know what one costs."""
        has_partner = self._snapshots is not None and self._snapshots.partner is not None
        return self._fixed is None and has_partner and len(self._step_seconds) < _COMPARED

    @property
    def _every(self) -> int:
        """After a recovery, too, the first ones are taken step by step: what they cost is found out anew, and
        machines that are new hold copies at once."""
        return self._fixed or (self._interval.steps if self._costs else None) or 1

    def _note(self, taken: Taken) -> None:
        """What it cost. On CPUs the background computes on cores that training would have."""
        self._taken += 1
        self._is_news = True
        if self._plan.device == "cpu":
            self._hidden_seconds = max(taken.processor_seconds - taken.settle_seconds, 0.0)
            if self._snapshots is not None and self._snapshots.partner is not None:
                # For the one before: this one's goes on.
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
                "set checkpoint.snapshots = 'off', use more machines, or shard the state (parallel.shard)",
            )

    def _fail(self, error: WanmaError) -> None:
        if self._fixed is not None:
            raise error
        self._failure = error

    def _drop_partner(self) -> str:
        """All ranks call it together, because the exchange of some broke off."""
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
        """All ranks call it together, because some could not."""
        reasons = self._everyones(self._failure.message if self._failure is not None else None)
        self.close()
        reason = next(reason for reason in reasons if reason is not None)
        return _without(f"no more snapshots in memory: {reason}")


def _without(text: str) -> str:
    return f"{text}; after a failure the run goes back to its newest checkpoint"


def layout_of(plan: Plan, worker: Worker) -> str:
    """What decides which rank holds what, and which of those that hold the same keeps it."""
    everywhere = plan.but(threads_per_rank=0, compile=False)  # these are each machine's own affair
    return f"{everywhere!r} on nodes of {worker.ranks_by_node} ranks"
