"""Communication time of data-parallel ranks: gather of weights, reduction of gradients, their overlap.

Works for every kind of model, because model states are counted in parameters. Pure functions, without torch.
"""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.cost.gradient_collectives import Summing
from wanma.planner.cost.offload import (
    Moved,
    adding_on_host_seconds,
    asked_again_bytes,
    copy_seconds,
    gathers_again,
    gradients_seconds,
    updates_on_host,
    weights_seconds,
)
from wanma.planner.hardware_model.collective_time import Algorithm, Group, all_gather_seconds, crosses
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES, streaming_seconds

INTERFERENCE = 0.15
"""Overlap slowdown: share of overlapped communication time that the compute beside it loses.

Collectives occupy some of the multiprocessors and of the memory bandwidth (NCCL uses 16 to 24 blocks of 108
to 132)."""


class DataParallel:
    """Communication over the ranks that shard or replicate a stage's model states.

    Args:
        trained_share: share of the parameters that is trained; gradients of the others are not reduced.
    """

    def __init__(self, plan: Plan, machine: Machine, software: Software, trained_share: float = 1.0) -> None:
        self.plan, self.machine, self.software = plan, machine, software
        self.shards = Group(plan.shard_ranks, plan.tp)
        self.replicas = Group(plan.replicas, plan.tp * plan.shard_ranks)
        self.trained_share = 0.0 if software.frozen else trained_share
        self.copied_share = trained_share if software.rounds_frozen and not software.frozen else 1.0
        """Share of the parameters that a step casts, and gathers once; frozen ones are stored in compute
        precision."""
        self.gradient_bytes = software.gradient_bytes * self.trained_share
        """Bytes per parameter of a gradient, as it is reduced without compression."""
        self.summing = Summing(plan, machine, float(software.gradient_bytes))
        self.weight_bytes = ELEMENT_BYTES[plan.precision]
        """Bytes per parameter of a weight, as it is gathered to be computed with."""
        self.is_by_block = is_by_block(plan)
        self.gathers_again = gathers_again(plan)
        self.has_common_weights = software.has_common_weights(plan)
        """True if ranks of a node compute with common weights: nothing is gathered, but shards of another
        precision are written into the common copy."""
        self.is_beside_compute = plan.device != "cpu"
        """True if collectives run beside compute; those of a CPU run on the cores that compute."""
        self.hides_sums = hides_sums(plan, machine)
        self._of_blocks: dict[float, tuple[float, float]] = {}
        """Cache of (gather, reduce) seconds of one block, by its parameters."""

    def per_micro_batch(self, parameters: float, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds that a block's collectives add to its forward and its backward.

        They gather the block's sharded parameters for both, and reduce its gradients beside backward. The
        next block is gathered while one computes; a pipeline keeps blocks gathered. With sharded gradients
        (ZeRO-2) a block's gradients are reduced as well, but its parameters stay unsharded within a step.
        """
        gather, reduce = self._block_seconds(parameters)
        if not self.is_beside_compute:
            return gather, gather + reduce
        return exposed(gather, forward), exposed(gather + reduce, backward)

    def program_seconds(self) -> float:
        """Return the framework overhead of each block and micro-batch beside its collectives, in seconds."""
        if self.shards.size == 1 or not self.is_by_block:
            return 0.0
        program = self.machine.program
        return program.parameters_seconds if self.gathers_again else program.gradients_seconds

    def _block_seconds(self, parameters: float) -> tuple[float, float]:
        """Return (gather, reduce) seconds of one block, including buffer copies on a CPU."""
        if parameters not in self._of_blocks:
            self._of_blocks[parameters] = self._exchange_seconds(parameters)
        return self._of_blocks[parameters]

    def _exchange_seconds(self, parameters: float) -> tuple[float, float]:
        reduces = self.is_by_block and self.shards.size > 1
        if not reduces and self.plan.offload_parameters == "none":
            return 0.0, 0.0
        whole, gather, reduce = parameters / self.plan.tp, 0.0, 0.0
        if self.gathers_again and not self.has_common_weights:
            gather = all_gather_seconds(self.machine, self.shards, whole * self.weight_bytes)
            gather += 0.0 if self.is_beside_compute else self._copied(whole)
        if reduces:
            reduce = self._scattered(whole)
            reduce += 0.0 if self.is_beside_compute else self._filed(whole)
        return gather, reduce

    def moved(
        self,
        parameters: float,
        kept_bytes: float,
        forward: float,
        backward: float,
        micro_batches: int,
        *,
        is_block: bool,
    ) -> tuple[float, float]:
        """Return the seconds that offload transfers add to a block's forward and backward.

        They come on top of `per_micro_batch`. The transfers bring the block's weights, gradients and
        `kept_bytes` of activations to the device and back; see `cost.offload`. Activations of layers that are
        no blocks stay on the device.
        """
        gather, reduce = self._block_seconds(parameters)
        copies = self._moved(parameters, kept_bytes if is_block else 0.0, micro_batches)
        if not self.is_beside_compute:
            weights = parameters / self.plan.tp * self.weight_bytes
            again = asked_again_bytes(self.plan, weights, kept_bytes, micro_batches, is_block=is_block)
            ahead, back = (asked / self.machine.host.fresh_bytes_per_second for asked in again)
            return ahead + copies.weights + copies.out, back + copies.weights + copies.back
        out, back, waited = copies.out, copies.back, 0.0
        if self.plan.offload_activations == "disk":
            out, back, waited = 0.0, 0.0, 1.0
        ahead = exposed(gather + copies.weights + out, forward) - exposed(gather, forward)
        exchanged = gather + reduce
        late = exposed(exchanged + copies.weights + copies.gradients + back, backward)
        late -= exposed(exchanged, backward)
        return ahead + waited * copies.out, late + waited * copies.back

    def _moved(self, parameters: float, kept_bytes: float, micro_batches: int) -> Moved:
        """Return the seconds of one block's offload transfers in one micro-batch."""
        plan, machine = self.plan, self.machine
        shards = parameters / plan.tp / self.shards.size
        weights = weights_seconds(machine, plan, shards) if self.gathers_again else 0.0
        # Counts the first micro-batch alone: later ones are added on the host, in `adding_seconds`.
        gradients = gradients_seconds(machine, plan, shards * self.trained_share) if self.is_by_block else 0.0
        place = plan.offload_activations
        return Moved(
            weights,
            gradients / micro_batches,
            copy_seconds(machine, plan, place, kept_bytes, out=True),
            copy_seconds(machine, plan, place, kept_bytes, out=False),
        )

    def _copied(self, whole: float) -> float:
        """Return the seconds of FSDP2's buffer copies around the gather of one unit's weights.

        It copies them into one buffer to gather them, and out of another. On a GPU that runs beside
        computing.
        """
        parts = whole / self.shards.size
        moved = parts * (4.0 + self.weight_bytes) + whole * 2 * self.weight_bytes
        return streaming_seconds(self.machine.chip, moved, 2)

    def _scattered(self, whole: float) -> float:
        """Return the seconds of the reduce-scatter of gradients over shards.

        Where shards are replicated, only the replicas' all-reduce is compressed.
        """
        trained = whole * self.trained_share
        return self.summing.reduce_scatter(self.shards, trained, compressed=self.replicas.size == 1)

    def _filed(self, whole: float) -> float:
        """Return the seconds of copying gradients into the buffer that is reduced."""
        moved = whole * self.trained_share * (self.weight_bytes + self.software.gradient_bytes)
        return streaming_seconds(self.machine.chip, moved, 1 if moved else 0)

    def casting_seconds(self, parameters: float) -> float:
        """Return the seconds, per forward, of casting a block's master weights to compute precision.

        That is autocast's work.

        Sharded weights are cast before they are gathered: each rank casts its shard.
        """
        whole = parameters * self.copied_share / self.plan.tp
        if self.software.weights == "copies" or self.plan.shard != "none" or self.weight_bytes >= 4.0:
            return 0.0
        return streaming_seconds(self.machine.chip, whole * (4.0 + self.weight_bytes)) if whole else 0.0

    def adding_seconds(self, parameters: float, micro_batches: int) -> float:
        """Return the seconds, per micro-batch, of adding a block's gradients to earlier ones.

        Autograd casts to the precision of the master weights before it adds; one kernel can do both
        (Megatron's `main_grad`), or the matrix products themselves add.
        """
        software = self.software
        if not parameters or not self.trained_share:
            return 0.0
        fresh, kept = ELEMENT_BYTES[self.plan.precision], float(software.accumulated_bytes)
        whole = parameters * self.trained_share / self.plan.tp
        if self.is_by_block:
            whole /= self.shards.size  # each block's gradients are reduced first
        added = (micro_batches - 1) / micro_batches
        if self.is_by_block and updates_on_host(self.plan):
            return added * adding_on_host_seconds(self.machine, self.plan, whole)
        if software.adds_in_product:
            # Bytes beyond the result that every product writes; half hides behind other tiles' products.
            moved, kernels = added * 0.5 * (2 * kept - 2.0), 0
        elif software.weights == "copies":
            moved, kernels = added * (fresh + 2 * kept), 1
        else:
            moved, kernels = (fresh + kept) * (fresh != kept) + added * 3 * kept, 2
        return streaming_seconds(self.machine.chip, whole * moved, kernels)

    def _algorithm(self) -> Algorithm | None:
        """Return the algorithm of the replicas' all-reduce; None: the fastest, as NCCL chooses.

        On CPUs it is Gloo's ring, or the hierarchical algorithm of wanma.
        """
        if self.is_beside_compute or not crosses(self.machine, self.replicas):
            return None
        return "hierarchical" if self.plan.hierarchical and self.plan.computes_with_state else "ring"

    def once_a_step(self, parameters: float) -> tuple[float, float]:
        """Return (reduce, gather) seconds, once a step, of a rank's gradients and updated weights.

        A rank holds its part of the experts, which fewer ranks replicate: as many bytes are transferred.
        """
        whole = parameters / self.plan.tp
        mine = whole * self.trained_share / self.shards.size
        reduce = self.summing.all_reduce(self.replicas, mine, self._algorithm())
        rounding = 0.0
        if self.has_common_weights and self.weight_bytes < 4.0:
            parts = whole * self.copied_share / self.shards.size
            rounding = streaming_seconds(self.machine.chip, parts * (4.0 + self.weight_bytes))
        if self.is_by_block and self.gathers_again:
            return reduce, rounding  # everything else is exchanged block by block
        copies, gather = not self.is_beside_compute and not self.plan.computes_with_state, 0.0
        if self.has_common_weights:
            gather = rounding
        elif not self.gathers_again:
            moved = whole * self.copied_share
            changed = 0.0 if self.software.frozen else moved * self.weight_bytes
            gather = all_gather_seconds(self.machine, self.shards, changed)
            gather += weights_seconds(self.machine, self.plan, whole / self.shards.size)
            gather += self._copied(moved) if copies else 0.0
        if self.is_by_block:
            return reduce, gather
        reduce += self._scattered(whole)
        reduce += gradients_seconds(self.machine, self.plan, whole * self.trained_share / self.shards.size)
        return reduce + self._filed(whole) if copies else reduce, gather


def hides_sums(plan: Plan, machine: Machine) -> bool:
    """Return whether gradients are reduced beside the last backward.

    On CPUs they are where a network between nodes transfers them: within one node the transfer takes the
    cores that compute (docs/performance.md). Gradients of a pipeline are complete only after its backwards,
    and compressed ones are reduced after them too.
    """
    if plan.device != "cpu":
        return True
    group = Group(plan.replicas, plan.tp * plan.shard_ranks)
    if plan.compressions:
        return False
    return plan.overlap and plan.computes_with_state and plan.pp == 1 and crosses(machine, group)


def is_by_block(plan: Plan) -> bool:
    """Return whether each micro-batch reduces its gradients block by block; a pipeline reduces at the end."""
    return plan.shard in ("gradients", "parameters") and plan.pp == 1


def block_key(plan: Plan) -> tuple[object, ...]:
    """Return the key of plans that exchange, cast and add a block's parameters alike in every micro-batch."""
    exchanges = is_by_block(plan) or gathers_again(plan)
    by_block = (plan.shard, plan.shard_ranks) if exchanges else None
    # These decide whether the ranks of a node share the model states.
    on_machines = (plan.tp, plan.world_size) if exchanges and plan.device == "cpu" else None
    away = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return plan.shard == "none", by_block, on_machines, away


def exposed(communication: float, compute: float) -> float:
    """Return the seconds that `communication` beside `compute` adds to it."""
    return max(0.0, communication - compute) + INTERFERENCE * min(communication, compute)
