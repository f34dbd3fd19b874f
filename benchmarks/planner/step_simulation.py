"""Event simulation of a step of a placed plan, a reference for the forecasts of `heterogeneous.costs`.

Every replica runs every micro-batch in its true size through every stage; sends occupy links; gradients are
summed bucket by bucket, as backward and the slowest replica deliver them. The simulation shares the costs of
single operations with the forecasts, and none of their formulas for overlap.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from wanma.job.plan.placement import ReplicaPlacement
from wanma.job.plan.plan import Plan
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN
from wanma.planner.heterogeneous.costs import HeterogeneousCosts
from wanma.planner.heterogeneous.replica_pipeline import StageTime

BUCKETS_PER_STAGE = 24
"""Number of buckets in which a stage's gradients are summed and its weights gathered; DDP and FSDP use about
as many."""


def simulate_step(costs: HeterogeneousCosts, plan: Plan, global_batch: int) -> float:
    """Return the seconds of one simulated step of a placed plan.

    Raises:
        ValueError: the plan is not placed.
    """
    if not plan.placement:
        raise ValueError("the plan has no replica placement")
    return _Step(costs, plan, global_batch).run()


@dataclass
class _Task:
    """One piece of work of the simulation, in seconds."""

    seconds: float
    resource: object | None
    contended_resource: object | None
    """Resource whose use at the same time slows the task down by INTERFERENCE."""
    pending_count: int = 0
    successors: list[int] = field(default_factory=list)
    end: float = 0.0


class _TaskGraph:
    """Tasks that wait for each other and for resources, which serve one at a time, in order."""

    def __init__(self) -> None:
        self.tasks: list[_Task] = []

    def add(
        self,
        seconds: float,
        after: Sequence[int] = (),
        resource: object | None = None,
        contended_resource: object | None = None,
    ) -> int:
        """Add a task that starts after others; return its number."""
        number = len(self.tasks)
        self.tasks.append(_Task(seconds, resource, contended_resource, len(after)))
        for predecessor in after:
            self.tasks[predecessor].successors.append(number)
        return number

    def run(self) -> float:
        """Return the end of the last task, in seconds."""
        free_at: dict[object, float] = defaultdict(float)
        # (time, kind, number): ends (kind 0) come before starts (kind 1) of the same time.
        events = [(0.0, 1, number) for number, task in enumerate(self.tasks) if not task.pending_count]
        heapq.heapify(events)
        last = 0.0
        while events:
            now, kind, number = heapq.heappop(events)
            task = self.tasks[number]
            if kind == 0:
                last = max(last, now)
                for following in task.successors:
                    self.tasks[following].pending_count -= 1
                    if not self.tasks[following].pending_count:
                        heapq.heappush(events, (now, 1, following))
                continue
            begin = max(now, free_at[task.resource]) if task.resource is not None else now
            seconds = task.seconds
            if task.contended_resource is not None and free_at[task.contended_resource] > now:
                seconds += OVERLAP_SLOWDOWN * min(seconds, free_at[task.contended_resource] - now)
            if task.resource is not None:
                free_at[task.resource] = begin + seconds
            task.end = begin + seconds
            heapq.heappush(events, (task.end, 0, number))
        if any(task.pending_count for task in self.tasks):
            raise ValueError("the step waits for itself")
        return last


class _Step:
    """Tasks of one step of a placed plan."""

    def __init__(self, costs: HeterogeneousCosts, plan: Plan, global_batch: int) -> None:
        self.costs, self.plan, self.global_batch = costs, plan, global_batch
        self.events = _TaskGraph()
        # Tasks of all replicas that make each bucket's gradients, by group and stage.
        self.gradient_tasks: dict[tuple[int, int], list[list[int]]] = {}

    def run(self) -> float:
        """Create all tasks of the step; return its seconds."""
        data_rank = 0
        for number, replicas in enumerate(self.plan.placement):
            for stage in range(len(replicas.places)):
                self.gradient_tasks[number, stage] = [[] for _ in range(BUCKETS_PER_STAGE)]
            gathered = self._gather_weights(number, replicas)
            for _ in range(replicas.count):
                self._replica(number, data_rank, replicas, gathered)
                data_rank += 1
        self._sum_gradients()
        return self.events.run()

    def _gather_weights(self, number: int, replicas: ReplicaPlacement) -> list[list[int]]:
        """Add the gathers of weights updated in the step before; return them by stage and bucket."""
        gathers = []
        for stage, place in enumerate(replicas.places):
            part = self.costs.stage_times(replicas, self.plan.shard)[stage]
            seconds = self.costs.reduction_times(
                place, part, replicas.count, len(self.plan.placement), self.plan.shard
            ).gather_weights
            nic = ("network", number, stage)
            gathers.append(
                [self.events.add(seconds / BUCKETS_PER_STAGE, resource=nic) for _ in range(BUCKETS_PER_STAGE)]
            )
        return gathers

    def _replica(
        self, number: int, data_rank: int, replicas: ReplicaPlacement, gathered: list[list[int]]
    ) -> None:
        """Add one pipeline under 1F1B."""
        runs = self.plan.micro_batches(self.global_batch, data_rank)
        stages, last = len(replicas.places), len(replicas.places) - 1
        parts, sends = {}, {}
        for size in {len(run) for run in runs}:
            sized = ReplicaPlacement(replicas.count, replicas.places, size, replicas.recompute)
            pipeline = self.costs.replica_pipeline(sized, self.plan.shard, len(runs) > 1)
            parts[size], sends[size] = pipeline.stages, pipeline.send_seconds
        orders = [_order(stage, stages, len(runs)) for stage in range(stages)]
        tasks: dict[tuple[str, int, int], list[int]] = {}
        # Tasks are created after the tasks that they wait for.
        positions = [0] * stages
        while any(positions[stage] < len(orders[stage]) for stage in range(stages)):
            before = sum(positions)
            for stage in range(stages):
                while positions[stage] < len(orders[stage]):
                    kind, index = orders[stage][positions[stage]]
                    source = (kind, stage - 1 if kind == "forward" else stage + 1, index)
                    from_outside = stage > 0 if kind == "forward" else stage < last
                    if from_outside and source not in tasks:
                        break
                    after = []
                    size = len(runs[index])
                    if from_outside:
                        boundary = min(stage, source[1])
                        link = ("link", data_rank, boundary, kind)
                        after.append(
                            self.events.add(sends[size][boundary], [tasks[source][-1]], resource=link)
                        )
                    elif kind == "backward":
                        after.append(tasks["forward", stage, index][-1])
                    if positions[stage]:
                        previous = orders[stage][positions[stage] - 1]
                        after.append(tasks[previous[0], stage, previous[1]][-1])
                    part = parts[size][stage]
                    tasks[kind, stage, index] = self._operation(
                        kind, (number, stage), part, after, gathered[stage], index, len(runs)
                    )
                    positions[stage] += 1
            if sum(positions) == before:
                raise ValueError("the schedule waits for itself")

    def _operation(
        self,
        kind: str,
        place: tuple[int, int],
        part: StageTime,
        after: list[int],
        gathered: list[int],
        index: int,
        count: int,
    ) -> list[int]:
        """Add a forward or backward; return its tasks.

        The first forward is divided into buckets that wait for gathered weights, the last backward into
        buckets that make gradients.
        """
        nic = ("network", *place)
        seconds = part.forward if kind == "forward" else part.backward
        if (kind == "forward" and index > 0) or (kind == "backward" and index < count - 1):
            return [self.events.add(seconds, after)]
        pieces: list[int] = []
        for bucket in range(BUCKETS_PER_STAGE):
            waits = [*(pieces[-1:] or after)]
            if kind == "forward":
                waits.append(gathered[bucket])
            pieces.append(self.events.add(seconds / BUCKETS_PER_STAGE, waits, contended_resource=nic))
            if kind == "backward":
                self.gradient_tasks[place][bucket].append(pieces[-1])
        return pieces

    def _sum_gradients(self) -> None:
        """Add the sums of gradients inside each group, between the groups, inside again, and the update."""
        scattered: dict[tuple[int, int], list[int]] = {}
        exchanges = {}
        for number, replicas in enumerate(self.plan.placement):
            stages = self.costs.stage_times(replicas, self.plan.shard)
            for stage, (place, part) in enumerate(zip(replicas.places, stages, strict=True)):
                stage_place = number, stage
                exchanges[stage_place] = self.costs.reduction_times(
                    place, part, replicas.count, len(self.plan.placement), self.plan.shard
                )
                scattered[stage_place] = [
                    self.events.add(
                        exchanges[stage_place].reduce_within_group / BUCKETS_PER_STAGE,
                        gradient_task,
                        resource=("network", *stage_place),
                    )
                    for gradient_task in self.gradient_tasks[stage_place]
                ]
        blocks = {
            (number, stage): (start, start + place.blocks)
            for number, replicas in enumerate(self.plan.placement)
            for stage, (start, place) in enumerate(
                zip((0, *replicas.stage_cuts), replicas.places, strict=True)
            )
        }
        exchanged: dict[tuple[int, int], list[int]] = {}
        for stage_place, seconds in exchanges.items():
            exchanged[stage_place] = []
            for bucket in range(BUCKETS_PER_STAGE):
                after = [scattered[stage_place][bucket]]
                for peer_place in exchanges:
                    if peer_place[0] != stage_place[0]:
                        after += [
                            scattered[peer_place][at]
                            for at in _matching_buckets(blocks, stage_place, peer_place, bucket)
                        ]
                task = self.events.add(
                    seconds.reduce_across_groups / BUCKETS_PER_STAGE,
                    after,
                    resource=("network", *stage_place),
                )
                exchanged[stage_place].append(task)
        for stage_place, seconds in exchanges.items():
            gathers = [
                self.events.add(
                    seconds.gather_gradients / BUCKETS_PER_STAGE, [task], resource=("network", *stage_place)
                )
                for task in exchanged[stage_place]
            ]
            self.events.add(seconds.optimizer, gathers)


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return the order of 1F1B on one stage (Narayanan et al. 2021, section 2.2.1)."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order = [("forward", index) for index in range(warm_up)]
    for index in range(micro_batches):
        if index + warm_up < micro_batches:
            order.append(("forward", index + warm_up))
        order.append(("backward", index))
    return order


def _matching_buckets(
    blocks: dict[tuple[int, int], tuple[int, int]],
    place: tuple[int, int],
    peer_place: tuple[int, int],
    bucket: int,
) -> list[int]:
    """Return the buckets of stage `peer_place` that hold a part of the blocks of `bucket` of stage `place`.

    Backward makes a stage's last block first: bucket 0 is its end.
    """

    def span(place: tuple[int, int], index: int) -> tuple[float, float]:
        start, stop = blocks[place]
        size = (stop - start) / BUCKETS_PER_STAGE
        return stop - (index + 1) * size, stop - index * size

    low, high = span(place, bucket)
    return [
        at
        for at in range(BUCKETS_PER_STAGE)
        if span(peer_place, at)[0] < high and low < span(peer_place, at)[1]
    ]
