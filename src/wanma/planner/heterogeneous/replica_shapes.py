"""Replica shapes on a heterogeneous cluster, by the thousand: sizes, and upper bounds of their samples.

A shape gives the kinds of devices of a replica's stages, the number of stages on each and their `tp`; the
placement of its blocks follows from their cost (`stage_placement`). Bounds here ignore schedule and memory:
they are never below a shape's true value, so that a search that omits what they exclude is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wanma.job.sections.parallel import Recompute, Shard
from wanma.planner.heterogeneous.costs import HeterogeneousCosts
from wanma.planner.rules.predicates import tp_divides_model

Array = NDArray[np.float64]


class StageSegment(NamedTuple):
    """Consecutive stages on one kind of device."""

    pool: int
    tp: int
    stage_count: int

    @property
    def device_count(self) -> int:
        return self.tp * self.stage_count


class ReplicaShape(NamedTuple):
    """Replica shape: one replica without its stage boundaries."""

    segments: tuple[StageSegment, ...]
    micro_batch: int
    recompute: Recompute

    @property
    def stage_count(self) -> int:
        return sum(segment.stage_count for segment in self.segments)


@dataclass(frozen=True)
class HeterogeneousSpace:
    """Search space of plans for heterogeneous clusters: values of every setting.

    A replica is on one kind of device or spans two, with the stages of each kind next to each other. It has
    as many copies as there are devices for; where these leave devices of one of two kinds, they may have
    replicas of their own (`uses_leftover_devices`).
    """

    tp: tuple[int, ...] = (1, 2, 4, 8)
    stage_counts: tuple[int, ...] = tuple(range(1, 17))
    """Numbers of stages of one replica."""
    micro_batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    shard: tuple[Shard, ...] = ("optimizer", "none")
    max_spanning_stages: int = 10
    """Largest number of stages of a replica that spans two kinds."""
    uses_leftover_devices: bool = True
    """True if devices that spanning replicas leave have replicas of their own."""
    max_spanning_trials: int | None = None
    """Largest number of replicas that span two kinds and fit into memory, tried for one set of groups and
    step time, those with most samples first. None: all that a bound does not exclude."""
    max_single_pool_trials: int | None = None
    """The same limit for replicas on one kind."""

    @classmethod
    def for_pools(cls, pool_count: int) -> HeterogeneousSpace:
        """Return the search space for clusters of so many kinds of devices.

        Equal replicas always shard the optimizer state: not to do so needs more memory and saves next to no
        time. With more than two kinds, devices that spanning replicas leave stay idle: replicas on them are
        rarely better than each kind by itself, and excluding them takes most of the time. So does the proof
        that no replica far down the list is better: of two jobs measured, one got a plan 1 % faster by it.
        """
        return cls(
            shard=("optimizer",),
            uses_leftover_devices=pool_count <= 2,
            max_spanning_trials=200,
            max_single_pool_trials=128,
        )


class ReplicaShapes:
    """All replica shapes for one or two kinds of devices, with upper bounds of their samples."""

    def __init__(self, costs: HeterogeneousCosts, space: HeterogeneousSpace, pools: tuple[int, ...]) -> None:
        self._segments = list(_segments(costs, space, pools))
        self._variants = list(itertools.product(space.micro_batch, space.recompute))
        count, variants = len(self._segments), len(self._variants)
        tables = _LayerTimeTables(costs, self._variants)

        def of_segments(value: Callable[[StageSegment, bool], Array]) -> Array:
            """Return values of each segment and, as a row, variant, as an (options, kinds) array."""
            rows = [[value(segment, _has_several_stages(row)) for segment in row] for row in self._segments]
            cube = np.array(rows).reshape(count, len(pools), variants)
            values: Array = cube.transpose(0, 2, 1).reshape(count * variants, len(pools))
            return values

        ones = np.ones(variants)
        block = of_segments(tables.block)
        stages = of_segments(lambda segment, _: segment.stage_count * ones)
        self.samples_per_micro_batch = np.tile(np.array([float(size) for size, _ in self._variants]), count)
        columns = [
            [next(row.device_count for row in rows if row.pool == node) for node in pools]
            for rows in self._segments
        ]
        devices = np.array(columns, dtype=np.float64).reshape(count, len(pools))
        self.devices_by_pool: Array = np.repeat(devices, variants, axis=0)
        """Devices of one replica, of shape (options, kinds)."""
        layers = float(costs.dimensions.layers)
        # With two kinds, the end layers may be on either.
        ends = of_segments(tables.ends)[:, 0] if len(pools) == 1 else np.zeros(count * variants)
        self._stage_counts = stages.sum(axis=1)
        self._average_seconds = (layers + ends / block[:, 0]) / (stages / block).sum(axis=1)
        # All blocks on the faster kind.
        fast = np.argmin(block, axis=1)[:, None]
        self._fastest_seconds = layers * np.take_along_axis(block, fast, 1)[:, 0] + ends
        self._fastest_stages = np.take_along_axis(stages, fast, 1)[:, 0]
        self._backward = of_segments(tables.backward).min(axis=1)
        self._slowest_seconds = np.maximum(
            _whole_block_stage_seconds(stages, block, costs.dimensions.layers), self._average_seconds
        )

    def min_seconds(self, number: int, micro_batches: int, slowest_stage_seconds: float) -> float:
        """Return a lower bound of a replica's seconds, given one of its slowest stage's.

        `max_micro_batches` gives the reasoning.
        """
        if math.isinf(slowest_stage_seconds):
            return slowest_stage_seconds
        stage_count = float(self._stage_counts[number])
        rounds = micro_batches - stage_count + (stage_count - 1) * float(self._backward[number])
        return (
            max(float(self._fastest_seconds[number]), slowest_stage_seconds) + rounds * slowest_stage_seconds
        )

    def max_micro_batches_at(self, number: int, seconds: float, slowest_stage_seconds: float) -> int:
        """Return an upper bound of a replica's micro-batches in `seconds`; the inverse of `min_seconds`."""
        if math.isinf(slowest_stage_seconds):
            return 0
        stage_count = float(self._stage_counts[number])
        remaining_seconds = seconds - max(float(self._fastest_seconds[number]), slowest_stage_seconds)
        count = math.floor(
            (
                remaining_seconds / slowest_stage_seconds
                + stage_count
                - (stage_count - 1) * float(self._backward[number])
            )
            * (1 + 1e-12)
        )
        return count if count >= stage_count else 0

    def __getitem__(self, number: int) -> ReplicaShape:
        segments, variant = divmod(number, len(self._variants))
        return ReplicaShape(self._segments[segments], *self._variants[variant])

    def max_micro_batches(self, seconds: float) -> Array:
        """Return an upper bound of the micro-batches of one replica of each option in `seconds`.

        Under 1F1B the first micro-batch comes back to stage s when it has passed all stages forward and those
        behind s backward; till then s runs as many forwards as there are stages from it on. Its remaining
        work, and the way of the last micro-batch from it to the first stage, take for p stages and m
        micro-batches at least W + (m − p) c + (p − 1) b, for W the time of one micro-batch in all stages, c
        that in the slowest stage and b its backward's. Blocks that are spread evenly over different stages
        make c as small as possible, and only moving them to faster stages makes W smaller: between the two,
        the sum is least at one end or the other.
        """
        before = self._stage_counts - (self._stage_counts - 1) * self._backward
        by_average = seconds / self._average_seconds - self._stage_counts
        by_fastest = (seconds - self._fastest_seconds) * self._fastest_stages / self._fastest_seconds
        by_slowest = (
            seconds - np.maximum(self._fastest_seconds, self._slowest_seconds)
        ) / self._slowest_seconds
        bound = np.floor((np.minimum(np.maximum(by_average, by_fastest), by_slowest) + before) * (1 + 1e-12))
        # 1F1B runs at least as many as there are stages.
        counts: Array = np.where(bound < self._stage_counts, 0.0, bound)
        return counts


def _whole_block_stage_seconds(stages: Array, block: Array, layers: int) -> Array:
    """Return the slowest stage's seconds with whole blocks in each stage, of shape (options,)."""
    slowest = np.full(len(stages), np.inf)
    for kind in range(stages.shape[1]):
        for number in range(layers + 1):
            limit = number * block[:, kind]
            block_counts = (stages * np.floor(limit[:, None] / block * (1 + 1e-12))).sum(axis=1)
            slowest = np.where(block_counts >= layers, np.minimum(slowest, limit), slowest)
    return slowest


class _LayerTimeTables:
    """Tables of layer costs by kind of device and `tp`, as rows over the variants.

    A variant is a pair of micro-batch and recompute.
    """

    def __init__(self, costs: HeterogeneousCosts, variants: Sequence[tuple[int, Recompute]]) -> None:
        self._costs, self._variants = costs, variants
        self._rows: dict[tuple[int, int, bool], tuple[Array, Array, Array]] = {}

    def block(self, segment: StageSegment, pipelined: bool) -> Array:
        """Return the seconds of the cheapest block; where blocks differ, a stage may hold these."""
        return self._of(segment, pipelined)[0]

    def ends(self, segment: StageSegment, pipelined: bool) -> Array:
        """Return the seconds of the layers outside the blocks."""
        return self._of(segment, pipelined)[1]

    def backward(self, segment: StageSegment, pipelined: bool) -> Array:
        """Return the least share of backward in a layer's seconds, 0 .. 1."""
        return self._of(segment, pipelined)[2]

    def _of(self, segment: StageSegment, pipelined: bool) -> tuple[Array, Array, Array]:
        """Return (block, ends, backward share) rows of one kind and `tp`, from a cache."""
        key = (segment.pool, segment.tp, pipelined)
        if key not in self._rows:
            # Lowest cost: no gradients to add up, no weights to cast.
            units = [
                self._costs.layer_times(
                    segment.pool,
                    segment.tp,
                    *variant,
                    pipelined=pipelined,
                    accumulates_gradients=False,
                    sharded=True,
                )
                for variant in self._variants
            ]
            self._rows[key] = (
                np.array([min(part.seconds for part in unit.blocks) for unit in units]),
                np.array([unit.pre_block.seconds + unit.post_block.seconds for unit in units]),
                np.array(
                    [
                        min(
                            part.backward / part.seconds
                            for part in (*unit.blocks, unit.pre_block, unit.post_block)
                        )
                        for unit in units
                    ]
                ),
            )
        return self._rows[key]


def _has_several_stages(segments: Sequence[StageSegment]) -> bool:
    """Return whether a replica has several stages."""
    return sum(segment.stage_count for segment in segments) > 1


def _segments(
    costs: HeterogeneousCosts, space: HeterogeneousSpace, pools: tuple[int, ...]
) -> Iterator[tuple[StageSegment, ...]]:
    """Yield the segments of every replica with stages on all of these kinds of devices, in either order."""
    widths = [[tp for tp in space.tp if _tp_fits(costs, node, tp)] for node in pools]
    layers = costs.dimensions.layers
    for order in itertools.permutations(range(len(pools))):
        for split in itertools.product(space.stage_counts, repeat=len(pools)):
            max_stages = layers + 2 if len(pools) == 1 else min(layers + 2, space.max_spanning_stages)
            if sum(split) not in space.stage_counts or sum(split) > max_stages:
                continue
            for tps in itertools.product(*(widths[at] for at in order)):
                segments = tuple(
                    StageSegment(pools[at], tp, stages)
                    for at, tp, stages in zip(order, tps, split, strict=True)
                )
                if all(
                    segment.device_count <= costs.hardware.pools[segment.pool].device_count
                    for segment in segments
                ):
                    yield segments


def _tp_fits(costs: HeterogeneousCosts, pool: int, tp: int) -> bool:
    """Return whether `tp` ranks fit into a node, and divide the model's dimensions and the sequence."""
    if costs.hardware.pools[pool].devices_per_node % tp or not tp_divides_model(costs.dimensions, tp):
        return False
    return not costs.base_plan.sequence_parallel or costs.problem.sequence_length % tp == 0
