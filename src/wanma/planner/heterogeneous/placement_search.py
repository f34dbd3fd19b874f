"""Search for the fastest plans of a heterogeneous cluster: placement of replicas, and batch shares.

Equal nodes are counted, not listed, so that the search hardly grows with a cluster. Replicas come in groups
of equal ones. In a given step time each group computes a number of samples, whatever the others do: for each
set of groups the search asks whether together they compute the batch in less time than the best plan yet, and
shortens that time until they cannot. Pure functions, without torch.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.heterogeneous.costs import HeterogeneousCosts, placed_step_time, shards_optimizer_state
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware
from wanma.planner.heterogeneous.replica_shapes import Array, HeterogeneousSpace, ReplicaShapes
from wanma.planner.heterogeneous.stage_placement import PlacedReplicas, StagePlacer
from wanma.planner.search.result import Candidate, SearchResult, build_pareto_front

UNSUPPORTED_PLACEMENT_TEXT = "replicas on different devices are not supported yet"


class ReplicaGroupSet(NamedTuple):
    """Set of groups of replicas that a plan has."""

    spans: tuple[tuple[int, int], ...]
    """Pairs of device kinds on which replicas of one group have stages."""
    singles: tuple[int, ...]
    """Kinds with replicas of their own. Of the two kinds that a group spans, one may be among them, on
    devices that the group leaves."""

    @property
    def group_count(self) -> int:
        """Return the number of groups."""
        return len(self.spans) + len(self.singles)

    @property
    def pools(self) -> set[int]:
        """Return all kinds of devices that the groups use."""
        return {kind for span in self.spans for kind in span} | set(self.singles)


class PlacedGroup(NamedTuple):
    """Group of equal replicas and the number of micro-batches that each of them computes."""

    placed_replicas: PlacedReplicas
    micro_batches: int

    @property
    def samples(self) -> int:
        """Number of samples of all replicas of the group."""
        replicas = self.placed_replicas.replicas
        return replicas.count * replicas.micro_batch * self.micro_batches


def search_placements(
    problem: PlanningProblem,
    hardware: HeterogeneousHardware,
    base_plan: Plan,
    space: HeterogeneousSpace | None = None,
    *,
    keep: int = 20,
    tolerance: float = 0.005,
) -> SearchResult:
    """Return the fastest plan of each set of groups that can beat the best, and of each kind alone.

    Args:
        problem: model, batch and framework; the nodes are those of `hardware`.
        base_plan: settings of every replica: precision and compile. Sequence parallelism is the job's.
        tolerance: share of the time that a more complicated plan must gain; far below the uncertainty of a
            forecast. With 0 the best plan of the space is found.

    Raises:
        JobError: the model is no decoder, or no kind of device computes in the plan's precision.
    """
    began = time.perf_counter()
    if problem.dimensions is None:
        raise JobError(
            "heterogeneous clusters support the plan search for decoders only",
            "plan for one kind of node of the cluster, or set parallel.batch_shares",
        )
    costs = HeterogeneousCosts(
        problem, hardware, replace(base_plan, sequence_parallel=problem.job.parallel.sequence_parallel)
    )
    search = _PlacementSearch(costs, space or HeterogeneousSpace.for_pools(len(hardware.pools)), tolerance)
    if not search.usable:
        names = ", ".join(kind.name for kind in hardware.pools)
        raise JobError(
            f"train.precision = '{base_plan.precision}': no device of the cluster ({names}) has a rate for "
            "it",
            "set another train.precision",
        )
    search.run()
    candidates = sorted(search.candidates, key=lambda entry: (entry.seconds, len(entry.plan.placement)))
    return SearchResult(
        tuple(candidates[:keep]),
        build_pareto_front(candidates),
        None,
        search.plan_count,
        dict(search.pruned),
        time.perf_counter() - began,
    )


class _PlacementSearch:
    """State of one search: caches, bounds and plans found."""

    def __init__(self, costs: HeterogeneousCosts, space: HeterogeneousSpace, tolerance: float) -> None:
        self.costs, self.space = costs, space
        self.target_ratio = 1 - max(tolerance, 1e-9)
        self.hardware, self.batch = costs.hardware, costs.problem.global_batch
        self.placer = StagePlacer(costs)
        self.usable = [number for number, kind in enumerate(self.hardware.pools) if costs.can_compute(kind)]
        self._options: dict[tuple[int, ...], ReplicaShapes] = {}
        # Caches for the last step time:
        self._cached_seconds = 0.0
        self._uppers: dict[tuple[int, ...], Array] = {}
        self._densities: dict[int, float] = {}
        self._singles: dict[tuple[object, ...], PlacedGroup | None] = {}
        self.candidates: list[Candidate] = []
        self.best = math.inf
        self.plan_count = 0
        self._fitting_count = 0
        """Number of replicas that were placed and fit into memory."""
        self.pruned = Counter[str]()

    def run(self) -> None:
        """Search all sets of groups, and collect the plans found."""
        for shape in _group_sets(self.usable, self.space.uses_leftover_devices):
            for shard in self.space.shard:
                # Plans of one kind alone are the baseline of mixed plans, and so are always found.
                is_single_kind = len(shape.pools) == 1
                groups = self._fastest_groups(shape, shard, math.inf if is_single_kind else self.best)
                if groups is None:
                    self.pruned["slower, or too large"] += 1
                    continue
                self.candidates.append(placed_candidate(self.costs, groups, shard, self.batch))
                self.best = min(self.best, self.candidates[-1].seconds)

    # ------------------------------------------------------------ one set of groups

    def _fastest_groups(
        self, group_set: ReplicaGroupSet, shard: Shard, limit: float
    ) -> list[PlacedGroup] | None:
        """Return the groups that compute the batch in the least time below `limit`; None where none do."""
        if math.isinf(limit):
            first = self._any_groups(group_set, shard)
            if first is None:
                return None
            best, seconds = first
        else:
            best, seconds = None, limit
        while True:
            shares = self._groups_within(group_set, shard, seconds * self.target_ratio)
            if shares is None:
                return best
            best, seconds = self._fastest_micro_batches(shares)

    def _any_groups(self, group_set: ReplicaGroupSet, shard: Shard) -> tuple[list[PlacedGroup], float] | None:
        """Return groups that compute the batch in any time, and that time; None where memory lacks."""
        flops = self.costs.problem.workload.flops_per_sample * self.batch
        seconds = flops / (self.hardware.device_count * 1e15)
        while seconds < _LONGEST_SECONDS:
            shares = self._groups_within(group_set, shard, seconds)
            if shares is not None:
                return self._fastest_micro_batches(shares)
            seconds *= 2
        return None

    def _fastest_micro_batches(self, shares: list[PlacedGroup]) -> tuple[list[PlacedGroup], float]:
        """Return the same groups with the micro-batches of the least time for the batch, and that time."""
        low, high = 0.0, max(share.placed_replicas.seconds(share.micro_batches) for share in shares)
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            fewer = [
                share._replace(micro_batches=share.placed_replicas.max_micro_batches(middle))
                for share in shares
            ]
            if self._compute_batch(fewer):
                shares = fewer
                high = max(share.placed_replicas.seconds(share.micro_batches) for share in shares)
            else:
                low = middle
        return shares, high

    def _compute_batch(self, shares: Sequence[PlacedGroup]) -> bool:
        """Return whether every replica has a micro-batch, and all together have the batch."""
        replicas = sum(share.placed_replicas.replicas.count for share in shares)
        return (
            all(share.micro_batches > 0 for share in shares)
            and replicas <= self.batch
            and sum(share.samples for share in shares) >= self.batch
        )

    def _groups_within(
        self, group_set: ReplicaGroupSet, shard: Shard, seconds: float
    ) -> list[PlacedGroup] | None:
        """Return groups that together compute the batch within `seconds`; None where there are none."""
        self.plan_count += 1
        device_counts = {kind: float(self.hardware.pools[kind].device_count) for kind in group_set.pools}
        # Upper bound of the samples of each part of the shape.
        single_kinds = [
            kind for kind in group_set.singles if not any(kind in span for span in group_set.spans)
        ]
        uppers: dict[tuple[int, ...], float]
        uppers = {(kind,): self._density(kind, seconds) * device_counts[kind] for kind in single_kinds}
        for span in group_set.spans:
            uppers[span] = float(np.max(self._span_uppers(span, group_set, seconds)[0], initial=0.0))
        if sum(uppers.values()) < self.batch:
            return None
        shares: list[PlacedGroup] = []
        for part in uppers:
            other_uppers = sum(upper for other, upper in uppers.items() if other != part)
            min_samples = self.batch - other_uppers
            if len(part) == 1:
                group_share = self._best_single(
                    part[0], int(device_counts[part[0]]), group_set.group_count, shard, seconds
                )
                part_shares = None if group_share is None else [group_share]
            else:
                part_shares = self._best_span((part[0], part[1]), group_set, shard, seconds, min_samples)
            if part_shares is None:
                return None
            uppers[part] = float(sum(share.samples for share in part_shares))
            shares += part_shares
            if sum(uppers.values()) < self.batch:
                return None
        return shares if self._compute_batch(shares) else None

    def _best_single(
        self, kind: int, devices: int, groups: int, shard: Shard, seconds: float
    ) -> PlacedGroup | None:
        """Return the replicas on one kind of device that compute the most samples."""
        key = (kind, devices, groups, shard)
        self._clear_other_caches(seconds)
        if key not in self._singles:
            self._singles[key] = self._search_single(*key, seconds)
        return self._singles[key]

    def _search_single(
        self, kind: int, devices: int, groups: int, shard: Shard, seconds: float
    ) -> PlacedGroup | None:
        options = self._of((kind,))
        counts = np.minimum(devices // options.devices_by_pool[:, 0], self.batch)
        uppers = counts * options.samples_per_micro_batch * self._most((kind,), seconds)
        best: PlacedGroup | None = None
        last = self._fitting_count + (self.space.max_single_pool_trials or math.inf)
        for number in np.argsort(-uppers, kind="stable"):
            if uppers[number] <= (best.samples if best else 0) or self._fitting_count >= last:
                break
            min_samples = best.samples + 1 if best else 1
            share = self._placed_group(
                options, int(number), int(counts[number]), groups, shard, seconds, min_samples
            )
            best = share or best
        return best

    def _best_span(
        self,
        span: tuple[int, int],
        group_set: ReplicaGroupSet,
        shard: Shard,
        seconds: float,
        min_samples: float,
    ) -> list[PlacedGroup] | None:
        """Return the replicas that span two kinds and, with others on devices left, compute most samples."""
        options = self._of(span)
        uppers, counts = self._span_uppers(span, group_set, seconds)
        best: list[PlacedGroup] | None = None
        max_samples = 0
        numbers = np.flatnonzero(uppers >= max(min_samples, 1.0))
        trials = self.space.max_spanning_trials
        for number in numbers[np.argsort(-uppers[numbers], kind="stable")]:
            if uppers[number] <= max_samples or trials == 0:
                break
            count = int(counts[number])
            spare = {
                kind: self.hardware.pools[kind].device_count - count * int(used)
                for kind, used in zip(span, options.devices_by_pool[number], strict=True)
                if kind in group_set.singles
            }
            leftover_samples = sum(devices * self._density(kind, seconds) for kind, devices in spare.items())
            needed_samples = max(min_samples, max_samples + 1) - leftover_samples
            before = self._fitting_count
            share = self._placed_group(
                options, int(number), count, group_set.group_count, shard, seconds, needed_samples
            )
            if trials is not None:
                trials -= self._fitting_count - before
            if share is None:
                continue
            shares = [share]
            for kind, devices in spare.items():
                leftover_share = self._best_single(kind, devices, group_set.group_count, shard, seconds)
                if leftover_share is None:
                    break
                shares.append(leftover_share)
            else:
                samples = sum(group_share.samples for group_share in shares)
                if samples > max_samples:
                    best, max_samples = shares, samples
        return best

    def _placed_group(
        self,
        shapes: ReplicaShapes,
        number: int,
        count: int,
        groups: int,
        shard: Shard,
        seconds: float,
        min_samples: float,
    ) -> PlacedGroup | None:
        """Return a group's share; None if memory lacks, or it computes fewer samples than `min_samples`."""
        if count < 1:
            return None
        option = shapes[number]
        min_micro_batches = max(math.ceil(min_samples / (count * option.micro_batch)), option.stage_count)
        if (
            shapes.min_seconds(
                number,
                min_micro_batches,
                self.placer.slowest_stage_bound(option, shards_optimizer_state(count, shard)),
            )
            > seconds
        ):
            return None
        placed = self.placer.place(option, count, groups, shard)
        if placed is None:
            return None
        self._fitting_count += 1
        if placed.seconds(min_micro_batches) > seconds:
            return None
        max_micro_batches = placed.max_micro_batches(seconds)
        return PlacedGroup(placed, max_micro_batches) if max_micro_batches >= min_micro_batches else None

    # ------------------------------------------------------------ bounds

    def _of(self, nodes: tuple[int, ...]) -> ReplicaShapes:
        """Return all replica shapes on these kinds of devices, from a cache."""
        if nodes not in self._options:
            self._options[nodes] = ReplicaShapes(self.costs, self.space, nodes)
        return self._options[nodes]

    def _most(self, nodes: tuple[int, ...], seconds: float) -> Array:
        """Return the most micro-batches of each shape, as `ReplicaShapes.max_micro_batches`, from a cache."""
        self._clear_other_caches(seconds)
        if nodes not in self._uppers:
            self._uppers[nodes] = self._of(nodes).max_micro_batches(seconds)
        return self._uppers[nodes]

    def _clear_other_caches(self, seconds: float) -> None:
        """Clear the caches if `seconds` is another step time than theirs."""
        if self._cached_seconds != seconds:
            self._cached_seconds, self._uppers, self._densities, self._singles = seconds, {}, {}, {}

    def _density(self, kind: int, seconds: float) -> float:
        """Return the upper bound of the samples that one device computes."""
        self._clear_other_caches(seconds)
        if kind not in self._densities:
            self._densities[kind] = self._densest(kind, seconds)
        return self._densities[kind]

    def _densest(self, kind: int, seconds: float) -> float:
        """Return the upper bound of samples per device, over all shapes on one kind."""
        options = self._of((kind,))
        devices = options.devices_by_pool[:, 0]
        uppers = options.samples_per_micro_batch * self._most((kind,), seconds) / devices
        best = 0.0
        for number in np.argsort(-uppers, kind="stable"):
            if uppers[number] <= best:
                break
            pace = self.placer.slowest_stage_bound(options[int(number)], True)
            max_micro_batches = options.max_micro_batches_at(int(number), seconds, pace)
            best = max(
                best, float(options.samples_per_micro_batch[number] * max_micro_batches / devices[number])
            )
        return best

    def _span_uppers(
        self, span: tuple[int, int], group_set: ReplicaGroupSet, seconds: float
    ) -> tuple[Array, Array]:
        """Return the upper bound of samples of each shape with the devices that it leaves, and its copies."""
        options = self._of(span)
        device_counts = np.array([float(self.hardware.pools[kind].device_count) for kind in span])
        counts = np.minimum(np.min(device_counts // options.devices_by_pool, axis=1), self.batch)
        uppers = counts * options.samples_per_micro_batch * self._most(span, seconds)
        leftover = device_counts - counts[:, None] * options.devices_by_pool
        for column, kind in enumerate(span):
            if kind in group_set.singles:
                uppers = uppers + leftover[:, column] * self._density(kind, seconds)
        return uppers, counts


_LONGEST_SECONDS = 1e7
"""Longest step time that is searched, in seconds."""


def _group_sets(pools: Sequence[int], uses_leftover_devices: bool) -> Iterator[ReplicaGroupSet]:
    """Yield all sets of groups, those with the fewest groups and without spans first."""
    pairs = list(itertools.combinations(pools, 2))
    shapes = []
    for number in range(len(pools) // 2 + 1):
        for spans in itertools.combinations(pairs, number):
            if len({kind for span in spans for kind in span}) < 2 * number:
                continue
            for size in range(len(pools) + 1):
                for singles in itertools.combinations(pools, size):
                    # As many replicas span two kinds as there are devices for: one kind has none left.
                    max_shared = max((len({*span} & {*singles}) for span in spans), default=0)
                    if max_shared <= int(uses_leftover_devices):
                        shapes.append(ReplicaGroupSet(spans, singles))
    return iter(
        sorted(
            (shape for shape in shapes if shape.group_count),
            key=lambda group_set: (len(group_set.spans), group_set.group_count),
        )
    )


# ---------------------------------------------------------------- plans


def placed_candidate(
    costs: HeterogeneousCosts, groups: Sequence[PlacedGroup], shard: Shard, batch: int
) -> Candidate:
    """Return the placed plan of these groups with its forecast."""
    plan = placed_plan(costs.base_plan, groups, shard, batch)
    return Candidate(plan, forecast_placed_plan(costs, plan, batch), UNSUPPORTED_PLACEMENT_TEXT)


def placed_plan(base_plan: Plan, groups: Sequence[PlacedGroup], shard: Shard, batch: int) -> Plan:
    """Return the plan that splits the batch in proportion to the groups' samples, evenly within each."""
    total = sum(share.samples for share in groups)
    sizes = [max(batch * share.samples // total, share.placed_replicas.replicas.count) for share in groups]
    # Samples left by rounding go to the group with most room; an excess comes from the largest group.
    while (remainder := batch - sum(sizes)) != 0:
        rooms = [share.samples - size for share, size in zip(groups, sizes, strict=True)]
        if remainder > 0:
            at = max(range(len(sizes)), key=lambda number: rooms[number])
            sizes[at] += min(remainder, rooms[at])
        else:
            spare = [
                size - share.placed_replicas.replicas.count for share, size in zip(groups, sizes, strict=True)
            ]
            at = max(range(len(sizes)), key=lambda number: spare[number])
            sizes[at] -= min(-remainder, spare[at])
    placement = tuple(share.placed_replicas.replicas for share in groups)
    rows: list[int] = []
    for replicas, size in zip(placement, sizes, strict=True):
        base, extra = divmod(size, replicas.count)
        rows += [base + (number < extra) for number in range(replicas.count)]
    return replace(
        base_plan,
        pp=max(len(replicas.places) for replicas in placement),
        dp_replicate=len(rows),
        tp=max(place.tp for replicas in placement for place in replicas.places),
        micro_batch=max(replicas.micro_batch for replicas in placement),
        shard=shard,
        placement=placement,
        batch_shares=tuple(rows),
    )


def forecast_placed_plan(costs: HeterogeneousCosts, plan: Plan, batch: int) -> Forecast:
    """Return the forecast of a placed plan; its memory is that of the stage which fills its device most."""
    fullest: tuple[float, Forecast] | None = None
    peak, first, sizes = 0.0, 0, plan.rows_per_data_rank(batch)
    for replicas in plan.placement:
        largest = max(sizes[first : first + replicas.count])
        first += replicas.count
        stages = costs.memory(replicas, plan.shard, math.ceil(largest / replicas.micro_batch))
        for place, memory in zip(replicas.places, stages, strict=True):
            kind = costs.hardware.pools[place.node]
            share = memory.memory_bytes / kind.memory_limit_bytes
            if fullest is None or share > fullest[0]:
                fullest = (share, memory)
            rate = kind.hardware.chip.peak_flops_per_second[plan.precision]
            peak += replicas.count * place.tp * rate
    assert fullest is not None
    step = placed_step_time(costs, plan, batch)
    flops = costs.problem.workload.flops_per_sample * batch
    return replace(
        fullest[1],
        step=step,
        samples_per_second=batch / step.seconds,
        model_flops_utilisation=flops / step.seconds / peak,
    )
