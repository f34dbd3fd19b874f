"""Model states of one rank: parameters, gradients and optimizer state, in bytes.

Sharded states follow Rajbhandari et al. 2020, section 5; FSDP2's additional memory follows its own behavior
(one unit of communication per block, another for the rest), which tests measure. Frameworks with unsharded
copies follow Megatron-LM: 2 bytes of weights, 2 or 4 of gradients, and 12 of state per parameter, which a
distributed optimizer shards over the data ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.collectives.compression.compression_traits import MAX_IN_FLIGHT, MAX_SLICE_ELEMENTS
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import OPTIMIZER_CHUNK_PARAMETERS, Plan
from wanma.job.sections.train import TrainSection
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.gradient_collectives import error_feedback_bytes
from wanma.planner.memory.activations import ELEMENT_BYTES


class RankParameters(NamedTuple):
    """Numbers of parameters of one pipeline rank, on one rank of `tp`."""

    dense_blocks: float
    """Parameters of its blocks without routed experts."""
    experts: float
    """Parameters of routed experts, on one rank of `ep`."""
    end_layers: float
    """Parameters of layers that are no blocks: embedding, head."""
    largest_block: float
    """Parameters of its largest block, with this rank's experts."""
    distinct_matrices: float = 0.0
    """Elements of its products' matrices, one of every shape."""
    pre_block: float = 0.0
    """Parameters of layers before the blocks, such as an embedding; backward reaches them last."""
    embedding: float = 0.0
    """Parameters of `pre_block` that are one tensor."""
    largest_block_experts: float = 0.0
    """Parameters of the routed experts of its largest block."""
    tensors: tuple[tuple[float, float], ...] = ()
    """(elements, number) of large tensors that are known one by one; the others may be of any size."""
    trainable_share: float = 1.0
    """Trained share of all parameters, 0 .. 1."""
    trainable_block_share: float = 1.0
    """Trained share of the blocks' parameters."""
    trainable_pre_block_share: float = 1.0
    """Trained share of the parameters before the blocks."""
    trainable_post_block_share: float = 1.0
    """Trained share of the parameters after the blocks."""

    @property
    def trainable_end_layer_share(self) -> float:
        """Return the trained share of the parameters outside the blocks."""
        last = self.end_layers - self.pre_block
        return (
            (self.pre_block * self.trainable_pre_block_share + last * self.trainable_post_block_share)
            / self.end_layers
            if self.end_layers
            else 1.0
        )

    @property
    def total(self) -> float:
        """Return the number of all its parameters."""
        return self.dense_blocks + self.experts + self.end_layers

    def in_tensors_below(self, elements: float) -> float:
        """Return the number of parameters in tensors of fewer elements, as far as sizes are known."""
        return max(self.total - sum(size * count for size, count in self.tensors if size >= elements), 0.0)


class ModelStates(NamedTuple):
    """Model states of one rank, in bytes."""

    parameters: float
    """Parameters, including gathered ones."""
    gathered_parameters: float
    """Parameters that are gathered for a step."""
    buffers: float
    """Exchange buffers: this rank's part of memory that ranks share; once used it stays."""
    optimizer: float
    """Optimizer state, with an averaged copy of the weights, error feedback, and the states of sites."""
    accumulated_gradients: float
    """Gradients that exist from one micro-batch to the next."""
    post_block_gradients: float
    """Gradients of layers after the blocks, as one backward makes them: first of all."""
    reduction_workspace: float
    """Additional gradients while backward reduces a block's gradients."""
    block_gradients: float
    """Gradients of the layers that backward has passed when it reaches its last block, with their reduction
    buffers."""
    unaccumulated_gradients: float
    """Last gradient of a micro-batch, before it is added to the sum of earlier ones."""
    all_gradients: float
    """All gradients, as backward ends, with their reduction buffers."""
    released_parameters: float
    """Part of `gathered_parameters` that is freed when backward ends."""
    receive_buffers: float
    """Parts that come from other ranks, beside `all_gradients`."""
    last_gradient: float
    """Gradient tensor that backward makes last."""
    last_reduction_buffer: float
    """Reduction buffer of the last unit's gradients, as far as it has no room in freed memory."""
    host: float
    disk: float


def weight_bytes(workload: Workload, plan: Plan, *, casts_frozen_weights: bool) -> float:
    """Return the bytes of a whole model's weights as they are stored and saved."""
    master = 8.0 if plan.precision == "fp64" else 4.0
    trained = workload.parameters * workload.trainable_share
    frozen = _frozen_bytes(plan, ELEMENT_BYTES[plan.precision], master) if casts_frozen_weights else master
    return trained * master + (workload.parameters - trained) * frozen


def _frozen_bytes(plan: Plan, compute: float, master: float) -> float:
    """Return the bytes of one element of a frozen weight; weights gathered in fp8 are cast from fp32."""
    return master if plan.fp8 and plan.shard == "parameters" and plan.tp == 1 else compute


_COMPRESSION_CHUNK_BYTES = 4 * MAX_SLICE_ELEMENTS * MAX_IN_FLIGHT
"""Bytes of gradients that are compressed in one go."""
_COMPRESSION_COPIES = 3
"""Approximate number of copies of those gradients that compression and decompression take beside them."""

OPTIMIZER_STATE_COPIES = {
    "adamw": (2, 2),
    "sgd": (1, 1),
    "plain sgd": (0, 0),
    "muon": (1, 2),
    "adafactor": (0, 0),
}
"""Elements of optimizer state per parameter, of blocks and of other layers. AdamW keeps two moments, SGD a
momentum if any; Muon keeps one for the blocks' matrices and leaves the rest to AdamW; Adafactor keeps a row
and a column for each matrix, which is next to nothing."""


def optimizer_rule(train: TrainSection) -> str:
    """Return the key of `OPTIMIZER_STATE_COPIES` for a job."""
    return "plain sgd" if train.optimizer == "sgd" and train.momentum == 0 else train.optimizer


def optimizer_state_elements(workload: Workload, train: TrainSection) -> float:
    """Return the number of elements of the whole model's optimizer state."""
    of_blocks, of_ends = OPTIMIZER_STATE_COPIES[optimizer_rule(train)]
    return sum(
        (of_blocks if layer.is_block or layer.count > 1 else of_ends)
        * (layer.count * layer.parameters * layer.trainable_share)
        for layer in workload.layers
    )


def model_states_of(
    rank_parameters: RankParameters,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int,
    weight_average: bool,
    framework: FrameworkTraits,
) -> ModelStates:
    """Return the model states of one rank, in bytes.

    Args:
        optimizer: key of `OPTIMIZER_STATE_COPIES`, as `optimizer_rule` returns it.
        micro_batches: largest number of micro-batches of one step and rank.
    """
    trained_share = rank_parameters.trainable_share
    sharded_blocks = rank_parameters.dense_blocks / plan.shard_group_size
    if rank_parameters.experts:
        sharded_blocks += rank_parameters.experts / plan.expert_group_sizes[1]
    sharded_ends = rank_parameters.end_layers / plan.shard_group_size
    of_blocks, of_ends = OPTIMIZER_STATE_COPIES[optimizer]
    elements = (
        of_blocks * sharded_blocks * rank_parameters.trainable_block_share
        + of_ends * sharded_ends * rank_parameters.trainable_end_layer_share
    )
    shards = sharded_blocks + sharded_ends
    if framework.weight_storage == "copies":
        return _unsharded_model_states(rank_parameters, shards, elements, trained_share, framework)
    return _sharded_model_states(
        rank_parameters,
        shards,
        elements,
        plan,
        micro_batches,
        weight_average,
        trained_share,
        shares_memory=framework.shares_memory(plan),
        has_shared_memory_weights=framework.has_shared_memory_weights(plan),
        casts_frozen_weights=framework.casts_frozen_weights,
    )


def _unsharded_model_states(
    rank_parameters: RankParameters,
    sharded_elements: float,
    optimizer_elements: float,
    trainable_share: float,
    framework: FrameworkTraits,
) -> ModelStates:
    """Return the model states of frameworks with unsharded copies of weights (Megatron-LM)."""
    gradients = rank_parameters.total * framework.accumulation_bytes * trainable_share
    if framework.dummy_weight_gradients:
        gradients += 2 * rank_parameters.distinct_matrices
    return ModelStates(
        parameters=2 * rank_parameters.total,
        gathered_parameters=0.0,
        buffers=0.0,
        optimizer=4 * (optimizer_elements + sharded_elements * trainable_share),
        accumulated_gradients=gradients,
        post_block_gradients=0.0,
        reduction_workspace=0.0,
        block_gradients=0.0,
        unaccumulated_gradients=0.0,
        all_gradients=gradients,
        released_parameters=0.0,
        receive_buffers=0.0,
        last_gradient=0.0,
        last_reduction_buffer=0.0,
        host=0.0,
        disk=0.0,
    )


def _sharded_model_states(  # noqa: C901, PLR0915  # one balance of many terms that share their cases
    rank_parameters: RankParameters,
    sharded_elements: float,
    optimizer_elements: float,
    plan: Plan,
    micro_batches: int,
    weight_average: bool,
    trainable_share: float,
    *,
    shares_memory: tuple[bool, bool],
    has_shared_memory_weights: bool,
    casts_frozen_weights: bool,
) -> ModelStates:
    """Return the model states of master weights in shards (FSDP2, or one shard)."""
    master = 8 if plan.precision == "fp64" else 4
    compute = ELEMENT_BYTES[plan.precision]
    # FSDP2 computes with a copy of the weights in compute precision beside the shards of the master weights,
    # also with one shard; plans that compute with the state itself are handled below. On a GPU it gathers
    # the next block while one computes.
    # In a pipeline blocks stay gathered after their backward, and gradients unsharded to the step's end.
    around = 1 if plan.device == "cpu" else 2
    away = plan.offload_parameters != "none"
    by_block = (plan.shard == "parameters" or away) and plan.pp == 1
    gathered = (
        rank_parameters.end_layers + around * rank_parameters.largest_block
        if by_block
        else rank_parameters.total
    )
    frozen = _frozen_bytes(plan, compute, master) if casts_frozen_weights else float(master)
    parameters = sharded_elements * (master * trainable_share + frozen * (1 - trainable_share))
    # Where a step keeps all weights gathered, frozen ones that need no cast are not gathered. Every rank
    # stores all of them, unless ranks compute with common weights.
    copied = 1.0
    if casts_frozen_weights and frozen == compute and not (by_block or away):
        copied = trainable_share
        if not has_shared_memory_weights:
            parameters = sharded_elements * master * trainable_share + rank_parameters.total * frozen * (
                1 - trainable_share
            )

    # Gradients of one unit are copied into one buffer to be reduced. Without reduction at every
    # micro-batch, unsharded gradients are accumulated in fp32 until the last.
    # On a CPU they are one unit where they are unsharded anyway (`parallel.shard`), and with one shard the
    # buffer becomes the gradient.
    whole_kind = plan.shard in ("none", "optimizer")
    one_unit = plan.device == "cpu" and whole_kind and not away
    unit = (
        rank_parameters.total if one_unit else max(rank_parameters.end_layers, rank_parameters.largest_block)
    )
    # The layers outside the blocks are one unit, whose unsharded gradients wait for the last of them.
    waiting = rank_parameters.end_layers - rank_parameters.pre_block
    behind = (
        max(1 - (rank_parameters.pre_block + rank_parameters.largest_block) / rank_parameters.total, 0.0)
        if rank_parameters.total
        else 0.0
    )
    accumulates = micro_batches > 1 and (plan.pp > 1 or whole_kind)
    # Buffers for gathering a unit and for reducing its gradients are in shared memory. Layers outside the
    # blocks are gathered first, and stay there until the first block is gathered; where a block is larger,
    # the next one has no room in the hole that they leave. Unsharded experts are not exchanged there.
    # Common weights are not gathered at all: in 16 bits there is one copy of them beside the shards, in 32
    # bits the shards are that copy.
    shards_share, replicas_share = shares_memory
    buffers, reduced, alone = 0.0, float(master), 0.0
    if shards_share and plan.shard_group_size > 1:
        if rank_parameters.experts and plan.expert_group_sizes[1] == 1:
            alone = rank_parameters.experts if one_unit else rank_parameters.largest_block_experts
        block = rank_parameters.largest_block - (0.0 if one_unit else alone)
        together = rank_parameters.end_layers + block * (2 if block > rank_parameters.end_layers else 1)
        exchanged = rank_parameters.total - alone if one_unit else max(rank_parameters.end_layers, block)
        gathering = (exchanged if one_unit else together) * compute
        if has_shared_memory_weights:
            gathered, gathering = (
                (rank_parameters.largest_block_experts if by_block else rank_parameters.experts)
                if alone
                else 0.0,
                0.0,
            )
            # Shards of frozen weights are parts of the common copy.
            beside = trainable_share if casts_frozen_weights and frozen == compute else 1.0
        buffers, reduced = max(gathering, exchanged * master * trainable_share), 0.0
        if has_shared_memory_weights and compute != master:
            buffers += (
                (rank_parameters.dense_blocks + rank_parameters.end_layers)
                / plan.shard_group_size
                * compute
                * beside
            )
            if rank_parameters.experts and not alone:
                buffers += rank_parameters.experts / plan.expert_group_sizes[1] * compute * beside
    if accumulates:
        accumulated = rank_parameters.total * master
        block = 0.0 if one_unit else rank_parameters.largest_block
        reducing = 0.0 if compute == master else (waiting + block) * compute
        made = reducing
        final = accumulated + unit * reduced + alone * master
    else:
        accumulated = sharded_elements * master if micro_batches > 1 else 0.0
        reducing = waiting * compute + (
            0.0 if one_unit else rank_parameters.largest_block * (compute + reduced)
        )
        made = rank_parameters.total * behind * compute if one_unit else reducing
        if micro_batches == 1 and not one_unit:
            made += behind * sharded_elements * master
        if one_unit and plan.shard_group_size == 1:
            final = rank_parameters.total * (compute + master)
        else:
            final = sharded_elements * master + unit * (compute + reduced) + alone * master
            if accumulated:  # the reduced gradients, before they are added to earlier micro-batches
                final += unit * master / plan.shard_group_size
    # Gloo's reduce-scatter receives the parts of all other ranks at once.
    receiving = 0.0
    if plan.device == "cpu" and not shards_share:
        receiving = unit * master * (1 - 1 / plan.shard_group_size)
    gathered *= copied
    # FSDP2 frees gathered weights before it reduces; but where they stay gathered from one micro-batch to the
    # next, gradients are reduced beside them, unless they wait for the last.
    let_go = gathered * compute if by_block or accumulates or micro_batches == 1 else 0.0
    late, late_buffer = rank_parameters.embedding * compute, receiving
    if reduced and not (one_unit and let_go >= unit * reduced):
        late_buffer += unit * reduced
    if reduced and accumulated and not accumulates:
        late_buffer += unit * master / plan.shard_group_size
    if has_shared_memory_weights and compute != master:
        # Without common weights the sum has room in freed gathered weights; in 32 bits, where the shards were
        # before they became parts of the common weights.
        late_buffer += unit * master / plan.shard_group_size

    added = 0.0
    if plan.computes_on_master_weights:  # gradients are summed in place
        gathered = let_go = 0.0
        reducing = 0.0 if accumulates else waiting * master
        made = 0.0 if accumulates else rank_parameters.total * behind * master
        added = rank_parameters.pre_block * master if accumulates else 0.0
        final, late, late_buffer = rank_parameters.total * master, rank_parameters.embedding * master, 0.0
        if plan.replicate_group_size > 1 and not plan.compression_methods:
            together = min(final, plan.bucket_bytes)
            if plan.hierarchical:  # received parts of a bucket wait to be added up
                final += 2 * together
            elif replicas_share:
                # Small gradients are summed in memory that the ranks share, and stay there.
                small = rank_parameters.in_tensors_below(plan.bucket_bytes / master) * master
                made, final = max(made - behind * small, 0.0), final - small
                buffers = small * trainable_share
            else:
                final += together

    if plan.compression_methods and plan.data_parallel_size * plan.cp > 1:
        final += _COMPRESSION_COPIES * min(rank_parameters.total * master, _COMPRESSION_CHUNK_BYTES)

    averaged = trainable_share if casts_frozen_weights else 1.0
    average = sharded_elements * master * averaged * int(weight_average)
    outer, under_way = (
        copies * sharded_elements * master * trainable_share for copies in _site_state_copies(plan)
    )
    remainder = error_feedback_bytes(plan, rank_parameters.total, sharded_elements)
    state = optimizer_elements * master
    elsewhere = {"none": 0.0, "host": 0.0, "disk": 0.0}
    if plan.synchronization is not None and plan.synchronization.offload == "host":
        elsewhere["host"] += outer
        outer = 0.0
    elsewhere[plan.offload_parameters] += parameters
    if away and plan.device == "cuda":
        # Then the update runs on the host, where the shards' states are.
        here = "host" if plan.offload_optimizer == "none" else plan.offload_optimizer
        elsewhere[here] += state
        of_shards = 0.0 if accumulates else sharded_elements * master
        elsewhere["host"] += average + sharded_elements * master * trainable_share
        accumulated, final = max(accumulated - of_shards, 0.0), final - of_shards
        made = max(made - behind * of_shards, 0.0)
        state = average = 0.0
    elif plan.offload_optimizer != "none":
        elsewhere[plan.offload_optimizer] += state
        state = min(state, state / max(sharded_elements, 1) * OPTIMIZER_CHUNK_PARAMETERS)
    return ModelStates(
        parameters=(0 if away else parameters) + gathered * compute,
        gathered_parameters=gathered * compute,
        buffers=buffers,
        optimizer=state + average + remainder * trainable_share + outer + under_way,
        accumulated_gradients=accumulated * trainable_share,
        post_block_gradients=waiting * compute * rank_parameters.trainable_post_block_share,
        reduction_workspace=reducing * trainable_share,
        block_gradients=made * trainable_share,
        unaccumulated_gradients=added * trainable_share,
        all_gradients=final * trainable_share,
        released_parameters=let_go,
        receive_buffers=receiving * trainable_share,
        last_gradient=late * rank_parameters.trainable_pre_block_share,
        last_reduction_buffer=late_buffer * trainable_share,
        host=elsewhere["host"],
        disk=elsewhere["disk"],
    )


def _site_state_copies(plan: Plan) -> tuple[float, float]:
    """Return (stored, in flight) copies of a rank's trained parameters for exchanges between sites.

    Stored copies are the outer weights and momentum that all sites share; copies in flight exist between
    steps.
    """
    seldom = plan.synchronization
    if seldom is None:
        return 0.0, 0.0
    if not seldom.has_local_weights:
        return 0.0, seldom.staleness + 1.0
    # Fragments that ranks wait for exist while gradients and activations do not.
    at_once = min(seldom.fragments, -(-seldom.overlap_steps * seldom.fragments // seldom.every))
    return 1.0 + (seldom.momentum > 0), at_once / seldom.fragments
