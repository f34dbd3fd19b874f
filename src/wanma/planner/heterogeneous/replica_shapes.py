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
from wanma.planner.heterogeneous.costs import MixedCosts
from wanma.planner.rules.predicates import tensor_fits

Numbers = NDArray[np.float64]


class Segment(NamedTuple):
    """Consecutive stages on one kind of device."""

    node: int
    tp: int
    stages: int

    @property
    def devices(self) -> int:
        return self.tp * self.stages


class Option(NamedTuple):
    """Replica shape: one replica without its stage boundaries."""

    segments: tuple[Segment, ...]
    micro_batch: int
    recompute: Recompute

    @property
    def stages(self) -> int:
        return sum(segment.stages for segment in self.segments)


@dataclass(frozen=True)
class MixedSpace:
    """Search space of plans for heterogeneous clusters: values of every setting.

    A replica is on one kind of device or spans two, with the stages of each kind next to each other. It has
    as many copies as there are devices for; where these leave devices of one of two kinds, they may have
    replicas of their own (`rest`).
    """

    tp: tuple[int, ...] = (1, 2, 4, 8)
    stages: tuple[int, ...] = tuple(range(1, 17))
    """Numbers of stages of one replica."""
    micro_batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    shard: tuple[Shard, ...] = ("optimizer", "none")
    spanning: int = 10
    """Largest number of stages of a replica that spans two kinds."""
    rest: bool = True
    """True if devices that spanning replicas leave have replicas of their own."""
    spanning_looks: int | None = None
    """Largest number of replicas that span two kinds and fit into memory, tried for one set of groups and
    step time, those with most samples first. None: all that a bound does not exclude."""
    single_looks: int | None = None
    """The same limit for replicas on one kind."""

    @classmethod
    def of_kinds(cls, number: int) -> MixedSpace:
        """Return the search space for clusters of so many kinds of devices.

        Equal replicas always shard the optimizer state: not to do so needs more memory and saves next to no
        time. With more than two kinds, devices that spanning replicas leave stay idle: replicas on them are
        rarely better than each kind by itself, and excluding them takes most of the time. So does the proof
        that no replica far down the list is better: of two jobs measured, one got a plan 1 % faster by it.
        """
        return cls(shard=("optimizer",), rest=number <= 2, spanning_looks=200, single_looks=128)


class Options:
    """All replica shapes for one or two kinds of devices, with upper bounds of their samples."""

    def __init__(self, costs: MixedCosts, space: MixedSpace, nodes: tuple[int, ...]) -> None:
        self._segments = list(_segments(costs, space, nodes))
        self._variants = list(itertools.product(space.micro_batch, space.recompute))
        count, variants = len(self._segments), len(self._variants)
        tables = _Tables(costs, self._variants)

        def of_segments(value: Callable[[Segment, bool], Numbers]) -> Numbers:
            """Return values of each segment and, as a row, variant, as an (options, kinds) array."""
            rows = [[value(one, _deep(row)) for one in row] for row in self._segments]
            cube = np.array(rows).reshape(count, len(nodes), variants)
            found: Numbers = cube.transpose(0, 2, 1).reshape(count * variants, len(nodes))
            return found

        every = np.ones(variants)
        block = of_segments(tables.block)
        stages = of_segments(lambda one, _: one.stages * every)
        self.samples = np.tile(np.array([float(size) for size, _ in self._variants]), count)
        columns = [
            [next(row.devices for row in rows if row.node == node) for node in nodes]
            for rows in self._segments
        ]
        devices = np.array(columns, dtype=np.float64).reshape(count, len(nodes))
        self.devices: Numbers = np.repeat(devices, variants, axis=0)
        """Devices of one replica, of shape (options, kinds)."""
        layers = float(costs.dimensions.layers)
        # With two kinds, the end layers may be on either.
        ends = of_segments(tables.ends)[:, 0] if len(nodes) == 1 else np.zeros(count * variants)
        self._deep = stages.sum(axis=1)
        self._even = (layers + ends / block[:, 0]) / (stages / block).sum(axis=1)
        # All blocks on the faster kind.
        fast = np.argmin(block, axis=1)[:, None]
        self._fast_work = layers * np.take_along_axis(block, fast, 1)[:, 0] + ends
        self._fast_stages = np.take_along_axis(stages, fast, 1)[:, 0]
        self._backward = of_segments(tables.backward).min(axis=1)
        self._pace = np.maximum(_whole_blocks_pace(stages, block, costs.dimensions.layers), self._even)

    def least_seconds(self, number: int, micro_batches: int, pace: float) -> float:
        """Return a lower bound of a replica's seconds, if its slowest stage takes at least `pace`.

        `most_micro_batches` gives the reasoning.
        """
        if math.isinf(pace):
            return pace
        deep = float(self._deep[number])
        rest = micro_batches - deep + (deep - 1) * float(self._backward[number])
        return max(float(self._fast_work[number]), pace) + rest * pace

    def most_at_pace(self, number: int, seconds: float, pace: float) -> int:
        """Return an upper bound of a replica's micro-batches in `seconds`; the inverse of `least_seconds`."""
        if math.isinf(pace):
            return 0
        deep = float(self._deep[number])
        left = seconds - max(float(self._fast_work[number]), pace)
        most = math.floor((left / pace + deep - (deep - 1) * float(self._backward[number])) * (1 + 1e-12))
        return most if most >= deep else 0

    def __getitem__(self, number: int) -> Option:
        segments, variant = divmod(number, len(self._variants))
        return Option(self._segments[segments], *self._variants[variant])

    def most_micro_batches(self, seconds: float) -> Numbers:
        """Return an upper bound of the micro-batches of one replica of each option in `seconds`.

        Under 1F1B the first micro-batch comes back to stage s when it has passed all stages forward and those
        behind s backward; till then s runs as many forwards as there are stages from it on. Its remaining
        work, and the way of the last micro-batch from it to the first stage, take for p stages and m
        micro-batches at least W + (m − p) c + (p − 1) b, for W the time of one micro-batch in all stages, c
        that in the slowest stage and b its backward's. Blocks that are spread evenly over different stages
        make c as small as possible, and only moving them to faster stages makes W smaller: between the two,
        the sum is least at one end or the other.
        """
        before = self._deep - (self._deep - 1) * self._backward
        even = seconds / self._even - self._deep
        fast = (seconds - self._fast_work) * self._fast_stages / self._fast_work
        whole = (seconds - np.maximum(self._fast_work, self._pace)) / self._pace
        most = np.floor((np.minimum(np.maximum(even, fast), whole) + before) * (1 + 1e-12))
        # 1F1B runs at least as many as there are stages.
        found: Numbers = np.where(most < self._deep, 0.0, most)
        return found


def _whole_blocks_pace(stages: Numbers, block: Numbers, layers: int) -> Numbers:
    """Return the slowest stage's seconds with whole blocks in each stage, of shape (options,)."""
    found = np.full(len(stages), np.inf)
    for kind in range(stages.shape[1]):
        for number in range(layers + 1):
            limit = number * block[:, kind]
            held = (stages * np.floor(limit[:, None] / block * (1 + 1e-12))).sum(axis=1)
            found = np.where(held >= layers, np.minimum(found, limit), found)
    return found


class _Tables:
    """Tables of layer costs by kind of device and `tp`, as rows over the variants.

    A variant is a pair of micro-batch and recompute.
    """

    def __init__(self, costs: MixedCosts, variants: Sequence[tuple[int, Recompute]]) -> None:
        self._costs, self._variants = costs, variants
        self._rows: dict[tuple[int, int, bool], tuple[Numbers, Numbers, Numbers]] = {}

    def block(self, one: Segment, deep: bool) -> Numbers:
        """Return the seconds of the cheapest block; where blocks differ, a stage may hold these."""
        return self._of(one, deep)[0]

    def ends(self, one: Segment, deep: bool) -> Numbers:
        """Return the seconds of the layers outside the blocks."""
        return self._of(one, deep)[1]

    def backward(self, one: Segment, deep: bool) -> Numbers:
        """Return the least share of backward in a layer's seconds, 0 .. 1."""
        return self._of(one, deep)[2]

    def _of(self, one: Segment, deep: bool) -> tuple[Numbers, Numbers, Numbers]:
        """Return (block, ends, backward share) rows of one kind and `tp`, from a cache."""
        key = (one.node, one.tp, deep)
        if key not in self._rows:
            # Lowest cost: no gradients to add up, no weights to cast.
            units = [
                self._costs.units(one.node, one.tp, *variant, pipelined=deep, many=False, sharded=True)
                for variant in self._variants
            ]
            self._rows[key] = (
                np.array([min(part.seconds for part in unit.blocks) for unit in units]),
                np.array([unit.first.seconds + unit.last.seconds for unit in units]),
                np.array(
                    [
                        min(part.backward / part.seconds for part in (*unit.blocks, unit.first, unit.last))
                        for unit in units
                    ]
                ),
            )
        return self._rows[key]


def _deep(segments: Sequence[Segment]) -> bool:
    """Return whether a replica has several stages."""
    return sum(one.stages for one in segments) > 1


def _segments(costs: MixedCosts, space: MixedSpace, nodes: tuple[int, ...]) -> Iterator[tuple[Segment, ...]]:
    """Yield the segments of every replica with stages on all of these kinds of devices, in either order."""
    widths = [[tp for tp in space.tp if _tp_fits(costs, node, tp)] for node in nodes]
    layers = costs.dimensions.layers
    for order in itertools.permutations(range(len(nodes))):
        for split in itertools.product(space.stages, repeat=len(nodes)):
            most = layers + 2 if len(nodes) == 1 else min(layers + 2, space.spanning)
            if sum(split) not in space.stages or sum(split) > most:
                continue
            for tps in itertools.product(*(widths[at] for at in order)):
                segments = tuple(
                    Segment(nodes[at], tp, stages) for at, tp, stages in zip(order, tps, split, strict=True)
                )
                if all(one.devices <= costs.fleet.kinds[one.node].devices for one in segments):
                    yield segments


def _tp_fits(costs: MixedCosts, node: int, tp: int) -> bool:
    """Return whether `tp` ranks fit into a node, and divide the model's dimensions and the sequence."""
    if costs.fleet.kinds[node].on_each % tp or not tensor_fits(costs.dimensions, tp):
        return False
    return not costs.start.sequence_parallel or costs.problem.sequence % tp == 0
