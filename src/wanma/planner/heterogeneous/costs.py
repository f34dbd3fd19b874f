"""Step time and memory of plans whose replicas are placed on nodes of different kinds.

Each stage has the cost of its own kind of device; each replica is a pipeline of its own; gradients are summed
among equal replicas first, and then among groups of different ones, over the link that joins the kinds.
Formulas are those of `cost.step` and `memory.peak`; here stages and replicas differ. Pure functions, without
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from wanma.job.forecast.forecast import Forecast, StepTime
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute, Shard
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.data_parallel import DataParallelCost, exposed_seconds
from wanma.planner.cost.decoder import decoder_model_cost
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.frozen import model_cost_with_frozen_parts
from wanma.planner.cost.model_cost import EndLayer
from wanma.planner.cost.step import StageLayers, forecast_uncertainty, optimizer_seconds, stage_cost
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import LinkLevel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware, NodePool
from wanma.planner.heterogeneous.replica_pipeline import ReplicaPipeline, StageTime, replica_pipeline_seconds
from wanma.planner.memory.memory_table import MemoryTable, build_memory_table
from wanma.planner.memory.model_states import optimizer_rule
from wanma.planner.memory.peak import stage_rank_memory
from wanma.planner.pipeline.schedules import block_counts_between

MANY_MICRO_BATCHES = 1 << 16
"""Number of micro-batches where only "more than one" matters."""


class LayerTimes(NamedTuple):
    """Costs of the layers from which stages are composed, on one kind of device."""

    blocks: tuple[StageTime, ...]
    """Costs of one block of each group."""
    pre_block: StageTime
    post_block: StageTime


class ReductionTimes(NamedTuple):
    """Seconds of the collectives and the update of one stage's ranks, once a step."""

    reduce_within_group: float
    """Reduction of gradients among equal replicas."""
    reduce_across_groups: float
    """Reduction of gradients among groups of different replicas."""
    gather_gradients: float
    """Gather of the reduced gradients among equal replicas."""
    gather_weights: float
    """Gather of the weights that the optimizer's shards updated, before the next forward."""
    optimizer: float


class StepTail(NamedTuple):
    """Seconds after a replica's last backward: exchange of gradients and weights, and update."""

    data_parallel: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.data_parallel + self.optimizer


class HeterogeneousCosts:
    """Costs and memory of stages on each kind of device in a cluster, with a cache of repeated ones."""

    def __init__(self, problem: PlanningProblem, hardware: HeterogeneousHardware, base_plan: Plan) -> None:
        """Collect the settings that all replicas share.

        Args:
            base_plan: settings of every replica: precision, compile, and sequence parallelism.

        Raises:
            ValueError: the model is no decoder.
        """
        if problem.dimensions is None:
            raise ValueError("only decoder blocks can be placed on different nodes")
        self.problem, self.hardware = problem, hardware
        self.base_plan = replace(base_plan, placement=(), batch_shares=(), pp=1, dp_replicate=1, tp=1)
        self.dimensions: DecoderConfig = problem.dimensions
        self.framework: FrameworkTraits = replace(
            problem.framework, fuses_pointwise=problem.framework.fuses_pointwise or base_plan.compile
        )
        dense = self.dimensions.dense_layers if self.dimensions.experts else self.dimensions.layers
        self._block_counts = tuple(count for count in (dense, self.dimensions.layers - dense) if count)
        self.layer_times = cache(self._layer_times)
        self._stages: dict[tuple[object, ...], StageTime] = {}
        self._tails: dict[tuple[object, ...], StepTail] = {}
        self._tables: dict[tuple[object, ...], tuple[MemoryTable, Plan]] = {}
        self._memory: dict[tuple[object, ...], Forecast] = {}
        self._trained_share = problem.workload.trainable_share

    def can_compute(self, pool: NodePool) -> bool:
        """Return whether the kind's devices have a rate for the plan's precision."""
        return not pool.hardware.unknown and self.base_plan.precision in pool.hardware.chip.products

    def _layer_times(
        self,
        pool: int,
        tp: int,
        micro_batch: int,
        recompute: Recompute,
        *,
        pipelined: bool,
        accumulates_gradients: bool,
        sharded: bool,
    ) -> LayerTimes:
        """Return the layer costs of one micro-batch on `tp` devices of kind `pool`.

        Args:
            accumulates_gradients: a step has several micro-batches, whose gradients are added up.
            sharded: replicas shard the optimizer state.
        """
        machine, software = self.hardware.pools[pool].hardware, self.framework
        view = self._homogeneous_plan(tp, micro_batch, recompute).with_changes(pp=2 if pipelined else 1)
        view = _with_replicas(view, 2, "optimizer" if sharded else "none")
        data = DataParallelCost(view, machine, software, self._trained_share)
        pieces = decoder_model_cost(self.dimensions, self.problem.sequence_length, view, machine, software)
        pieces = model_cost_with_frozen_parts(pieces, self.problem.workload, view, machine, software)
        recompute_share = 0.0 if recompute == "none" else 1.0

        def part(stage: StageLayers) -> StageTime:
            cost, forward, backward = stage_cost(
                stage, view, machine, software, data, MANY_MICRO_BATCHES if accumulates_gradients else 1
            )
            kinds = {name: forward[name] + backward[name] for name in forward}
            return StageTime(cost.forward, cost.seconds - cost.forward, kinds, stage.parameters)

        def end(ends: tuple[EndLayer, ...]) -> StageTime:
            size = sum(one.parameters for one in ends)
            return part(StageLayers((), 0.0, tuple((one.cost, one.parameters) for one in ends), size))

        blocks = [
            part(StageLayers(((kind.cost, 1, kind.parameters),), recompute_share, (), kind.parameters))
            for kind in pieces.blocks
        ]
        return LayerTimes(tuple(blocks), end(pieces.pre_block), end(pieces.post_block))

    def _homogeneous_plan(self, tp: int, micro_batch: int, recompute: Recompute) -> Plan:
        """Return a plan of equal devices in which one stage is as in a placed plan."""
        sequence = self.base_plan.sequence_parallel and tp > 1
        return self.base_plan.with_changes(
            tp=tp, micro_batch=micro_batch, recompute=recompute, sequence_parallel=sequence
        )

    # ------------------------------------------------------------ time

    def stage_times(
        self, replicas: ReplicaPlacement, shard: Shard, accumulates_gradients: bool = True
    ) -> list[StageTime]:
        """Return the cost of every stage; `accumulates_gradients` as in `units`."""
        sharded = shards_optimizer_state(replicas.count, shard)
        times, start, last = [], 0, len(replicas.places) - 1
        for number, place in enumerate(replicas.places):
            key = (
                place.node,
                place.tp,
                replicas.micro_batch,
                replicas.recompute,
                last > 0,
                accumulates_gradients,
                sharded,
            )
            counts = (*self.block_counts(start, start + place.blocks), int(number == 0), int(number == last))
            if (key, counts) not in self._stages:
                units = self.layer_times(
                    *key[:4], pipelined=last > 0, accumulates_gradients=accumulates_gradients, sharded=sharded
                )
                parts = (*units.blocks, units.pre_block, units.post_block)
                self._stages[key, counts] = _sum_layers(list(zip(parts, counts, strict=True)))
            times.append(self._stages[key, counts])
            start += place.blocks
        return times

    def block_counts(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the number of blocks of each group among those from `start` to `stop`."""
        return block_counts_between(self._block_counts, start, stop)

    def replica_pipeline(
        self, replicas: ReplicaPlacement, shard: Shard, accumulates_gradients: bool = True
    ) -> ReplicaPipeline:
        pairs = zip(replicas.places, replicas.places[1:], strict=False)
        return ReplicaPipeline(
            tuple(self.stage_times(replicas, shard, accumulates_gradients)),
            tuple(self._send_seconds(replicas, sender, receiver) for sender, receiver in pairs),
        )

    def _send_seconds(
        self, replicas: ReplicaPlacement, stage_place: StagePlacement, next_place: StagePlacement
    ) -> float:
        """Return the seconds of sending a stage's output to the next one, or its gradient back.

        Between stages on equal devices it equals `cost.decoder.decoder_stage_send_seconds`.
        """
        element = ELEMENT_BYTES[self.base_plan.precision]
        output_bytes = replicas.micro_batch * self.problem.sequence_length * self.dimensions.hidden * element
        message = output_bytes / min(stage_place.tp, next_place.tp)
        sender, receiver = (self.hardware.pools[place.node].hardware for place in (stage_place, next_place))
        if stage_place.node == next_place.node:
            seconds = send_seconds(sender, replicas.count * stage_place.tp, message)
        else:
            link = self.hardware.inter_pool_link
            start = max(sender.start_seconds, receiver.start_seconds)
            seconds = start + link.latency_seconds + link.transfer_seconds(message, message)
        if self.base_plan.sequence_parallel:
            return seconds
        gathers = (
            all_gather_seconds(sender, RankGroup(stage_place.tp), output_bytes),
            all_gather_seconds(receiver, RankGroup(next_place.tp), output_bytes),
        )
        return seconds + sum(gathers) / 2

    def step_tail(
        self, replicas: ReplicaPlacement, stages: Sequence[StageTime], group_count: int, shard: Shard
    ) -> StepTail:
        """Return the seconds of reduction and update, of the stage that takes longest with them.

        Args:
            group_count: number of groups of equal replicas, which sum their gradients with each other.
        """
        tails = (
            self._stage_tail(place, stage, replicas.count, group_count, shard)
            for place, stage in zip(replicas.places, stages, strict=True)
        )
        return max(tails, key=lambda tail: tail.seconds)

    def _stage_tail(
        self, place: StagePlacement, stage: StageTime, count: int, group_count: int, shard: Shard
    ) -> StepTail:
        key = (place.node, place.tp, stage[:2], stage.parameters, count, group_count, shard)
        if key not in self._tails:
            self._tails[key] = self._compute_stage_tail(place, stage, count, group_count, shard)
        return self._tails[key]

    def _compute_stage_tail(
        self, place: StagePlacement, stage: StageTime, count: int, group_count: int, shard: Shard
    ) -> StepTail:
        exchanges = self.reduction_times(place, stage, count, group_count, shard)
        reduce = exchanges.reduce_within_group + exchanges.reduce_across_groups + exchanges.gather_gradients
        weights = exchanges.gather_weights
        if self.framework.data_overlap:
            # As in `data_parallel`: beside the last backward and the first forward.
            reduce, weights = exposed_seconds(reduce, stage.backward), exposed_seconds(weights, stage.forward)
        return StepTail(reduce + weights, exchanges.optimizer)

    def reduction_times(
        self, place: StagePlacement, stage: StageTime, count: int, group_count: int, shard: Shard
    ) -> ReductionTimes:
        """Return the exchanges of one stage of `count` equal replicas; other arguments as in `tail`."""
        machine, software = self.hardware.pools[place.node].hardware, self.framework
        trained = self._trained_share
        view = _with_replicas(self._homogeneous_plan(place.tp, 1, "none"), count, shard)
        data = DataParallelCost(view, machine, software, trained)
        reduce, weights = data.reduce_gather_per_step(stage.parameters)
        exchange = gather = 0.0
        if group_count > 1:
            gradients = stage.parameters / place.tp * data.gradient_bytes
            group = RankGroup(count, place.tp)
            reduce = reduce_scatter_seconds(machine, group, gradients)
            exchange = cross_group_reduce_seconds(
                self.hardware.inter_pool_link, group_count, gradients / count
            )
            gather = 0.0 if view.shard == "optimizer" else all_gather_seconds(machine, group, gradients)
        optimizer = optimizer_seconds(stage.parameters, view, machine, software, trained)
        return ReductionTimes(reduce, exchange, gather, weights, optimizer)

    # ------------------------------------------------------------ memory

    def memory(self, replicas: ReplicaPlacement, shard: Shard, micro_batches: int) -> list[Forecast]:
        """Return the memory of one rank of each stage, in a step of so many micro-batches on each replica."""
        stage_bytes, start = [], 0
        for number, place in enumerate(replicas.places):
            counts = self.block_counts(start, start + place.blocks)
            stage_bytes.append(self.stage_memory(replicas, shard, micro_batches, number, counts))
            start += place.blocks
        return stage_bytes

    def fits(self, replicas: ReplicaPlacement, shard: Shard, micro_batches: int) -> bool:
        """Return whether every stage fits into its device."""
        return all(
            memory.memory_bytes <= self.hardware.pools[place.node].memory_limit_bytes
            for memory, place in zip(
                self.memory(replicas, shard, micro_batches), replicas.places, strict=True
            )
        )

    def stage_memory(
        self,
        replicas: ReplicaPlacement,
        shard: Shard,
        micro_batches: int,
        stage: int,
        blocks: tuple[int, ...],
    ) -> Forecast:
        """Return the memory of one rank of a stage with `blocks` blocks of each group.

        It is independent of the other stages' blocks.
        """
        pp, place, train = len(replicas.places), replicas.places[stage], self.problem.job.train
        size, recompute, shards = replicas.micro_batch, replicas.recompute, 1
        if shard == "optimizer":
            shards = replicas.count
        # In 1F1B a stage keeps as many micro-batches as there are stages from it on.
        position = (pp - stage, stage == 0, pp > 1, replicas.count > 1)
        key = (place.tp, size, recompute, *position, shards, micro_batches, blocks)
        if key not in self._memory:
            table, view = self._memory_table_and_plan(place.tp, replicas, pp, shard)
            self._memory[key] = stage_rank_memory(
                table,
                view,
                stage,
                blocks,
                optimizer_rule(train),
                framework=self.framework,
                micro_batches=micro_batches,
                weight_average=train.weight_average > 0,
            ).forecast
        return self._memory[key]

    def _memory_table_and_plan(
        self, tp: int, replicas: ReplicaPlacement, pp: int, shard: Shard
    ) -> tuple[MemoryTable, Plan]:
        key = (tp, replicas.micro_batch, replicas.recompute, pp)
        if key not in self._tables:
            view = self._homogeneous_plan(tp, replicas.micro_batch, replicas.recompute).with_changes(pp=pp)
            table = build_memory_table(self.problem.workload, view, self.dimensions, self.framework)
            self._tables[key] = (table, view)
        table, view = self._tables[key]
        return table, _with_replicas(view, replicas.count, shard)


def shards_optimizer_state(count: int, shard: Shard) -> bool:
    """Return whether `count` equal replicas shard the optimizer state."""
    return shard == "optimizer" and count > 1


def _with_replicas(view: Plan, count: int, shard: Shard) -> Plan:
    """Return `view` with `count` equal replicas, which shard the optimizer state as `shard` says."""
    if shards_optimizer_state(count, shard):
        return view.with_changes(dp_shard=count, shard=shard)
    return view.with_changes(dp_replicate=count)


def cross_group_reduce_seconds(link: LinkLevel, group_count: int, part_bytes: float) -> float:
    """Return the seconds of summing gradients among groups of replicas, after a scatter inside each.

    A ring goes through the groups, each device over its own share of the joining link.
    """
    if group_count == 1 or part_bytes <= 0:
        return 0.0
    steps = 2 * (group_count - 1)
    return steps * link.latency_seconds + link.transfer_seconds(part_bytes * steps / group_count, part_bytes)


def _sum_layers(parts: Sequence[tuple[StageTime, int]]) -> StageTime:
    """Return the cost of (layer, count) pairs as one stage."""
    kinds = dict.fromkeys(parts[0][0].seconds_by_kind, 0.0)
    for part, count in parts:
        for name, seconds in part.seconds_by_kind.items():
            kinds[name] += count * seconds
    return StageTime(
        sum(count * part.forward for part, count in parts),
        sum(count * part.backward for part, count in parts),
        kinds,
        sum(count * part.parameters for part, count in parts),
    )


# ------------------------------------------------------------ a whole plan


def placed_step_time(costs: HeterogeneousCosts, plan: Plan, global_batch: int) -> StepTime:
    """Return the step time of a placed plan; its kinds are of the last replica's busiest rank.

    Raises:
        ValueError: the plan is not placed.
    """
    if not plan.placement:
        raise ValueError("the plan has no replica placement")
    sizes = plan.rows_per_data_rank(global_batch)
    steps, first = [], 0
    for replicas in plan.placement:
        largest = max(sizes[first : first + replicas.count])
        first += replicas.count
        steps.append(_group_step_time(costs, replicas, math.ceil(largest / replicas.micro_batch), plan))
    return max(steps, key=lambda step: step.seconds)


def _group_step_time(
    costs: HeterogeneousCosts, replicas: ReplicaPlacement, micro_batches: int, plan: Plan
) -> StepTime:
    """Return the step time of one group of equal replicas."""
    pipeline = costs.replica_pipeline(replicas, plan.shard, micro_batches > 1)
    pipeline_seconds = replica_pipeline_seconds(pipeline, micro_batches)
    tail = costs.step_tail(replicas, pipeline.stages, len(plan.placement), plan.shard)
    busiest = max(pipeline.stages, key=lambda stage: stage.seconds)
    kinds = {name: micro_batches * seconds for name, seconds in busiest.seconds_by_kind.items()}
    doubts = [costs.hardware.pools[place.node].hardware.doubt for place in replicas.places]
    axes = (len(replicas.places), max(place.tp for place in replicas.places), plan.data_parallel_size)
    return StepTime(
        seconds=pipeline_seconds + tail.seconds,
        compute=kinds["compute"],
        tensor=kinds["tensor"],
        expert=kinds["expert"],
        moving=kinds["moving"],
        data=tail.data_parallel,
        bubble=pipeline_seconds - micro_batches * busiest.seconds,
        optimizer=tail.optimizer,
        uncertainty=forecast_uncertainty([max(doubts)], axes),
    )
