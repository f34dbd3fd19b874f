"""Placement of a replica's blocks on stages of different devices, and the replica's resulting times.

The slowest stage sets the pace; cuts make it as fast as possible within every device's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from wanma.job.plan.placement import Place, Replicas
from wanma.job.sections.parallel import Shard
from wanma.planner.heterogeneous.costs import MixedCosts, Pipeline, Units, is_sharded, replica_seconds
from wanma.planner.heterogeneous.replica_shapes import Option, Segment


class Placed:
    """Replica shape with its cuts and its number of copies."""

    def __init__(self, costs: MixedCosts, replicas: Replicas, groups: int, shard: Shard) -> None:
        self.replicas = replicas
        self.fewest = len(replicas.places)
        """Fewest micro-batches that 1F1B runs."""
        self._costs, self._groups, self._shard = costs, groups, shard
        self._seconds: dict[int, float] = {}

    @cached_property
    def _most_in_memory(self) -> int:
        """Largest number of micro-batches in memory; a pipeline has a send buffer for each of them."""
        low, high = self.fewest, self._costs.problem.global_batch // self.replicas.micro_batch + 1
        if high <= low or self._costs.fits(self.replicas, self._shard, high):
            return max(low, high)
        while low < high:
            middle = (low + high + 1) // 2
            if self._costs.fits(self.replicas, self._shard, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds of a step with so many micro-batches in each copy."""
        if micro_batches not in self._seconds:
            pipeline, tail = self._many if micro_batches > 1 else self._alone
            self._seconds[micro_batches] = replica_seconds(pipeline, micro_batches) + tail
        return self._seconds[micro_batches]

    @cached_property
    def _alone(self) -> tuple[Pipeline, float]:
        return self._of(many=False)

    @cached_property
    def _many(self) -> tuple[Pipeline, float]:
        return self._of(many=True)

    def _of(self, *, many: bool) -> tuple[Pipeline, float]:
        """Return the pipeline of one copy, and the seconds after its last backward."""
        pipeline = self._costs.pipeline(self.replicas, self._shard, many)
        tail = self._costs.tail(self.replicas, pipeline.stages, self._groups, self._shard)
        return pipeline, tail.seconds

    def most_micro_batches(self, seconds: float) -> int:
        """Return the most micro-batches of each copy in `seconds`; 0 if fewer than its schedule needs."""
        fewest = self.fewest
        if self.seconds(fewest) > seconds:
            return 0
        # Each micro-batch passes the slowest stage.
        pipeline, tail = self._alone if fewest == 1 else self._many
        high = min(max(int((seconds - tail) / pipeline.pace), fewest), self._most_in_memory)
        low = fewest
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


class _Cut(NamedTuple):
    """Stage boundaries of a replica, with a bound of its pace."""

    blocks: tuple[int, ...]
    """Number of blocks of each stage."""
    pace: float
    """Lower bound of the seconds of the slowest stage."""


class _Stage(NamedTuple):
    """Properties of one stage that decide a cut."""

    block: float
    """Seconds of one block."""
    own: float
    """Seconds of its layers outside the blocks."""
    most: int
    least: int

    def room(self, limit: float) -> int:
        """Return the number of blocks in `limit` seconds; −1 where the other layers alone take longer."""
        if self.own > limit:
            return -1
        return min(int((limit - self.own) / self.block * (1 + 1e-12)), self.most)


@dataclass
class Placer:
    """Placement of replica shapes on stages, with a cache of results."""

    costs: MixedCosts

    def __post_init__(self) -> None:
        self._cuts: dict[tuple[Option, bool], _Cut | None] = {}
        self._held: dict[tuple[object, ...], int] = {}
        self._placed: dict[tuple[Option, int, int, Shard], Placed | None] = {}
        self._replicas: dict[tuple[Option, int, Shard], Replicas | None] = {}

    def place(self, option: Option, count: int, groups: int, shard: Shard) -> Placed | None:
        """Return `count` copies of a placed shape; None where they fit into no memory.

        Args:
            option: replica shape to place.
            groups: number of groups of equal replicas, as in `MixedCosts.tail`.
            shard: sharding of the optimizer state among the copies, as in `MixedCosts.tail`.
        """
        key = (option, count, groups, shard)
        if key not in self._placed:
            replicas = self.replicas(option, count, shard)
            self._placed[key] = None if replicas is None else Placed(self.costs, replicas, groups, shard)
        return self._placed[key]

    def pace(self, option: Option, sharded: bool) -> float:
        """Return a lower bound of the slowest stage's seconds in any number of copies; infinite if none fits.

        Args:
            sharded: the copies shard the optimizer state, as in `MixedCosts.units`.
        """
        cut = self._widest_cut(option, sharded)
        return cut.pace if cut is not None else math.inf

    def _widest_cut(self, option: Option, sharded: bool) -> _Cut | None:
        """Return the cut for so many copies that their sharded states take no memory."""
        if (option, sharded) not in self._cuts:
            most = [self._most_held(option, stage) for stage in range(option.stages)]
            self._cuts[option, sharded] = None if min(most) < 0 else self._cut(option, sharded, most)
        return self._cuts[option, sharded]

    def _most_held(self, option: Option, stage: int) -> int:
        """Return the most blocks that a stage can ever hold; −1 where it fits with none.

        That is in any number of copies and of micro-batches.
        """
        place = _places(option)[stage]
        # Memory depends on the number of stages behind it, and on stages before it.
        behind, first = option.stages - 1 - stage, stage == 0
        key = (place, option.micro_batch, option.recompute, behind, first)
        if key not in self._held:
            like = Option(
                (Segment(place.node, place.tp, behind + (1 if first else 2)),),
                option.micro_batch,
                option.recompute,
            )
            # One copy needs no communicator, many shard the states.
            most = -1
            for count in (1, _ANY):
                replicas = _replicas(like, count, [0] * like.stages)
                most = self._most_fitting(replicas, "optimizer", 0 if first else 1, behind + 1, most)
            self._held[key] = most
        return self._held[key]

    def replicas(self, option: Option, count: int, shard: Shard) -> Replicas | None:
        """Return the copies with the best cuts that fit into memory; None where none do."""
        key = (option, count, shard)
        if key not in self._replicas:
            self._replicas[key] = self._fitting(option, count, shard)
        return self._replicas[key]

    def _fitting(self, option: Option, count: int, shard: Shard) -> Replicas | None:
        sharded = is_sharded(count, shard)
        widest = self._widest_cut(option, sharded)
        if widest is None:
            return None
        replicas = _replicas(option, count, widest.blocks)
        # Memory of further micro-batches limits their number (`Placed.most_micro_batches`).
        if self.costs.fits(replicas, shard, option.stages):
            return replicas
        if option.stages == 1:
            return None
        most = [self._most_fitting(replicas, shard, stage, option.stages) for stage in range(option.stages)]
        limited = self._cut(option, sharded, most) if min(most) >= 0 else None
        return None if limited is None else _replicas(option, count, limited.blocks)

    def _most_fitting(
        self, replicas: Replicas, shard: Shard, stage: int, micro_batches: int, known: int = -1
    ) -> int:
        """Return the most blocks with which a stage fits into its device; −1 where it fits with none.

        Args:
            known: number of blocks that is known to fit, or −1.
        """
        layers = self.costs.dimensions.layers
        memory_bytes = self.costs.fleet.kinds[replicas.places[stage].node].memory_bytes
        low, high = known, layers
        middle = layers  # in a deep pipeline all of them usually fit
        while low < high:
            # Blocks of the group that ends the model.
            blocks = tuple(self.costs.counts(layers - middle, layers))
            needed = self.costs.stage_memory(replicas, shard, micro_batches, stage, blocks)
            if needed.memory_bytes <= memory_bytes:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _cut(self, option: Option, sharded: bool, most: Sequence[int]) -> _Cut | None:
        """Return the cut with the fastest slowest stage; None where there are too few blocks.

        Args:
            most: largest number of blocks of each stage.
        """
        blocks = self.costs.dimensions.layers
        places = _places(option)
        last = len(places) - 1
        units = [
            self.costs.units(
                place.node,
                place.tp,
                option.micro_batch,
                option.recompute,
                pipelined=last > 0,
                many=last > 0,
                sharded=sharded,
            )
            for place in places
        ]
        stages = [
            _Stage(
                unit.blocks[0].seconds,
                unit.first.seconds * (number == 0) + unit.last.seconds * (number == last),
                most[number],
                # The first and the last stage hold other layers, and need no block.
                0 if number in (0, last) else 1,
            )
            for number, unit in enumerate(units)
        ]
        alike = len(units[0].blocks) == 1
        kinds = Counter(stages)

        def is_possible(limit: float) -> bool:
            if not alike:
                return self._filled_in_order(units, stages, limit) is not None
            rooms = [(stage.room(limit), stage.least, number) for stage, number in kinds.items()]
            return all(room >= least for room, least, _ in rooms) and (
                sum(number * least for _, least, number in rooms)
                <= blocks
                <= sum(number * room for room, _, number in rooms)
            )

        low, high = 0.0, sum(blocks * max(part.seconds for part in unit.blocks) for unit in units)
        high += max(stage.own for stage in stages)
        if not is_possible(high):
            return None
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        filled = self._filled(stages, high) if alike else self._filled_in_order(units, stages, high)
        return None if filled is None else _Cut(filled, low)

    def _filled(self, stages: Sequence[_Stage], limit: float) -> tuple[int, ...]:
        """Return the blocks of each stage, where none takes longer than `limit` seconds.

        The fastest stages get as many as they can; of equally fast ones the later, because they save fewer
        micro-batches.
        """
        found = [stage.least for stage in stages]
        rest = self.costs.dimensions.layers - sum(found)
        for number in sorted(range(len(stages)), key=lambda number: (stages[number].block, -number)):
            more = min(stages[number].room(limit) - found[number], rest)
            found[number] += more
            rest -= more
        return tuple(found)

    def _filled_in_order(
        self, units: Sequence[Units], stages: Sequence[_Stage], limit: float
    ) -> tuple[int, ...] | None:
        """Return the blocks of each stage, filled in order, where blocks differ; None where some are left."""
        blocks = self.costs.dimensions.layers
        found: list[int] = []
        start = 0
        for stage, unit in zip(stages, units, strict=True):
            needed = sum(one.least for one in stages[len(found) + 1 :])
            room = min(stage.most, blocks - start - needed)
            number = 0
            while number < room and self._seconds(unit, start, start + number + 1) <= limit - stage.own:
                number += 1
            if number < stage.least or stage.own > limit:
                return None
            found.append(number)
            start += number
        return tuple(found) if start == blocks else None

    def _seconds(self, unit: Units, start: int, stop: int) -> float:
        """Return the seconds of the blocks from `start` to `stop` in one stage."""
        counts = self.costs.counts(start, stop)
        return sum(count * part.seconds for count, part in zip(counts, unit.blocks, strict=True))


_ANY = 1 << 20
"""Number of copies with which each has next to nothing of the states that they shard."""


def _places(option: Option) -> list[Place]:
    """Return the place of each stage, without blocks."""
    return [place for one in option.segments for place in [Place(one.node, 0, one.tp)] * one.stages]


def _replicas(option: Option, count: int, blocks: Sequence[int]) -> Replicas:
    """Return `count` copies of a replica shape with so many blocks in each stage."""
    places = tuple(
        Place(place.node, number, place.tp) for place, number in zip(_places(option), blocks, strict=True)
    )
    return Replicas(count, places, option.micro_batch, option.recompute)
