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
from wanma.planner.forecast.problem import Problem
from wanma.planner.heterogeneous.costs import MixedCosts, is_sharded, mixed_step_time
from wanma.planner.heterogeneous.node_pools import Fleet
from wanma.planner.heterogeneous.replica_shapes import MixedSpace, Numbers, Options
from wanma.planner.heterogeneous.stage_placement import Placed, Placer
from wanma.planner.search.result import Candidate, Found, pareto_front

NOT_RUN = "wanma does not run replicas that are placed on unlike devices yet"


class Shape(NamedTuple):
    """Set of groups of replicas that a plan has."""

    spans: tuple[tuple[int, int], ...]
    """Pairs of device kinds on which replicas of one group have stages."""
    singles: tuple[int, ...]
    """Kinds with replicas of their own. Of the two kinds that a group spans, one may be among them, on
    devices that the group leaves."""

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return len(self.spans) + len(self.singles)

    @property
    def kinds(self) -> set[int]:
        """Return all kinds of devices that the groups use."""
        return {kind for span in self.spans for kind in span} | set(self.singles)


class Share(NamedTuple):
    """Group of equal replicas and the number of micro-batches that each of them computes."""

    placed: Placed
    micro_batches: int

    @property
    def samples(self) -> int:
        """Number of samples of all replicas of the group."""
        replicas = self.placed.replicas
        return replicas.count * replicas.micro_batch * self.micro_batches


def search_mixed(
    problem: Problem,
    fleet: Fleet,
    start: Plan,
    space: MixedSpace | None = None,
    *,
    keep: int = 20,
    tolerance: float = 0.005,
) -> Found:
    """Return the fastest plan of each set of groups that can beat the best, and of each kind alone.

    Args:
        problem: model, batch and framework; the nodes are those of `fleet`.
        start: settings of every replica: precision and compile. Sequence parallelism is the job's.
        tolerance: share of the time that a more complicated plan must gain; far below the uncertainty of a
            forecast. With 0 the best plan of the space is found.

    Raises:
        JobError: the model is no decoder, or no kind of device computes in the plan's precision.
    """
    began = time.perf_counter()
    if problem.dimensions is None:
        raise JobError(
            "plans on unlike machines are searched for decoders only",
            "plan for one kind of machines of the cluster, or give parallel.batch_shares",
        )
    costs = MixedCosts(
        problem, fleet, replace(start, sequence_parallel=problem.job.parallel.sequence_parallel)
    )
    search = _Search(costs, space or MixedSpace.of_kinds(len(fleet.kinds)), tolerance)
    if not search.usable:
        names = ", ".join(kind.name for kind in fleet.kinds)
        raise JobError(
            f"train.precision = '{start.precision}': no device of the cluster ({names}) has a rate for it",
            "choose another train.precision",
        )
    search.run()
    found = sorted(search.found, key=lambda one: (one.seconds, len(one.plan.placement)))
    return Found(
        tuple(found[:keep]),
        pareto_front(found),
        None,
        search.considered,
        dict(search.pruned),
        time.perf_counter() - began,
    )


class _Search:
    """State of one search: caches, bounds and plans found."""

    def __init__(self, costs: MixedCosts, space: MixedSpace, tolerance: float) -> None:
        self.costs, self.space = costs, space
        self.gain = 1 - max(tolerance, 1e-9)
        self.fleet, self.batch = costs.fleet, costs.problem.global_batch
        self.placer = Placer(costs)
        self.usable = [number for number, kind in enumerate(self.fleet.kinds) if costs.can_compute(kind)]
        self._options: dict[tuple[int, ...], Options] = {}
        # Caches for the last step time:
        self._asked = 0.0
        self._uppers: dict[tuple[int, ...], Numbers] = {}
        self._densities: dict[int, float] = {}
        self._singles: dict[tuple[object, ...], Share | None] = {}
        self.found: list[Candidate] = []
        self.best = math.inf
        self.considered = 0
        self._fitting = 0
        """Number of replicas that were placed and fit into memory."""
        self.pruned = Counter[str]()

    def run(self) -> None:
        """Search all sets of groups, and collect the plans found."""
        for shape in _shapes(self.usable, self.space.rest):
            for shard in self.space.shard:
                # Plans of one kind alone are the baseline of mixed plans, and so are always found.
                alone = len(shape.kinds) == 1
                found = self._shortest(shape, shard, math.inf if alone else self.best)
                if found is None:
                    self.pruned["slower, or too large"] += 1
                    continue
                self.found.append(candidate(self.costs, found, shard, self.batch))
                self.best = min(self.best, self.found[-1].seconds)

    # ------------------------------------------------------------ one set of groups

    def _shortest(self, shape: Shape, shard: Shard, limit: float) -> list[Share] | None:
        """Return the groups that compute the batch in the least time below `limit`; None where none do."""
        if math.isinf(limit):
            first = self._any(shape, shard)
            if first is None:
                return None
            best, seconds = first
        else:
            best, seconds = None, limit
        while True:
            shares = self._within(shape, shard, seconds * self.gain)
            if shares is None:
                return best
            best, seconds = self._tightened(shares)

    def _any(self, shape: Shape, shard: Shard) -> tuple[list[Share], float] | None:
        """Return groups that compute the batch in any time, and that time; None where memory lacks."""
        flops = self.costs.problem.workload.flops_per_sample * self.batch
        seconds = flops / (self.fleet.devices * 1e15)
        while seconds < _LONGEST_SECONDS:
            shares = self._within(shape, shard, seconds)
            if shares is not None:
                return self._tightened(shares)
            seconds *= 2
        return None

    def _tightened(self, shares: list[Share]) -> tuple[list[Share], float]:
        """Return the same groups with the micro-batches of the least time for the batch, and that time."""
        low, high = 0.0, max(share.placed.seconds(share.micro_batches) for share in shares)
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            fewer = [
                share._replace(micro_batches=share.placed.most_micro_batches(middle)) for share in shares
            ]
            if self._is_enough(fewer):
                shares = fewer
                high = max(share.placed.seconds(share.micro_batches) for share in shares)
            else:
                low = middle
        return shares, high

    def _is_enough(self, shares: Sequence[Share]) -> bool:
        """Return whether every replica has a micro-batch, and all together have the batch."""
        replicas = sum(share.placed.replicas.count for share in shares)
        return (
            all(share.micro_batches > 0 for share in shares)
            and replicas <= self.batch
            and sum(share.samples for share in shares) >= self.batch
        )

    def _within(self, shape: Shape, shard: Shard, seconds: float) -> list[Share] | None:
        """Return groups that together compute the batch within `seconds`; None where there are none."""
        self.considered += 1
        everything = {kind: float(self.fleet.kinds[kind].devices) for kind in shape.kinds}
        # Upper bound of the samples of each part of the shape.
        apart = [kind for kind in shape.singles if not any(kind in span for span in shape.spans)]
        uppers: dict[tuple[int, ...], float]
        uppers = {(kind,): self._density(kind, seconds) * everything[kind] for kind in apart}
        for span in shape.spans:
            uppers[span] = float(np.max(self._span_uppers(span, shape, seconds)[0], initial=0.0))
        if sum(uppers.values()) < self.batch:
            return None
        shares: list[Share] = []
        for part in uppers:
            others = sum(upper for other, upper in uppers.items() if other != part)
            needed = self.batch - others
            if len(part) == 1:
                one = self._best_single(part[0], int(everything[part[0]]), shape.groups, shard, seconds)
                found = None if one is None else [one]
            else:
                found = self._best_span((part[0], part[1]), shape, shard, seconds, needed)
            if found is None:
                return None
            uppers[part] = float(sum(share.samples for share in found))
            shares += found
            if sum(uppers.values()) < self.batch:
                return None
        return shares if self._is_enough(shares) else None

    def _best_single(
        self, kind: int, devices: int, groups: int, shard: Shard, seconds: float
    ) -> Share | None:
        """Return the replicas on one kind of device that compute the most samples."""
        key = (kind, devices, groups, shard)
        self._forget(seconds)
        if key not in self._singles:
            self._singles[key] = self._search_single(*key, seconds)
        return self._singles[key]

    def _search_single(
        self, kind: int, devices: int, groups: int, shard: Shard, seconds: float
    ) -> Share | None:
        options = self._of((kind,))
        counts = np.minimum(devices // options.devices[:, 0], self.batch)
        uppers = counts * options.samples * self._most((kind,), seconds)
        best: Share | None = None
        last = self._fitting + (self.space.single_looks or math.inf)
        for number in np.argsort(-uppers, kind="stable"):
            if uppers[number] <= (best.samples if best else 0) or self._fitting >= last:
                break
            wanted = best.samples + 1 if best else 1
            share = self._share(options, int(number), int(counts[number]), groups, shard, seconds, wanted)
            best = share or best
        return best

    def _best_span(
        self, span: tuple[int, int], shape: Shape, shard: Shard, seconds: float, needed: float
    ) -> list[Share] | None:
        """Return the replicas that span two kinds and, with others on devices left, compute most samples."""
        options = self._of(span)
        uppers, counts = self._span_uppers(span, shape, seconds)
        best: list[Share] | None = None
        most = 0
        numbers = np.flatnonzero(uppers >= max(needed, 1.0))
        looks = self.space.spanning_looks
        for number in numbers[np.argsort(-uppers[numbers], kind="stable")]:
            if uppers[number] <= most or looks == 0:
                break
            count = int(counts[number])
            left = {
                kind: self.fleet.kinds[kind].devices - count * int(used)
                for kind, used in zip(span, options.devices[number], strict=True)
                if kind in shape.singles
            }
            rest = sum(devices * self._density(kind, seconds) for kind, devices in left.items())
            wanted = max(needed, most + 1) - rest
            before = self._fitting
            share = self._share(options, int(number), count, shape.groups, shard, seconds, wanted)
            if looks is not None:
                looks -= self._fitting - before
            if share is None:
                continue
            shares = [share]
            for kind, devices in left.items():
                own = self._best_single(kind, devices, shape.groups, shard, seconds)
                if own is None:
                    break
                shares.append(own)
            else:
                samples = sum(one.samples for one in shares)
                if samples > most:
                    best, most = shares, samples
        return best

    def _share(
        self,
        options: Options,
        number: int,
        count: int,
        groups: int,
        shard: Shard,
        seconds: float,
        wanted: float,
    ) -> Share | None:
        """Return a group's share; None where memory lacks, or it computes fewer samples than `wanted`."""
        if count < 1:
            return None
        option = options[number]
        fewest = max(math.ceil(wanted / (count * option.micro_batch)), option.stages)
        if (
            options.least_seconds(number, fewest, self.placer.pace(option, is_sharded(count, shard)))
            > seconds
        ):
            return None
        placed = self.placer.place(option, count, groups, shard)
        if placed is None:
            return None
        self._fitting += 1
        if placed.seconds(fewest) > seconds:
            return None
        most = placed.most_micro_batches(seconds)
        return Share(placed, most) if most >= fewest else None

    # ------------------------------------------------------------ bounds

    def _of(self, nodes: tuple[int, ...]) -> Options:
        """Return all replica shapes on these kinds of devices, from a cache."""
        if nodes not in self._options:
            self._options[nodes] = Options(self.costs, self.space, nodes)
        return self._options[nodes]

    def _most(self, nodes: tuple[int, ...], seconds: float) -> Numbers:
        """Return the most micro-batches of each shape, as `Options.most_micro_batches`, from a cache."""
        self._forget(seconds)
        if nodes not in self._uppers:
            self._uppers[nodes] = self._of(nodes).most_micro_batches(seconds)
        return self._uppers[nodes]

    def _forget(self, seconds: float) -> None:
        """Clear the caches if `seconds` is another step time than theirs."""
        if self._asked != seconds:
            self._asked, self._uppers, self._densities, self._singles = seconds, {}, {}, {}

    def _density(self, kind: int, seconds: float) -> float:
        """Return the upper bound of the samples that one device computes."""
        self._forget(seconds)
        if kind not in self._densities:
            self._densities[kind] = self._densest(kind, seconds)
        return self._densities[kind]

    def _densest(self, kind: int, seconds: float) -> float:
        """Return the upper bound of samples per device, over all shapes on one kind."""
        options = self._of((kind,))
        devices = options.devices[:, 0]
        uppers = options.samples * self._most((kind,), seconds) / devices
        best = 0.0
        for number in np.argsort(-uppers, kind="stable"):
            if uppers[number] <= best:
                break
            pace = self.placer.pace(options[int(number)], True)
            most = options.most_at_pace(int(number), seconds, pace)
            best = max(best, float(options.samples[number] * most / devices[number]))
        return best

    def _span_uppers(self, span: tuple[int, int], shape: Shape, seconds: float) -> tuple[Numbers, Numbers]:
        """Return the upper bound of samples of each shape with the devices that it leaves, and its copies."""
        options = self._of(span)
        have = np.array([float(self.fleet.kinds[kind].devices) for kind in span])
        counts = np.minimum(np.min(have // options.devices, axis=1), self.batch)
        uppers = counts * options.samples * self._most(span, seconds)
        left = have - counts[:, None] * options.devices
        for column, kind in enumerate(span):
            if kind in shape.singles:
                uppers = uppers + left[:, column] * self._density(kind, seconds)
        return uppers, counts


_LONGEST_SECONDS = 1e7
"""Longest step time that is searched, in seconds."""


def _shapes(kinds: Sequence[int], rest: bool) -> Iterator[Shape]:
    """Yield all sets of groups, those with the fewest groups and without spans first."""
    pairs = list(itertools.combinations(kinds, 2))
    shapes = []
    for number in range(len(kinds) // 2 + 1):
        for spans in itertools.combinations(pairs, number):
            if len({kind for span in spans for kind in span}) < 2 * number:
                continue
            for size in range(len(kinds) + 1):
                for singles in itertools.combinations(kinds, size):
                    # As many replicas span two kinds as there are devices for: one kind has none left.
                    most = max((len({*span} & {*singles}) for span in spans), default=0)
                    if most <= int(rest):
                        shapes.append(Shape(spans, singles))
    return iter(
        sorted((shape for shape in shapes if shape.groups), key=lambda one: (len(one.spans), one.groups))
    )


# ---------------------------------------------------------------- plans


def candidate(costs: MixedCosts, shares: Sequence[Share], shard: Shard, batch: int) -> Candidate:
    """Return the placed plan of these groups with its forecast."""
    plan = placed_plan(costs.start, shares, shard, batch)
    return Candidate(plan, mixed_forecast(costs, plan, batch), NOT_RUN)


def placed_plan(start: Plan, shares: Sequence[Share], shard: Shard, batch: int) -> Plan:
    """Return the plan that splits the batch in proportion to the groups' samples, evenly within each."""
    whole = sum(share.samples for share in shares)
    sizes = [max(batch * share.samples // whole, share.placed.replicas.count) for share in shares]
    # Samples left by rounding go to the group with most room; an excess comes from the largest group.
    while (rest := batch - sum(sizes)) != 0:
        rooms = [share.samples - size for share, size in zip(shares, sizes, strict=True)]
        if rest > 0:
            at = max(range(len(sizes)), key=lambda number: rooms[number])
            sizes[at] += min(rest, rooms[at])
        else:
            spare = [size - share.placed.replicas.count for share, size in zip(shares, sizes, strict=True)]
            at = max(range(len(sizes)), key=lambda number: spare[number])
            sizes[at] -= min(-rest, spare[at])
    placement = tuple(share.placed.replicas for share in shares)
    rows: list[int] = []
    for replicas, size in zip(placement, sizes, strict=True):
        base, extra = divmod(size, replicas.count)
        rows += [base + (number < extra) for number in range(replicas.count)]
    return replace(
        start,
        pp=max(len(replicas.places) for replicas in placement),
        dp_replicate=len(rows),
        tp=max(place.tp for replicas in placement for place in replicas.places),
        micro_batch=max(replicas.micro_batch for replicas in placement),
        shard=shard,
        placement=placement,
        batch_shares=tuple(rows),
    )


def mixed_forecast(costs: MixedCosts, plan: Plan, batch: int) -> Forecast:
    """Return the forecast of a placed plan; its memory is that of the stage which fills its device most."""
    fullest: tuple[float, Forecast] | None = None
    peak, first, sizes = 0.0, 0, plan.sizes(batch)
    for replicas in plan.placement:
        largest = max(sizes[first : first + replicas.count])
        first += replicas.count
        stages = costs.memory(replicas, plan.shard, math.ceil(largest / replicas.micro_batch))
        for place, needed in zip(replicas.places, stages, strict=True):
            kind = costs.fleet.kinds[place.node]
            share = needed.memory_bytes / kind.memory_bytes
            if fullest is None or share > fullest[0]:
                fullest = (share, needed)
            rate = kind.machine.chip.peak_flops_per_second[plan.precision]
            peak += replicas.count * place.tp * rate
    assert fullest is not None
    step = mixed_step_time(costs, plan, batch)
    flops = costs.problem.workload.flops_per_sample * batch
    return replace(
        fullest[1],
        step=step,
        samples_per_second=batch / step.seconds,
        model_flops_utilisation=flops / step.seconds / peak,
    )
