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

from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.sections.parallel import Shard
from wanma.planner.heterogeneous.costs import HeterogeneousCosts, LayerTimes, shards_optimizer_state
from wanma.planner.heterogeneous.replica_pipeline import ReplicaPipeline, replica_pipeline_seconds
from wanma.planner.heterogeneous.replica_shapes import ReplicaShape, StageSegment


class PlacedReplicas:
    """Replica shape with its cuts and its number of copies."""

    def __init__(
        self, costs: HeterogeneousCosts, replicas: ReplicaPlacement, group_count: int, shard: Shard
    ) -> None:
        self.replicas = replicas
        self.min_micro_batches = len(replicas.places)
        """Fewest micro-batches that 1F1B runs."""
        self._costs, self._groups, self._shard = costs, group_count, shard
        self._seconds: dict[int, float] = {}

    @cached_property
    def _max_micro_batches_in_memory(self) -> int:
        """Largest number of micro-batches in memory; a pipeline has a send buffer for each of them."""
        low, high = self.min_micro_batches, self._costs.problem.global_batch // self.replicas.micro_batch + 1
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
            pipeline, tail = self._accumulation_costs if micro_batches > 1 else self._single_micro_batch_costs
            self._seconds[micro_batches] = replica_pipeline_seconds(pipeline, micro_batches) + tail
        return self._seconds[micro_batches]

    @cached_property
    def _single_micro_batch_costs(self) -> tuple[ReplicaPipeline, float]:
        return self._costs_of(accumulates_gradients=False)

    @cached_property
    def _accumulation_costs(self) -> tuple[ReplicaPipeline, float]:
        return self._costs_of(accumulates_gradients=True)

    def _costs_of(self, *, accumulates_gradients: bool) -> tuple[ReplicaPipeline, float]:
        """Return the pipeline of one copy, and the seconds after its last backward."""
        pipeline = self._costs.replica_pipeline(self.replicas, self._shard, accumulates_gradients)
        tail = self._costs.step_tail(self.replicas, pipeline.stages, self._groups, self._shard)
        return pipeline, tail.seconds

    def max_micro_batches(self, seconds: float) -> int:
        """Return the most micro-batches of each copy in `seconds`; 0 if fewer than its schedule needs."""
        min_count = self.min_micro_batches
        if self.seconds(min_count) > seconds:
            return 0
        # Each micro-batch passes the slowest stage.
        pipeline, tail = self._single_micro_batch_costs if min_count == 1 else self._accumulation_costs
        high = min(
            max(int((seconds - tail) / pipeline.slowest_stage_seconds), min_count),
            self._max_micro_batches_in_memory,
        )
        low = min_count
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
    slowest_stage_seconds: float
    """Lower bound of the seconds of the slowest stage."""


class _Stage(NamedTuple):
    """Properties of one stage that decide a cut."""

    block_seconds: float
    """Seconds of one block."""
    end_layer_seconds: float
    """Seconds of its layers outside the blocks."""
    max_blocks: int
    min_blocks: int

    def blocks_within(self, limit: float) -> int:
        """Return the number of blocks in `limit` seconds; −1 where the other layers alone take longer."""
        if self.end_layer_seconds > limit:
            return -1
        return min(int((limit - self.end_layer_seconds) / self.block_seconds * (1 + 1e-12)), self.max_blocks)


@dataclass
class StagePlacer:
    """Placement of replica shapes on stages, with a cache of results."""

    costs: HeterogeneousCosts

    def __post_init__(self) -> None:
        self._cuts: dict[tuple[ReplicaShape, bool], _Cut | None] = {}
        self._max_blocks_by_key: dict[tuple[object, ...], int] = {}
        self._replicas_by_key: dict[tuple[ReplicaShape, int, int, Shard], PlacedReplicas | None] = {}
        self._replicas: dict[tuple[ReplicaShape, int, Shard], ReplicaPlacement | None] = {}

    def place(self, shape: ReplicaShape, count: int, group_count: int, shard: Shard) -> PlacedReplicas | None:
        """Return `count` copies of a placed shape; None where they fit into no memory.

        Args:
            shape: replica shape to place.
            group_count: number of groups of equal replicas, as in `HeterogeneousCosts.step_tail`.
            shard: sharding of the optimizer state among the copies, as in `HeterogeneousCosts.step_tail`.
        """
        key = (shape, count, group_count, shard)
        if key not in self._replicas_by_key:
            replicas = self.replicas(shape, count, shard)
            self._replicas_by_key[key] = (
                None if replicas is None else PlacedReplicas(self.costs, replicas, group_count, shard)
            )
        return self._replicas_by_key[key]

    def slowest_stage_bound(self, shape: ReplicaShape, sharded: bool) -> float:
        """Return a lower bound of the slowest stage's seconds in any number of copies; infinite if none fits.

        Args:
            sharded: the copies shard the optimizer state, as in `HeterogeneousCosts.layer_times`.
        """
        cut = self._widest_cut(shape, sharded)
        return cut.slowest_stage_seconds if cut is not None else math.inf

    def _widest_cut(self, shape: ReplicaShape, sharded: bool) -> _Cut | None:
        """Return the cut for so many copies that their sharded states take no memory."""
        if (shape, sharded) not in self._cuts:
            max_blocks = [self._max_blocks(shape, stage) for stage in range(shape.stage_count)]
            self._cuts[shape, sharded] = (
                None if min(max_blocks) < 0 else self._cut(shape, sharded, max_blocks)
            )
        return self._cuts[shape, sharded]

    def _max_blocks(self, shape: ReplicaShape, stage: int) -> int:
        """Return the most blocks that a stage can ever hold; −1 where it fits with none.

        That is in any number of copies and of micro-batches.
        """
        place = _places(shape)[stage]
        # Memory depends on the number of stages behind it, and on stages before it.
        later_stages, first = shape.stage_count - 1 - stage, stage == 0
        key = (place, shape.micro_batch, shape.recompute, later_stages, first)
        if key not in self._max_blocks_by_key:
            stand_in = ReplicaShape(
                (StageSegment(place.node, place.tp, later_stages + (1 if first else 2)),),
                shape.micro_batch,
                shape.recompute,
            )
            # One copy needs no communicator, many shard the states.
            max_blocks = -1
            for count in (1, _UNBOUNDED_COPIES):
                replicas = _replicas(stand_in, count, [0] * stand_in.stage_count)
                max_blocks = self._max_fitting_blocks(
                    replicas, "optimizer", 0 if first else 1, later_stages + 1, max_blocks
                )
            self._max_blocks_by_key[key] = max_blocks
        return self._max_blocks_by_key[key]

    def replicas(self, shape: ReplicaShape, count: int, shard: Shard) -> ReplicaPlacement | None:
        """Return the copies with the best cuts that fit into memory; None where none do."""
        key = (shape, count, shard)
        if key not in self._replicas:
            self._replicas[key] = self._fitting_replicas(shape, count, shard)
        return self._replicas[key]

    def _fitting_replicas(self, shape: ReplicaShape, count: int, shard: Shard) -> ReplicaPlacement | None:
        sharded = shards_optimizer_state(count, shard)
        widest = self._widest_cut(shape, sharded)
        if widest is None:
            return None
        replicas = _replicas(shape, count, widest.blocks)
        # Memory of further micro-batches limits their number (`PlacedReplicas.max_micro_batches`).
        if self.costs.fits(replicas, shard, shape.stage_count):
            return replicas
        if shape.stage_count == 1:
            return None
        max_blocks = [
            self._max_fitting_blocks(replicas, shard, stage, shape.stage_count)
            for stage in range(shape.stage_count)
        ]
        limited = self._cut(shape, sharded, max_blocks) if min(max_blocks) >= 0 else None
        return None if limited is None else _replicas(shape, count, limited.blocks)

    def _max_fitting_blocks(
        self, replicas: ReplicaPlacement, shard: Shard, stage: int, micro_batches: int, known: int = -1
    ) -> int:
        """Return the most blocks with which a stage fits into its device; −1 where it fits with none.

        Args:
            known: number of blocks that is known to fit, or −1.
        """
        layers = self.costs.dimensions.layers
        memory_bytes = self.costs.hardware.pools[replicas.places[stage].node].memory_limit_bytes
        low, high = known, layers
        middle = layers  # in a deep pipeline all of them usually fit
        while low < high:
            # Blocks of the group that ends the model.
            blocks = self.costs.block_counts(layers - middle, layers)
            memory = self.costs.stage_memory(replicas, shard, micro_batches, stage, blocks)
            if memory.memory_bytes <= memory_bytes:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _cut(self, shape: ReplicaShape, sharded: bool, max_blocks: Sequence[int]) -> _Cut | None:
        """Return the cut with the fastest slowest stage; None where there are too few blocks.

        Args:
            most: largest number of blocks of each stage.
        """
        blocks = self.costs.dimensions.layers
        places = _places(shape)
        last = len(places) - 1
        units = [
            self.costs.layer_times(
                place.node,
                place.tp,
                shape.micro_batch,
                shape.recompute,
                pipelined=last > 0,
                accumulates_gradients=last > 0,
                sharded=sharded,
            )
            for place in places
        ]
        stages = [
            _Stage(
                unit.blocks[0].seconds,
                unit.pre_block.seconds * (number == 0) + unit.post_block.seconds * (number == last),
                max_blocks[number],
                # The first and the last stage hold other layers, and need no block.
                0 if number in (0, last) else 1,
            )
            for number, unit in enumerate(units)
        ]
        has_equal_blocks = len(units[0].blocks) == 1
        kinds = Counter(stages)

        def is_possible(limit: float) -> bool:
            if not has_equal_blocks:
                return self._fill_in_order(units, stages, limit) is not None
            rooms = [
                (stage.blocks_within(limit), stage.min_blocks, number) for stage, number in kinds.items()
            ]
            return all(room >= min_blocks for room, min_blocks, _ in rooms) and (
                sum(number * min_blocks for _, min_blocks, number in rooms)
                <= blocks
                <= sum(number * room for room, _, number in rooms)
            )

        low, high = 0.0, sum(blocks * max(part.seconds for part in unit.blocks) for unit in units)
        high += max(stage.end_layer_seconds for stage in stages)
        if not is_possible(high):
            return None
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        filled = (
            self._fill_fastest_first(stages, high)
            if has_equal_blocks
            else self._fill_in_order(units, stages, high)
        )
        return None if filled is None else _Cut(filled, low)

    def _fill_fastest_first(self, stages: Sequence[_Stage], limit: float) -> tuple[int, ...]:
        """Return the blocks of each stage, where none takes longer than `limit` seconds.

        The fastest stages get as many as they can; of equally fast ones the later, because they save fewer
        micro-batches.
        """
        counts = [stage.min_blocks for stage in stages]
        remaining = self.costs.dimensions.layers - sum(counts)
        for number in sorted(range(len(stages)), key=lambda number: (stages[number].block_seconds, -number)):
            added = min(stages[number].blocks_within(limit) - counts[number], remaining)
            counts[number] += added
            remaining -= added
        return tuple(counts)

    def _fill_in_order(
        self, units: Sequence[LayerTimes], stages: Sequence[_Stage], limit: float
    ) -> tuple[int, ...] | None:
        """Return the blocks of each stage, filled in order, where blocks differ; None where some are left."""
        blocks = self.costs.dimensions.layers
        counts: list[int] = []
        start = 0
        for stage, unit in zip(stages, units, strict=True):
            reserved = sum(later_stage.min_blocks for later_stage in stages[len(counts) + 1 :])
            room = min(stage.max_blocks, blocks - start - reserved)
            number = 0
            while (
                number < room
                and self._seconds(unit, start, start + number + 1) <= limit - stage.end_layer_seconds
            ):
                number += 1
            if number < stage.min_blocks or stage.end_layer_seconds > limit:
                return None
            counts.append(number)
            start += number
        return tuple(counts) if start == blocks else None

    def _seconds(self, unit: LayerTimes, start: int, stop: int) -> float:
        """Return the seconds of the blocks from `start` to `stop` in one stage."""
        counts = self.costs.block_counts(start, stop)
        return sum(count * part.seconds for count, part in zip(counts, unit.blocks, strict=True))


_UNBOUNDED_COPIES = 1 << 20
"""Number of copies with which each has next to nothing of the states that they shard."""


def _places(shape: ReplicaShape) -> list[StagePlacement]:
    """Return the place of each stage, without blocks."""
    return [
        place
        for segment in shape.segments
        for place in [StagePlacement(segment.pool, 0, segment.tp)] * segment.stage_count
    ]


def _replicas(shape: ReplicaShape, count: int, blocks: Sequence[int]) -> ReplicaPlacement:
    """Return `count` copies of a replica shape with so many blocks in each stage."""
    places = tuple(
        StagePlacement(place.node, number, place.tp)
        for place, number in zip(_places(shape), blocks, strict=True)
    )
    return ReplicaPlacement(count, places, shape.micro_batch, shape.recompute)
