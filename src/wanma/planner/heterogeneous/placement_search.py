"""The best plans on unlike machines: which replicas are placed on which kinds of devices, and what share of
the batch each computes.

Equal machines are counted, not listed, so that the search hardly grows with a cluster. Replicas come in
groups of equal ones. In a given time of a step each group can do so many samples, whatever the others do: so
for each set of groups the search asks whether together they can do the batch in less time than the best plan
yet, and shortens that time until they cannot. Pure functions, without torch.
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
    """Which groups of replicas a plan has."""

    spans: tuple[tuple[int, int], ...]
    """Kinds of devices that replicas of one group have stages on."""
    singles: tuple[int, ...]
    """Kinds that have replicas of their own. Of the two that others span, one may: on what these leave."""

    @property
    def groups(self) -> int:
        return len(self.spans) + len(self.singles)

    @property
    def kinds(self) -> set[int]:
        return {kind for span in self.spans for kind in span} | set(self.singles)


class Share(NamedTuple):
    """A group of equal replicas, and how many micro-batches each of them can do."""

    placed: Placed
    micro_batches: int

    @property
    def samples(self) -> int:
        """Of all of them."""
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
    """The fastest plan of each set of groups that the best one does not rule out, and of each kind alone.

    Args:
        problem: of it the model, the batch and the program count; the machines are the fleet's.
        start: what holds for every replica: precision and compile. Whether ranks of `tp` share the sequence
            is as the job says.
        tolerance: what a more complicated plan must gain, as a share of the time; far below what a forecast
            can tell apart. With 0 the best of the space is found.

    Raises:
        JobError: the model is no decoder, or no kind of device computes in the plan's precision.
    """
    began = time.perf_counter()
    if problem.dimensions is None:
        raise JobError(
            "plans on unlike machines are searched for decoders only",
            "plan for one kind of machines of the cluster, or give parallel.batch_shares",
        )
    costs = MixedCosts(problem, fleet, replace(start, sequence=problem.job.parallel.sequence))
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
    def __init__(self, costs: MixedCosts, space: MixedSpace, tolerance: float) -> None:
        self.costs, self.space = costs, space
        self.gain = 1 - max(tolerance, 1e-9)
        self.fleet, self.batch = costs.fleet, costs.problem.global_batch
        self.placer = Placer(costs)
        self.usable = [number for number, kind in enumerate(self.fleet.kinds) if costs.can_compute(kind)]
        self._options: dict[tuple[int, ...], Options] = {}
        # For the time of a step that was asked for last:
        self._asked = 0.0
        self._uppers: dict[tuple[int, ...], Numbers] = {}
        self._densities: dict[int, float] = {}
        self._singles: dict[tuple[object, ...], Share | None] = {}
        self.found: list[Candidate] = []
        self.best = math.inf
        self.considered = 0
        self._fitting = 0
        """Replicas that were placed and fit into memory."""
        self.pruned = Counter[str]()

    def run(self) -> None:
        for shape in _shapes(self.usable, self.space.rest):
            for shard in self.space.shard:
                # A kind alone is what a mixed plan is compared with, and so is always found.
                alone = len(shape.kinds) == 1
                found = self._shortest(shape, shard, math.inf if alone else self.best)
                if found is None:
                    self.pruned["slower, or too large"] += 1
                    continue
                self.found.append(candidate(self.costs, found, shard, self.batch))
                self.best = min(self.best, self.found[-1].seconds)

    # ------------------------------------------------------------ one set of groups

    def _shortest(self, shape: Shape, shard: Shard, limit: float) -> list[Share] | None:
        """Groups that do the batch in the least time below `limit`; None where none do."""
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
        """Groups that do the batch in whatever time; None where none fit into memory."""
        flops = self.costs.problem.workload.flops_per_sample * self.batch
        seconds = flops / (self.fleet.devices * 1e15)
        while seconds < _LONGEST_SECONDS:
            shares = self._within(shape, shard, seconds)
            if shares is not None:
                return self._tightened(shares)
            seconds *= 2
        return None

    def _tightened(self, shares: list[Share]) -> tuple[list[Share], float]:
        """The same groups with as few micro-batches as do the batch in the least time, and that time."""
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
        """Whether every replica has something to do, and the batch is done."""
        replicas = sum(share.placed.replicas.count for share in shares)
        return (
            all(share.micro_batches > 0 for share in shares)
            and replicas <= self.batch
            and sum(share.samples for share in shares) >= self.batch
        )

    def _within(self, shape: Shape, shard: Shard, seconds: float) -> list[Share] | None:
        """Groups that together do the batch within `seconds`; None where there are none."""
        self.considered += 1
        everything = {kind: float(self.fleet.kinds[kind].devices) for kind in shape.kinds}
        # The most that each part of the shape can do at all.
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
        """Replicas on one kind of device that do the most samples."""
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
        """Replicas that span two kinds, with those on what they leave, that do the most samples together."""
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
        """None where it does not fit into memory, or does less than the `wanted` samples in that time."""
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
        if nodes not in self._options:
            self._options[nodes] = Options(self.costs, self.space, nodes)
        return self._options[nodes]

    def _most(self, nodes: tuple[int, ...], seconds: float) -> Numbers:
        """As `Options.most_micro_batches`."""
        self._forget(seconds)
        if nodes not in self._uppers:
            self._uppers[nodes] = self._of(nodes).most_micro_batches(seconds)
        return self._uppers[nodes]

    def _forget(self, seconds: float) -> None:
        """What is known of another time than the one that is asked for now."""
        if self._asked != seconds:
            self._asked, self._uppers, self._densities, self._singles = seconds, {}, {}, {}

    def _density(self, kind: int, seconds: float) -> float:
        """Samples that one device does at most."""
        self._forget(seconds)
        if kind not in self._densities:
            self._densities[kind] = self._densest(kind, seconds)
        return self._densities[kind]

    def _densest(self, kind: int, seconds: float) -> float:
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
        """Samples that each option does at most, with replicas on what it leaves; and its copies."""
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
"""Of a step; what takes longer, nobody runs."""


def _shapes(kinds: Sequence[int], rest: bool) -> Iterator[Shape]:
    """All sets of groups, those with the fewest groups and without spans first."""
    pairs = list(itertools.combinations(kinds, 2))
    shapes = []
    for number in range(len(kinds) // 2 + 1):
        for spans in itertools.combinations(pairs, number):
            if len({kind for span in spans for kind in span}) < 2 * number:
                continue
            for size in range(len(kinds) + 1):
                for singles in itertools.combinations(kinds, size):
                    # As many replicas span two kinds as there are devices for: of one kind nothing is left.
                    most = max((len({*span} & {*singles}) for span in spans), default=0)
                    if most <= int(rest):
                        shapes.append(Shape(spans, singles))
    return iter(
        sorted((shape for shape in shapes if shape.groups), key=lambda one: (len(one.spans), one.groups))
    )


# ---------------------------------------------------------------- plans


def candidate(costs: MixedCosts, shares: Sequence[Share], shard: Shard, batch: int) -> Candidate:
    plan = placed_plan(costs.start, shares, shard, batch)
    return Candidate(plan, mixed_forecast(costs, plan, batch), NOT_RUN)


def placed_plan(start: Plan, shares: Sequence[Share], shard: Shard, batch: int) -> Plan:
    """The batch split in proportion to what the groups can do, evenly within each."""
    whole = sum(share.samples for share in shares)
    sizes = [max(batch * share.samples // whole, share.placed.replicas.count) for share in shares]
    # What rounding left goes where there is room, what it gave too much comes from where there is most.
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
    """Of a placed plan; its memory is that of the stage which fills its device most."""
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
