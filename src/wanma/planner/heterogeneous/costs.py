"""Step time and memory of plans whose replicas are placed on nodes of different kinds.

Each stage has the cost of its own kind of device; each replica is a pipeline of its own; gradients are summed
among equal replicas first, and then among groups of different ones, over the link that joins the kinds.
Formulas are those of `cost.step` and `memory.peak`; here stages and replicas differ. Pure functions, without
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from wanma.job.forecast.forecast import Forecast, StepTime
from wanma.job.plan.placement import Place, Replicas
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute, Shard
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.cost.data_parallel import DataParallel, exposed
from wanma.planner.cost.decoder import decoder_pieces
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.cost.frozen import trained_pieces
from wanma.planner.cost.model_cost import End
from wanma.planner.cost.step import Stage, optimizer_seconds, stage_cost, uncertainty
from wanma.planner.forecast.problem import Problem
from wanma.planner.hardware_model.collective_time import (
    Group,
    all_gather_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import Link
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES
from wanma.planner.heterogeneous.node_pools import Fleet, Kind
from wanma.planner.memory.memory_table import MemoryTable, tabulate
from wanma.planner.memory.model_states import rule_of
from wanma.planner.memory.peak import memory_of_stage

MANY = 1 << 16
"""Number of micro-batches where only "more than one" matters."""


class Part(NamedTuple):
    """Cost of one micro-batch in one stage, or in one layer of it."""

    forward: float
    backward: float
    kinds: dict[str, float]
    """Seconds by kind, named as in `StepTime`."""
    parameters: float
    """Number of parameters, before `tp`."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


class Units(NamedTuple):
    """Costs of the layers from which stages are composed, on one kind of device."""

    blocks: tuple[Part, ...]
    """Costs of one block of each group."""
    first: Part
    last: Part


@dataclass(frozen=True)
class Pipeline:
    """Pipeline of one replica: costs of its stages and sends."""

    stages: tuple[Part, ...]
    sends: tuple[float, ...]
    """Seconds from the end of each stage but the last to the start of the next, and back."""

    @cached_property
    def pace(self) -> float:
        """Seconds of a micro-batch in the slowest stage."""
        return max(stage.seconds for stage in self.stages)


class Exchanges(NamedTuple):
    """Seconds of the collectives and the update of one stage's ranks, once a step."""

    inside: float
    """Reduction of gradients among equal replicas."""
    between: float
    """Reduction of gradients among groups of different replicas."""
    back: float
    """Gather of the reduced gradients among equal replicas."""
    weights: float
    """Gather of the weights that the optimizer's shards updated, before the next forward."""
    optimizer: float


class Tail(NamedTuple):
    """Seconds after a replica's last backward: exchange of gradients and weights, and update."""

    data: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.data + self.optimizer


def replica_seconds(pipeline: Pipeline, micro_batches: int) -> float:
    """Return the seconds of a replica's pipeline under 1F1B, from its first forward to its last backward.

    It equals `pipeline_seconds`, with a send time of its own for each stage boundary.
    """
    stages = len(pipeline.stages)
    if stages == 1:
        return micro_batches * pipeline.stages[0].seconds
    if micro_batches <= _PLAYED_ROUNDS * stages:
        return _play(pipeline, micro_batches)
    rest = (micro_batches - (_PLAYED_ROUNDS - 2) * stages) // stages
    start = micro_batches - rest * stages
    sooner, later = _play(pipeline, start), _play(pipeline, start + stages)
    return sooner + rest * max(later - sooner, stages * pipeline.pace)


_PLAYED_ROUNDS = 6
"""Rounds of as many micro-batches as stages, after which 1F1B repeats itself."""


def _play(pipeline: Pipeline, micro_batches: int) -> float:
    """Return the simulated seconds of 1F1B, with every operation run once, diagonal by diagonal.

    In turn `number`, stage `s` runs the forward of micro-batch `number` and then the backward of `number` −
    (stages − 1 − s), as 1F1B orders them.
    """
    sends, stages = pipeline.sends, len(pipeline.stages)
    last = stages - 1
    forward = [stage.forward for stage in pipeline.stages]
    backward = [stage.backward for stage in pipeline.stages]
    clocks = [0.0] * stages
    arrivals = [0.0] * stages  # of the input of each stage's next backward
    for number in range(micro_batches + last):
        ready = 0.0
        if number < micro_batches:
            for stage in range(stages):
                clocks[stage] = ready = max(ready, clocks[stage]) + forward[stage]
                if stage < last:
                    ready += sends[stage]
        sent = []
        for stage in range(max(last - number, 0), stages):
            if number - last + stage >= micro_batches:
                break
            begin = max(clocks[stage], arrivals[stage]) if stage < last else clocks[stage]
            clocks[stage] = begin + backward[stage]
            if stage:
                sent.append((stage - 1, clocks[stage] + sends[stage - 1]))
        for stage, arrival in sent:
            arrivals[stage] = arrival
    return max(clocks)


class MixedCosts:
    """Costs and memory of stages on each kind of device in a cluster, with a cache of repeated ones."""

    def __init__(self, problem: Problem, fleet: Fleet, start: Plan) -> None:
        """Collect the settings that all replicas share.

        Args:
            start: settings of every replica: precision, compile, and sequence parallelism.

        Raises:
            ValueError: the model is no decoder.
        """
        if problem.dimensions is None:
            raise ValueError("only a decoder's blocks can be placed on unlike machines")
        self.problem, self.fleet = problem, fleet
        self.start = replace(start, placement=(), batch_shares=(), pp=1, dp_replicate=1, tp=1)
        self.dimensions: DecoderDimensions = problem.dimensions
        self.software: Software = replace(problem.software, fused=problem.software.fused or start.compile)
        dense = self.dimensions.dense_layers if self.dimensions.experts else self.dimensions.layers
        self._block_ends = sorted({dense, self.dimensions.layers} - {0})
        self._units: dict[tuple[object, ...], Units] = {}
        self._stages: dict[tuple[object, ...], Part] = {}
        self._tails: dict[tuple[object, ...], Tail] = {}
        self._tables: dict[tuple[object, ...], tuple[MemoryTable, Plan]] = {}
        self._views: dict[tuple[object, ...], Plan] = {}
        self._memory: dict[tuple[object, ...], Forecast] = {}
        self._trained_share = problem.workload.trained_share

    def can_compute(self, kind: Kind) -> bool:
        """Return whether the kind's devices have a rate for the plan's precision."""
        return not kind.machine.unknown and self.start.precision in kind.machine.chip.products

    def units(
        self,
        node: int,
        tp: int,
        micro_batch: int,
        recompute: Recompute,
        *,
        pipelined: bool,
        many: bool,
        sharded: bool,
    ) -> Units:
        """Return the layer costs of one micro-batch on `tp` devices of kind `node`.

        Args:
            many: a step has several micro-batches, whose gradients are added up.
            sharded: replicas shard the optimizer state.
        """
        key = (node, tp, micro_batch, recompute, pipelined, many, sharded)
        if key not in self._units:
            self._units[key] = self._unit_costs(*key)
        return self._units[key]

    def _unit_costs(
        self,
        node: int,
        tp: int,
        micro_batch: int,
        recompute: Recompute,
        pipelined: bool,
        many: bool,
        sharded: bool,
    ) -> Units:
        machine, software = self.fleet.kinds[node].machine, self.software
        view = self._view(tp, micro_batch, recompute).but(pp=2 if pipelined else 1)
        view = _shared(view, 2, "optimizer" if sharded else "none")
        data = DataParallel(view, machine, software, self._trained_share)
        pieces = decoder_pieces(self.dimensions, self.problem.sequence, view, machine, software)
        pieces = trained_pieces(pieces, self.problem.workload, view, machine, software)
        again = 0.0 if recompute == "none" else 1.0

        def part(stage: Stage) -> Part:
            cost, ahead, back = stage_cost(stage, view, machine, software, data, MANY if many else 1)
            kinds = {name: ahead[name] + back[name] for name in ahead}
            return Part(cost.forward, cost.seconds - cost.forward, kinds, stage.parameters)

        def end(ends: tuple[End, ...]) -> Part:
            size = sum(one.parameters for one in ends)
            return part(Stage((), 0.0, tuple((one.part, one.parameters) for one in ends), size))

        blocks = [
            part(Stage(((kind.part, 1, kind.parameters),), again, (), kind.parameters))
            for kind in pieces.blocks
        ]
        return Units(tuple(blocks), end(pieces.before), end(pieces.after))

    def _view(self, tp: int, micro_batch: int, recompute: Recompute) -> Plan:
        """Return a plan of equal devices in which one stage is as in a placed plan."""
        sequence = self.start.sequence_parallel and tp > 1
        return self.start.but(tp=tp, micro_batch=micro_batch, recompute=recompute, sequence_parallel=sequence)

    # ------------------------------------------------------------ time

    def stages(self, replicas: Replicas, shard: Shard, many: bool = True) -> list[Part]:
        """Return the cost of every stage; `many` as in `units`."""
        sharded = is_sharded(replicas.count, shard)
        found, start, last = [], 0, len(replicas.places) - 1
        for number, place in enumerate(replicas.places):
            key = (place.node, place.tp, replicas.micro_batch, replicas.recompute, last > 0, many, sharded)
            counts = (*self.counts(start, start + place.blocks), int(number == 0), int(number == last))
            if (key, counts) not in self._stages:
                units = self.units(*key[:4], pipelined=last > 0, many=many, sharded=sharded)
                parts = (*units.blocks, units.first, units.last)
                self._stages[key, counts] = _sum(list(zip(parts, counts, strict=True)))
            found.append(self._stages[key, counts])
            start += place.blocks
        return found

    def counts(self, start: int, stop: int) -> list[int]:
        """Return the number of blocks of each group among those from `start` to `stop`."""
        found, begin = [], 0
        for end in self._block_ends:
            found.append(max(min(stop, end) - max(start, begin), 0))
            begin = end
        return found

    def pipeline(self, replicas: Replicas, shard: Shard, many: bool = True) -> Pipeline:
        pairs = zip(replicas.places, replicas.places[1:], strict=False)
        return Pipeline(
            tuple(self.stages(replicas, shard, many)),
            tuple(self._send_seconds(replicas, one, other) for one, other in pairs),
        )

    def _send_seconds(self, replicas: Replicas, one: Place, other: Place) -> float:
        """Return the seconds of sending a stage's output to the next one, or its gradient back.

        Between stages on equal devices it equals `cost.decoder.boundary_seconds`.
        """
        element = ELEMENT_BYTES[self.start.precision]
        whole = replicas.micro_batch * self.problem.sequence * self.dimensions.hidden * element
        message = whole / min(one.tp, other.tp)
        here, there = (self.fleet.kinds[place.node].machine for place in (one, other))
        if one.node == other.node:
            seconds = send_seconds(here, replicas.count * one.tp, message)
        else:
            link = self.fleet.across
            start = max(here.start_seconds, there.start_seconds)
            seconds = start + link.latency_seconds + link.seconds(message, message)
        if self.start.sequence_parallel:
            return seconds
        gathers = (
            all_gather_seconds(here, Group(one.tp), whole),
            all_gather_seconds(there, Group(other.tp), whole),
        )
        return seconds + sum(gathers) / 2

    def tail(self, replicas: Replicas, stages: Sequence[Part], groups: int, shard: Shard) -> Tail:
        """Return the seconds of reduction and update, of the stage that takes longest with them.

        Args:
            groups: number of groups of equal replicas, which sum their gradients with each other.
        """
        tails = (
            self._stage_tail(place, stage, replicas.count, groups, shard)
            for place, stage in zip(replicas.places, stages, strict=True)
        )
        return max(tails, key=lambda tail: tail.seconds)

    def _stage_tail(self, place: Place, stage: Part, count: int, groups: int, shard: Shard) -> Tail:
        key = (place.node, place.tp, stage[:2], stage.parameters, count, groups, shard)
        if key not in self._tails:
            self._tails[key] = self._tail_of(place, stage, count, groups, shard)
        return self._tails[key]

    def _tail_of(self, place: Place, stage: Part, count: int, groups: int, shard: Shard) -> Tail:
        exchanges = self.exchanges(place, stage, count, groups, shard)
        reduce = exchanges.inside + exchanges.between + exchanges.back
        weights = exchanges.weights
        if self.software.data_overlap:
            # As in `data_parallel`: beside the last backward and the first forward.
            reduce, weights = exposed(reduce, stage.backward), exposed(weights, stage.forward)
        return Tail(reduce + weights, exchanges.optimizer)

    def exchanges(self, place: Place, stage: Part, count: int, groups: int, shard: Shard) -> Exchanges:
        """Return the exchanges of one stage of `count` equal replicas; other arguments as in `tail`."""
        machine, software = self.fleet.kinds[place.node].machine, self.software
        trained = self._trained_share
        view = _shared(self._view(place.tp, 1, "none"), count, shard)
        data = DataParallel(view, machine, software, trained)
        inside, weights = data.once_a_step(stage.parameters)
        between = back = 0.0
        if groups > 1:
            gradients = stage.parameters / place.tp * data.gradient_bytes
            group = Group(count, place.tp)
            inside = reduce_scatter_seconds(machine, group, gradients)
            between = exchange_seconds(self.fleet.across, groups, gradients / count)
            back = 0.0 if view.shard == "optimizer" else all_gather_seconds(machine, group, gradients)
        optimizer = optimizer_seconds(stage.parameters, view, machine, software, trained)
        return Exchanges(inside, between, back, weights, optimizer)

    # ------------------------------------------------------------ memory

    def memory(self, replicas: Replicas, shard: Shard, micro_batches: int) -> list[Forecast]:
        """Return the memory of one rank of each stage, in a step of so many micro-batches on each replica."""
        return self._memory_of_stages(replicas, shard, micro_batches)

    def fits(self, replicas: Replicas, shard: Shard, micro_batches: int) -> bool:
        """Return whether every stage fits into its device."""
        found = self._memory_of_stages(replicas, shard, micro_batches)
        return all(
            needed.memory_bytes <= self.fleet.kinds[place.node].memory_bytes
            for needed, place in zip(found, replicas.places, strict=True)
        )

    def _memory_of_stages(self, replicas: Replicas, shard: Shard, micro_batches: int) -> list[Forecast]:
        found, start = [], 0
        for number, place in enumerate(replicas.places):
            counts = tuple(self.counts(start, start + place.blocks))
            found.append(self.stage_memory(replicas, shard, micro_batches, number, counts))
            start += place.blocks
        return found

    def stage_memory(
        self, replicas: Replicas, shard: Shard, micro_batches: int, stage: int, blocks: tuple[int, ...]
    ) -> Forecast:
        """Return the memory of one rank of a stage with `blocks` blocks of each group.

        It is independent of the other stages' blocks.
        """
        pp, place, train = len(replicas.places), replicas.places[stage], self.problem.job.train
        size, recompute, shards = replicas.micro_batch, replicas.recompute, 1
        if shard == "optimizer":
            shards = replicas.count
        # In 1F1B a stage keeps as many micro-batches as there are stages from it on.
        where = (pp - stage, stage == 0, pp > 1, replicas.count > 1)
        key = (place.tp, size, recompute, *where, shards, micro_batches, blocks)
        if key not in self._memory:
            table, view = self._memory_view(place.tp, replicas, pp, shard)
            self._memory[key] = memory_of_stage(
                table,
                view,
                stage,
                blocks,
                rule_of(train),
                software=self.software,
                micro_batches=micro_batches,
                weight_average=train.weight_average > 0,
            ).forecast
        return self._memory[key]

    def _memory_view(self, tp: int, replicas: Replicas, pp: int, shard: Shard) -> tuple[MemoryTable, Plan]:
        key = (tp, replicas.micro_batch, replicas.recompute, pp)
        if key not in self._tables:
            view = self._view(tp, replicas.micro_batch, replicas.recompute).but(pp=pp)
            table = tabulate(self.problem.workload, view, self.dimensions, self.software)
            self._tables[key] = (table, view)
        table, view = self._tables[key]
        shared = (*key, replicas.count, shard)
        if shared not in self._views:
            self._views[shared] = _shared(view, replicas.count, shard)
        return table, self._views[shared]


def is_sharded(count: int, shard: Shard) -> bool:
    """Return whether `count` equal replicas shard the optimizer state."""
    return shard == "optimizer" and count > 1


def _shared(view: Plan, count: int, shard: Shard) -> Plan:
    """Return `view` with `count` equal replicas, which shard the optimizer state as `shard` says."""
    if is_sharded(count, shard):
        return view.but(dp_shard=count, shard=shard)
    return view.but(dp_replicate=count)


def exchange_seconds(link: Link, groups: int, part_bytes: float) -> float:
    """Return the seconds of summing gradients among groups of replicas, after a scatter inside each.

    A ring goes through the groups, each device over its own share of the joining link.
    """
    if groups == 1 or part_bytes <= 0:
        return 0.0
    steps = 2 * (groups - 1)
    return steps * link.latency_seconds + link.seconds(part_bytes * steps / groups, part_bytes)


def _sum(parts: Sequence[tuple[Part, int]]) -> Part:
    """Return the cost of (layer, count) pairs as one stage."""
    kinds = dict.fromkeys(parts[0][0].kinds, 0.0)
    for part, count in parts:
        for name, seconds in part.kinds.items():
            kinds[name] += count * seconds
    return Part(
        sum(count * part.forward for part, count in parts),
        sum(count * part.backward for part, count in parts),
        kinds,
        sum(count * part.parameters for part, count in parts),
    )


# ------------------------------------------------------------ a whole plan


def mixed_step_time(costs: MixedCosts, plan: Plan, global_batch: int) -> StepTime:
    """Return the step time of a placed plan; its kinds are of the last replica's busiest rank.

    Raises:
        ValueError: the plan is not placed.
    """
    if not plan.placement:
        raise ValueError("the plan is not placed on machines of several kinds")
    sizes = plan.sizes(global_batch)
    steps, first = [], 0
    for replicas in plan.placement:
        largest = max(sizes[first : first + replicas.count])
        first += replicas.count
        steps.append(_group_step(costs, replicas, math.ceil(largest / replicas.micro_batch), plan))
    return max(steps, key=lambda step: step.seconds)


def _group_step(costs: MixedCosts, replicas: Replicas, micro_batches: int, plan: Plan) -> StepTime:
    """Return the step time of one group of equal replicas."""
    pipeline = costs.pipeline(replicas, plan.shard, micro_batches > 1)
    played = replica_seconds(pipeline, micro_batches)
    tail = costs.tail(replicas, pipeline.stages, len(plan.placement), plan.shard)
    busiest = max(pipeline.stages, key=lambda stage: stage.seconds)
    kinds = {name: micro_batches * seconds for name, seconds in busiest.kinds.items()}
    doubts = [costs.fleet.kinds[place.node].machine.doubt for place in replicas.places]
    axes = (len(replicas.places), max(place.tp for place in replicas.places), plan.data_ranks)
    return StepTime(
        seconds=played + tail.seconds,
        compute=kinds["compute"],
        tensor=kinds["tensor"],
        expert=kinds["expert"],
        moving=kinds["moving"],
        data=tail.data,
        bubble=played - micro_batches * busiest.seconds,
        optimizer=tail.optimizer,
        uncertainty=uncertainty([max(doubts)], axes),
    )
