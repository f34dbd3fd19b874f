"""Communication time of data-parallel ranks: gather of weights, reduction of gradients, their overlap.

Works for every kind of model, because model states are counted in parameters. Pure functions, without torch.
"""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.gradient_collectives import (
    GradientCollectives,
    all_reduce_cost_algorithm,
    gradient_element_bytes,
)
from wanma.planner.cost.offload import (
    OffloadTransfers,
    gradient_transfer_seconds,
    host_accumulation_seconds,
    reallocated_bytes,
    reshards_after_forward,
    transfer_seconds,
    updates_on_cpu,
    weight_transfer_seconds,
)
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    leaves_innermost_level,
)
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES, memory_bound_seconds

OVERLAP_SLOWDOWN = 0.15
"""Overlap slowdown: share of overlapped communication time that the compute beside it loses.

Collectives occupy some of the multiprocessors and of the memory bandwidth (NCCL uses 16 to 24 blocks of 108
to 132)."""


class DataParallelCost:
    """Communication over the ranks that shard or replicate a stage's model states.

    Args:
        trainable_share: share of the parameters that is trained; gradients of the others are not reduced.
    """

    def __init__(
        self, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits, trainable_share: float = 1.0
    ) -> None:
        self.plan, self.hardware, self.framework = plan, hardware, framework
        self.shards = RankGroup(plan.shard_group_size, plan.tp)
        self.replicas = RankGroup(plan.replicate_group_size, plan.tp * plan.shard_group_size)
        self.trainable_share = 0.0 if framework.frozen_base_weights else trainable_share
        self.cast_share = (
            trainable_share if framework.casts_frozen_weights and not framework.frozen_base_weights else 1.0
        )
        """Share of the parameters that a step casts, and gathers once; frozen ones are stored in compute
        precision."""
        self.gradient_element_bytes = gradient_element_bytes(plan, framework.gradient_bytes)
        self.gradient_bytes = self.gradient_element_bytes * self.trainable_share
        """Bytes per parameter of a gradient, as it is reduced without compression."""
        self.gradient_collectives = GradientCollectives(plan, hardware, self.gradient_element_bytes)
        self.weight_bytes = ELEMENT_BYTES[plan.precision]
        """Bytes per parameter of a weight, as it is gathered to be computed with."""
        self.reduces_per_block = reduces_per_block(plan)
        self.reshards_after_forward = reshards_after_forward(plan)
        self.has_shared_memory_weights = framework.has_shared_memory_weights(plan)
        """True if ranks of a node compute with common weights: nothing is gathered, but shards of another
        precision are written into the common copy."""
        self.overlaps_compute = plan.device != "cpu"
        """True if collectives run beside compute; those of a CPU run on the cores that compute."""
        self.overlaps_gradient_reduction = overlaps_gradient_reduction(plan, hardware)
        self._seconds_by_size: dict[float, tuple[float, float]] = {}
        """Cache of (gather, reduce) seconds of one block, by its parameters."""

    def exposed_per_micro_batch(
        self, parameters: float, forward: float, backward: float
    ) -> tuple[float, float]:
        """Return the seconds that a block's collectives add to its forward and its backward.

        They gather the block's sharded parameters for both, and reduce its gradients beside backward. The
        next block is gathered while one computes; a pipeline keeps blocks gathered. With sharded gradients
        (ZeRO-2) a block's gradients are reduced as well, but its parameters stay unsharded within a step.
        """
        gather, reduce = self.block_seconds(parameters)
        if not self.overlaps_compute:
            return gather, gather + reduce
        return exposed_seconds(gather, forward), exposed_seconds(gather + reduce, backward)

    def framework_overhead_seconds(self) -> float:
        """Return the framework overhead of each block and micro-batch beside its collectives, in seconds."""
        if self.shards.size == 1 or not self.reduces_per_block:
            return 0.0
        program = self.hardware.program
        return program.parameters_seconds if self.reshards_after_forward else program.gradients_seconds

    def block_seconds(self, parameters: float) -> tuple[float, float]:
        """Return (gather, reduce) seconds of one block, including buffer copies on a CPU."""
        if parameters not in self._seconds_by_size:
            self._seconds_by_size[parameters] = self._exchange_seconds(parameters)
        return self._seconds_by_size[parameters]

    def _exchange_seconds(self, parameters: float) -> tuple[float, float]:
        reduces = self.reduces_per_block and self.shards.size > 1
        if not reduces and self.plan.offload_parameters == "none":
            return 0.0, 0.0
        unsharded, gather, reduce = parameters / self.plan.tp, 0.0, 0.0
        if self.reshards_after_forward and not self.has_shared_memory_weights:
            gather = all_gather_seconds(self.hardware, self.shards, unsharded * self.weight_bytes)
            gather += 0.0 if self.overlaps_compute else self._copy_out_seconds(unsharded)
        if reduces:
            reduce = self._reduce_scatter_seconds(unsharded)
            reduce += 0.0 if self.overlaps_compute else self._copy_in_seconds(unsharded)
        return gather, reduce

    def exposed_offload_seconds(
        self,
        parameters: float,
        activation_bytes: float,
        forward: float,
        backward: float,
        micro_batches: int,
        *,
        is_block: bool,
    ) -> tuple[float, float]:
        """Return the seconds that offload transfers add to a block's forward and backward.

        They come on top of `exposed_per_micro_batch`. The transfers bring the block's weights, gradients and
        `activation_bytes` of activations to the device and back; see `cost.offload`. Activations of layers
        that are no blocks stay on the device.
        """
        gather, reduce = self.block_seconds(parameters)
        copies = self._offload_transfers(parameters, activation_bytes if is_block else 0.0, micro_batches)
        if not self.overlaps_compute:
            weights = parameters / self.plan.tp * self.weight_bytes
            reallocated = reallocated_bytes(
                self.plan, weights, activation_bytes, micro_batches, is_block=is_block
            )
            added_forward, added_backward = (
                allocated / self.hardware.host.fresh_bytes_per_second for allocated in reallocated
            )
            return (
                added_forward + copies.weights + copies.activations_out,
                added_backward + copies.weights + copies.activations_in,
            )
        stored, fetched, waited = copies.activations_out, copies.activations_in, 0.0
        if self.plan.offload_activations == "disk":
            stored, fetched, waited = 0.0, 0.0, 1.0
        added_forward = exposed_seconds(gather + copies.weights + stored, forward) - exposed_seconds(
            gather, forward
        )
        exchanged = gather + reduce
        added_backward = exposed_seconds(exchanged + copies.weights + copies.gradients + fetched, backward)
        added_backward -= exposed_seconds(exchanged, backward)
        return (
            added_forward + waited * copies.activations_out,
            added_backward + waited * copies.activations_in,
        )

    def _offload_transfers(
        self, parameters: float, activation_bytes: float, micro_batches: int
    ) -> OffloadTransfers:
        """Return the seconds of one block's offload transfers in one micro-batch."""
        plan, machine = self.plan, self.hardware
        shards = parameters / plan.tp / self.shards.size
        weights = weight_transfer_seconds(machine, plan, shards) if self.reshards_after_forward else 0.0
        # Counts the first micro-batch alone: later ones are added on the host, in `accumulation_seconds`.
        gradients = (
            gradient_transfer_seconds(machine, plan, shards * self.trainable_share)
            if self.reduces_per_block
            else 0.0
        )
        target = plan.offload_activations
        return OffloadTransfers(
            weights,
            gradients / micro_batches,
            transfer_seconds(machine, plan, target, activation_bytes, from_device=True),
            transfer_seconds(machine, plan, target, activation_bytes, from_device=False),
        )

    def _copy_out_seconds(self, unsharded_elements: float) -> float:
        """Return the seconds of FSDP2's buffer copies around the gather of one unit's weights.

        It copies them into one buffer to gather them, and out of another. On a GPU that runs beside
        computing.
        """
        parts = unsharded_elements / self.shards.size
        traffic = parts * (4.0 + self.weight_bytes) + unsharded_elements * 2 * self.weight_bytes
        return memory_bound_seconds(self.hardware.chip, traffic, 2)

    def _reduce_scatter_seconds(self, unsharded_elements: float) -> float:
        """Return the seconds of the reduce-scatter of gradients over shards.

        Where shards are replicated, only the replicas' all-reduce is compressed.
        """
        trained = unsharded_elements * self.trainable_share
        return self.gradient_collectives.reduce_scatter(
            self.shards, trained, compressed=self.replicas.size == 1
        )

    def _copy_in_seconds(self, unsharded_elements: float) -> float:
        """Return the seconds of copying gradients into the buffer that is reduced."""
        traffic = (
            unsharded_elements * self.trainable_share * (self.weight_bytes + self.gradient_element_bytes)
        )
        return memory_bound_seconds(self.hardware.chip, traffic, 1 if traffic else 0)

    def casting_seconds(self, parameters: float) -> float:
        """Return the seconds, per forward, of casting a block's master weights to compute precision.

        That is autocast's work.

        Sharded weights are cast before they are gathered: each rank casts its shard.
        """
        cast = parameters * self.cast_share / self.plan.tp
        if self.framework.weight_storage == "copies" or self.plan.shard != "none" or self.weight_bytes >= 4.0:
            return 0.0
        return memory_bound_seconds(self.hardware.chip, cast * (4.0 + self.weight_bytes)) if cast else 0.0

    def accumulation_seconds(self, parameters: float, micro_batches: int) -> float:
        """Return the seconds, per micro-batch, of adding a block's gradients to earlier ones.

        Autograd casts to the precision of the master weights before it adds; one kernel can do both
        (Megatron's `main_grad`), or the matrix products themselves add.
        """
        software = self.framework
        if not parameters or not self.trainable_share:
            return 0.0
        computed, accumulated = ELEMENT_BYTES[self.plan.precision], float(software.accumulation_bytes)
        gradients = parameters * self.trainable_share / self.plan.tp
        if self.reduces_per_block:
            gradients /= self.shards.size  # each block's gradients are reduced first
        added = (micro_batches - 1) / micro_batches
        if self.reduces_per_block and updates_on_cpu(self.plan):
            return added * host_accumulation_seconds(self.hardware, self.plan, gradients)
        if software.fuses_gradient_accumulation:
            # Bytes beyond the result that every product writes; half hides behind other tiles' products.
            traffic, kernels = added * 0.5 * (2 * accumulated - 2.0), 0
        elif software.weight_storage == "copies":
            traffic, kernels = added * (computed + 2 * accumulated), 1
        else:
            traffic = (computed + accumulated) * (computed != accumulated) + added * 3 * accumulated
            kernels = 2
        return memory_bound_seconds(self.hardware.chip, gradients * traffic, kernels)

    def reduce_gather_per_step(self, parameters: float) -> tuple[float, float]:
        """Return (reduce, gather) seconds, once a step, of a rank's gradients and updated weights.

        A rank holds its part of the experts, which fewer ranks replicate: as many bytes are transferred.
        """
        unsharded = parameters / self.plan.tp
        sharded = unsharded * self.trainable_share / self.shards.size
        algorithm = all_reduce_cost_algorithm(self.plan, self.hardware, self.replicas)
        reduce = self.gradient_collectives.all_reduce(self.replicas, sharded, algorithm)
        rounding = 0.0
        if self.has_shared_memory_weights and self.weight_bytes < 4.0:
            parts = unsharded * self.cast_share / self.shards.size
            rounding = memory_bound_seconds(self.hardware.chip, parts * (4.0 + self.weight_bytes))
        if self.reduces_per_block and self.reshards_after_forward:
            return reduce, rounding  # everything else is exchanged block by block
        copies, gather = not self.overlaps_compute and not self.plan.computes_on_master_weights, 0.0
        if self.has_shared_memory_weights:
            gather = rounding
        elif not self.reshards_after_forward:
            cast_elements = unsharded * self.cast_share
            changed = 0.0 if self.framework.frozen_base_weights else cast_elements * self.weight_bytes
            gather = all_gather_seconds(self.hardware, self.shards, changed)
            gather += weight_transfer_seconds(self.hardware, self.plan, unsharded / self.shards.size)
            gather += self._copy_out_seconds(cast_elements) if copies else 0.0
        if self.reduces_per_block:
            return reduce, gather
        reduce += self._reduce_scatter_seconds(unsharded)
        reduce += gradient_transfer_seconds(
            self.hardware, self.plan, unsharded * self.trainable_share / self.shards.size
        )
        return reduce + self._copy_in_seconds(unsharded) if copies else reduce, gather


def overlaps_gradient_reduction(plan: Plan, hardware: HardwareModel) -> bool:
    """Return whether gradients are reduced beside the last backward.

    On CPUs they are where a network between nodes transfers them: within one node the transfer takes the
    cores that compute (docs/results/performance.md). Gradients of a pipeline are complete only after its
    backwards, and compressed ones are reduced after them too.
    """
    if plan.device != "cpu":
        return True
    group = RankGroup(plan.replicate_group_size, plan.tp * plan.shard_group_size)
    if plan.compression_methods:
        return False
    return (
        plan.overlap
        and plan.computes_on_master_weights
        and plan.pp == 1
        and leaves_innermost_level(hardware, group)
    )


def reduces_per_block(plan: Plan) -> bool:
    """Return whether each micro-batch reduces its gradients block by block; a pipeline reduces at the end."""
    return plan.shard in ("gradients", "parameters") and plan.pp == 1


def data_parallel_key(plan: Plan) -> tuple[object, ...]:
    """Return the key of plans that exchange, cast and add a block's parameters alike in every micro-batch."""
    exchanges = reduces_per_block(plan) or reshards_after_forward(plan)
    by_block = (plan.shard, plan.shard_group_size) if exchanges else None
    # These decide whether the ranks of a node share the model states.
    on_machines = (plan.tp, plan.world_size) if exchanges and plan.device == "cpu" else None
    offload = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return plan.shard == "none", by_block, on_machines, offload


def exposed_seconds(communication: float, compute: float) -> float:
    """Return the seconds that `communication` beside `compute` adds to it."""
    return max(0.0, communication - compute) + OVERLAP_SLOWDOWN * min(communication, compute)
