"""Layout of one rank's sharded model states: element sizes, communication units and memory shared by ranks.

Weights (`sharded_weights`) and gradients (`sharded_gradients`) are counted from it. Sharded means FSDP2, or
replicas without it; frameworks with unsharded copies have no such layout (`model_states`).
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.offload import master_weight_bytes
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES
from wanma.planner.memory.rank_parameters import RankParameters


class StateLayout(NamedTuple):
    """Layout of one rank's sharded model states; sizes in elements unless a name says bytes."""

    plan: Plan
    rank_parameters: RankParameters
    sharded_elements: float
    """Parameters of this rank's shard."""
    micro_batches: int
    """Largest number of micro-batches of one step and rank."""
    master_bytes: float
    """Bytes of one element of master weights, reduced gradients and optimizer state."""
    compute_bytes: float
    """Bytes of one element of gathered weights, and of gradients as backward makes them."""
    frozen_bytes: float
    """Bytes of one element of frozen weights as they are stored."""
    casts_frozen_weights: bool
    """True if frozen weights are stored once, in the precision that they are gathered in."""
    is_single_unit: bool
    """True if the gradients of all parameters are reduced in one unit."""
    unit_elements: float
    """Parameters of the largest unit of communication: a block, or all layers outside the blocks."""
    accumulates_unsharded: bool
    """True if unsharded gradients are summed over the micro-batches and reduced after the last."""
    reduces_in_shared_memory: bool
    """True if data ranks gather and reduce shards in memory that they share."""
    replicas_share_memory: bool
    """True if all replicas are on one node, and reduce small gradients in memory that they share."""
    has_shared_memory_weights: bool
    """True if ranks compute with one common copy of the weights (`SharedMemoryWeights`)."""
    local_experts: float
    """Parameters of unsharded experts in one unit, which shared memory does not exchange; else 0."""

    @property
    def frozen_needs_no_cast(self) -> bool:
        """Return True if frozen weights are stored as ranks compute with them."""
        return self.casts_frozen_weights and self.frozen_bytes == self.compute_bytes

    @property
    def offloads_parameters(self) -> bool:
        return self.plan.offload_parameters != "none"

    @property
    def updates_on_host(self) -> bool:
        """Return True if the optimizer runs on the host, where a GPU's offloaded shards are."""
        return self.offloads_parameters and self.plan.device == "cuda"

    @property
    def is_frozen_gather_free(self) -> bool:
        """Return True if frozen weights are not gathered.

        They need no cast, and a step would keep them gathered from beginning to end.
        """
        is_temporary = self.plan.reshards_after_forward or self.offloads_parameters
        return self.frozen_needs_no_cast and not is_temporary

    @property
    def reduction_buffer_element_bytes(self) -> float:
        """Return the bytes of one element of a unit's own reduction buffer; 0 in shared memory.

        FSDP2 copies the gradients of a unit into one buffer, in the precision of the master weights.
        """
        return 0.0 if self.reduces_in_shared_memory else self.master_bytes


def build_state_layout(
    rank_parameters: RankParameters,
    sharded_elements: float,
    plan: Plan,
    micro_batches: int,
    framework: FrameworkTraits,
) -> StateLayout:
    """Return the layout of one rank's sharded model states."""
    master_bytes, compute_bytes = master_weight_bytes(plan), ELEMENT_BYTES[plan.precision]
    casts_frozen_weights = framework.casts_frozen_weights
    unsharded_gradients = plan.shard in ("none", "optimizer")
    # On a CPU gradients that are unsharded anyway are one unit (`parallel.shard`).
    is_single_unit = plan.device == "cpu" and unsharded_gradients and plan.offload_parameters == "none"
    shards_share_memory, replicas_share_memory = framework.shares_memory(plan)
    reduces_in_shared_memory = shards_share_memory and plan.shard_group_size > 1
    local_experts = 0.0
    if reduces_in_shared_memory and rank_parameters.experts and plan.expert_group_sizes[1] == 1:
        local_experts = rank_parameters.experts if is_single_unit else rank_parameters.largest_block_experts
    largest_unit = max(rank_parameters.end_layers, rank_parameters.largest_block)
    return StateLayout(
        plan=plan,
        rank_parameters=rank_parameters,
        sharded_elements=sharded_elements,
        micro_batches=micro_batches,
        master_bytes=master_bytes,
        compute_bytes=compute_bytes,
        frozen_bytes=frozen_element_bytes(plan) if casts_frozen_weights else master_bytes,
        casts_frozen_weights=casts_frozen_weights,
        is_single_unit=is_single_unit,
        unit_elements=rank_parameters.total if is_single_unit else largest_unit,
        # In a pipeline torch's schedules reduce once, at the end of the step.
        accumulates_unsharded=micro_batches > 1 and (plan.pp > 1 or unsharded_gradients),
        reduces_in_shared_memory=reduces_in_shared_memory,
        replicas_share_memory=replicas_share_memory,
        has_shared_memory_weights=framework.has_shared_memory_weights(plan),
        local_experts=local_experts,
    )


def frozen_element_bytes(plan: Plan) -> float:
    """Return the bytes of one element of a frozen weight; weights gathered in fp8 are cast from fp32."""
    if plan.fp8 and plan.shard == "parameters" and plan.tp == 1:
        return master_weight_bytes(plan)
    return ELEMENT_BYTES[plan.precision]
